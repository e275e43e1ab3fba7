"""Where each page that a request asked for came from, or why it did not: one terminal answer a page."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvcr_actors.types import MissReason


@attrs.frozen
class TierAccount:
    """Pages asked of one tier: `queried == used + sum(reasons.values())`, always."""

    queried: int = 0
    used: int = 0
    reasons: Mapping[MissReason, int] = attrs.field(factory=dict[MissReason, int])


@attrs.frozen
class RequestAccount:
    """One request's pages beyond the device: what host and store gave, and one terminal reason for each other page."""

    host: TierAccount
    store: TierAccount
    reasons: Mapping[MissReason, int]


@attrs.frozen
class PrefixOutcome:
    """How far one request's prefix came, in pages from the root.

    `device <= total` pages were on the device. `host` is the leading run found in host memory, `ready` what stood
    ready in host memory after the store's reads, `ordered` what a restore was to bring to the device, `used` what the
    device has at the end. Pages from `max(ready, device)` on were not found, for `miss`. Of those that were ready but
    not used, the ones that were ordered have `short` as their reason, the others `drop`.
    """

    total: int
    device: int
    host: int
    ready: int
    used: int
    miss: MissReason
    drop: MissReason = MissReason.NOT_RESTORED
    store_on: bool = True
    ordered: int = 0
    short: MissReason = MissReason.INCOMPLETE


def settle(outcome: PrefixOutcome) -> RequestAccount:
    """Account for every page of `[device, total)` exactly once, for each tier and in all.

    Without a store, whatever stood ready came from the host.
    """
    device = outcome.device
    host_end = max(device, outcome.host if outcome.store_on else max(outcome.host, outcome.ready))
    ready_end = max(host_end, outcome.ready)
    used_end = min(max(device, outcome.used), ready_end)
    short_end = min(max(used_end, outcome.ordered), ready_end)
    unused = ((used_end, short_end, outcome.short), (short_end, ready_end, outcome.drop))

    def dropped(start: int, end: int) -> list[tuple[MissReason, int]]:
        return [(reason, max(0, min(end, last) - max(start, first))) for first, last, reason in unused]

    host_used = max(0, min(used_end, host_end) - device)
    passed_on = outcome.total - host_end
    missed = (outcome.miss, outcome.total - ready_end)

    absent = MissReason.ABSENT if outcome.store_on else outcome.miss
    host = TierAccount(outcome.total - device, host_used, _counts(*dropped(device, host_end), (absent, passed_on)))
    store = TierAccount()
    if outcome.store_on:
        store_used = max(0, used_end - host_end)
        store = TierAccount(passed_on, store_used, _counts(*dropped(host_end, ready_end), missed))
    return RequestAccount(host, store, _counts(*dropped(device, ready_end), missed))


def _counts(*pairs: tuple[MissReason, int]) -> dict[MissReason, int]:
    counts: dict[MissReason, int] = {}
    for reason, count in pairs:
        if count:
            counts[reason] = counts.get(reason, 0) + count
    return counts
