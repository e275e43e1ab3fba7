"""What a replay measured: counters, the identities that they must obey, and the report's JSON form."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs

from kvcr_actors.core.accounting import RequestAccount
from kvcr_actors.core.stats import BackupTotals, ControllerStats, PrefetchTotals, TierTotals
from kvcr_actors.types import MissReason, SkipReason, Tier

Json: TypeAlias = dict[str, Any]


@attrs.define
class StoreResult:
    """Pages that the store took, did not take, and let go."""

    deposited: int = 0
    failed: int = 0
    evicted: int = 0
    skipped: Counter[SkipReason] = attrs.field(factory=Counter[SkipReason])
    """Why pages were not taken: `failed` in all."""


@attrs.define
class VerifyResult:
    """Restored pages that were compared on the device, and those whose bytes were wrong."""

    pages: int = 0
    mismatches: int = 0


@attrs.define
class ClaimResult:
    """The ledger at the end of the run, after the drain."""

    taken: int = 0
    released: int = 0
    open: int = 0
    quarantined: int = 0


@attrs.define
class DevicePages:
    """Where the device's pages are at the end: free, held by the tier, or named by a restore that is not over."""

    capacity: int = 0
    free: int = 0
    held: int = 0
    in_flight: int = 0


@attrs.define
class EventResult:
    """Inventory events, and whether an index built from them alone equals every tier's content."""

    published: int = 0
    index_matches: bool = False


@attrs.define
class Timing:
    """Wall time of the run, and of the scheduler thread's share in each step."""

    wall_s: float = 0.0
    step_ns: array[int] = attrs.field(factory=lambda: array("q"))

    def step_us(self, percent: int) -> float:
        """Give the nearest-rank percentile over all steps, in microseconds; 0 without steps."""
        if not self.step_ns:
            return 0.0
        ranked = sorted(self.step_ns)
        return ranked[max(0, -(-len(ranked) * percent // 100) - 1)] / 1_000


class HitSeries:
    """Blocks asked for and found in each tier, a row a request in order of finish."""

    def __init__(self) -> None:
        self._asked = array("q")
        self._hits = {tier: array("q") for tier in Tier}

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, asked: int, hits: Mapping[Tier, int]) -> None:
        """Add one request."""
        self._asked.append(asked)
        for tier, column in self._hits.items():
            column.append(hits[tier])

    def ratios(self, buckets: int) -> tuple[list[int], dict[Tier, list[float]]]:
        """Give at most `buckets` groups of requests: where each ends, and each tier's share of the blocks asked for."""
        width = max(1, -(-len(self) // buckets))
        ends = [min(start + width, len(self)) for start in range(0, len(self), width)]
        ratios: dict[Tier, list[float]] = {}
        for tier, column in self._hits.items():
            ratios[tier] = [
                sum(column[start:end]) / max(1, sum(self._asked[start:end]))
                for start, end in zip([0, *ends], ends, strict=False)
            ]
        return ends, ratios


@attrs.define
class ReplayReport:
    """Everything that one replay counted; the engine fills it, `identities` checks it."""

    requests: int = 0
    blocks: int = 0
    hits: dict[Tier, int] = attrs.field(factory=lambda: dict.fromkeys(Tier, 0))
    reasons: Counter[MissReason] = attrs.field(factory=Counter)
    """Terminal reasons: one for each block that was not a hit."""
    tiers: dict[Tier, TierTotals] = attrs.field(factory=lambda: {tier: TierTotals() for tier in Tier})
    backup: BackupTotals = attrs.field(factory=BackupTotals)
    prefetch: PrefetchTotals = attrs.field(factory=PrefetchTotals)
    store: StoreResult = attrs.field(factory=StoreResult)
    verify: VerifyResult = attrs.field(factory=VerifyResult)
    claims: ClaimResult = attrs.field(factory=ClaimResult)
    device: DevicePages = attrs.field(factory=DevicePages)
    events: EventResult = attrs.field(factory=EventResult)
    timing: Timing = attrs.field(factory=Timing)
    peak_bytes: int = 0
    """The most memory that the whole process has had at a time, the Python and torch that it runs on included."""
    series: HitSeries = attrs.field(factory=HitSeries)

    def count_request(self, blocks: int, device_hits: int, account: RequestAccount) -> None:
        """Count one finished request; `account` tells of its blocks beyond the device's leading run."""
        hits = {Tier.DEVICE: device_hits, Tier.HOST: account.host.used, Tier.STORE: account.store.used}
        self.requests += 1
        self.blocks += blocks
        for tier, count in hits.items():
            self.hits[tier] += count
        self.reasons.update(account.reasons)
        device = self.tiers[Tier.DEVICE]
        device.queried += blocks
        device.used += device_hits
        if blocks > device_hits:
            device.reasons[MissReason.ABSENT] += blocks - device_hits
        self.series.add(blocks, hits)

    def take_stats(self, stats: ControllerStats) -> None:
        """Take over what the controller counted, at the end."""
        self.tiers[Tier.HOST] = stats.host
        self.tiers[Tier.STORE] = stats.store
        self.backup = stats.backup
        self.prefetch = stats.prefetch
        deposit = stats.deposit
        self.store = StoreResult(deposit.deposited, deposit.skipped.total(), stats.store_evicted, deposit.skipped)
        self.events.published = stats.events_published

    def identities(self) -> list[str]:
        """Name every identity that does not hold; none when the books balance."""
        hits, reasons = sum(self.hits.values()), self.reasons.total()
        host, claims, device = self.tiers[Tier.HOST], self.claims, self.device
        sums = [("blocks = hits + reasons", self.blocks, hits + reasons)]
        for tier, totals in self.tiers.items():
            sums.append((f"{tier}: queried = used + reasons", totals.queried, totals.used + totals.reasons.total()))
            sums.append((f"hits.{tier} = used", self.hits[tier], totals.used))
        sums += [
            ("device.queried = blocks", self.tiers[Tier.DEVICE].queried, self.blocks),
            ("claims: taken = released + open", claims.taken, claims.released + claims.open),
            (
                "device pages: free + held + in flight = capacity",
                device.free + device.held + device.in_flight,
                device.capacity,
            ),
            ("verify.pages = hits.host + hits.store", self.verify.pages, self.hits[Tier.HOST] + self.hits[Tier.STORE]),
        ]
        broken = [f"{name}: {left} is not {right}" for name, left, right in sums if left != right]
        limits = [
            ("store.queried <= host.queried - host.used", self.tiers[Tier.STORE].queried, host.queried - host.used),
            ("backup.submits <= backup.steps", self.backup.submits, self.backup.steps),
            ("claims: quarantined <= open", claims.quarantined, claims.open),
        ]
        return broken + [f"{name}: {left} is more than {right}" for name, left, right in limits if left > right]

    def faults(self) -> list[str]:
        """Say in words why the run is unhealthy; none when it is healthy."""
        checks = [
            (self.verify.mismatches, f"{self.verify.mismatches} restored pages held wrong bytes"),
            (self.claims.open, f"{self.claims.open} claims are still open"),
            (not self.events.index_matches, "the index built from events differs from the tiers' content"),
        ]
        return [words for wrong, words in checks if wrong] + [f"identity broken: {name}" for name in self.identities()]

    @property
    def healthy(self) -> bool:
        """Whether no byte was wrong, no claim is open, the events tell the content, and the books balance."""
        return not self.faults()

    def to_json(self) -> Json:
        """Give the report as plain values; counters without a count are left out of the reasons."""
        wall = self.timing.wall_s
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "hits": _plain(self.hits),
            "reasons": _plain(self.reasons),
            "tiers": {
                tier.value: {"queried": totals.queried, "used": totals.used, "reasons": _plain(totals.reasons)}
                for tier, totals in self.tiers.items()
            },
            "backup": attrs.asdict(self.backup, recurse=False) | {"skipped": _plain(self.backup.skipped)},
            "prefetch": attrs.asdict(self.prefetch),
            "store": attrs.asdict(self.store, recurse=False) | {"skipped": _plain(self.store.skipped)},
            "verify": attrs.asdict(self.verify),
            "claims": attrs.asdict(self.claims),
            "device_pages": attrs.asdict(self.device),
            "events": attrs.asdict(self.events),
            "timing": {
                "wall_s": round(wall, 3),
                "blocks_per_s": round(self.blocks / wall, 1) if wall else 0.0,
                "scheduler_us_per_step": {"p50": self.timing.step_us(50), "p99": self.timing.step_us(99)},
            },
            "memory": {"peak_bytes": self.peak_bytes},
        }


def _plain(counts: Mapping[Tier, int] | Mapping[MissReason, int] | Mapping[Any, int]) -> dict[str, int]:
    return {str(key): count for key, count in counts.items() if count or isinstance(key, Tier)}
