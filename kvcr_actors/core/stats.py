"""Plain counters of one controller; the metrics registry and the reports read them."""

from __future__ import annotations

import copy
from collections import Counter

import attrs

from kvcr_actors.core.accounting import RequestAccount, TierAccount
from kvcr_actors.types import MissReason, SkipReason


@attrs.define
class TierTotals:
    """Sums of the accounts of one tier, in pages."""

    queried: int = 0
    used: int = 0
    reasons: Counter[MissReason] = attrs.field(factory=Counter)

    def add(self, account: TierAccount) -> None:
        """Add one request's account."""
        self.queried += account.queried
        self.used += account.used
        self.reasons.update(account.reasons)


@attrs.define
class BackupTotals:
    """Device-to-host copies: nodes with something to copy, and the steps that had at least one such node.

    Both are counted before the launch, `submits` only if the device did launch: one a step, or the launch failed.
    """

    nodes: int = 0
    steps: int = 0
    submits: int = 0
    slices: int = 0
    bytes: int = 0
    skipped: Counter[SkipReason] = attrs.field(factory=Counter)
    """Nodes that were not backed up."""


@attrs.define
class PrefetchTotals:
    """Prefetches by how they ended, in requests; `used` ended in a restore of at least one page."""

    started: int = 0
    used: int = 0
    cancelled: int = 0
    failed: int = 0


@attrs.define
class DepositTotals:
    """Pages written to the store, or not and why."""

    deposited: int = 0
    retried: int = 0
    shed: int = 0
    """Pages that found the queue full; offered again when there is room, so that one may be counted more than once."""
    skipped: Counter[SkipReason] = attrs.field(factory=Counter)


@attrs.define
class ControllerStats:
    """All counters. One thread writes an instance; readers on others may see a step half counted."""

    host: TierTotals = attrs.field(factory=TierTotals)
    store: TierTotals = attrs.field(factory=TierTotals)
    reasons: Counter[MissReason] = attrs.field(factory=Counter)
    """Terminal reasons of pages that neither host nor store gave."""
    backup: BackupTotals = attrs.field(factory=BackupTotals)
    prefetch: PrefetchTotals = attrs.field(factory=PrefetchTotals)
    deposit: DepositTotals = attrs.field(factory=DepositTotals)
    store_evicted: int = 0
    store_faults: int = 0
    """Calls of the store that raised, and background tasks of it that did."""
    host_evicted: int = 0
    restore_submits: int = 0
    restored_pages: int = 0
    events_published: int = 0
    events_dropped: int = 0

    def merged(self, other: ControllerStats) -> ControllerStats:
        """Add the counters that an engine's own thread keeps to these, in a copy."""
        both = copy.deepcopy(self)
        for mine, theirs in ((both.host, other.host), (both.store, other.store)):
            mine.queried += theirs.queried
            mine.used += theirs.used
            mine.reasons.update(theirs.reasons)
        both.reasons.update(other.reasons)
        both.backup.skipped.update(other.backup.skipped)
        both.prefetch.started += other.prefetch.started
        both.prefetch.cancelled += other.prefetch.cancelled
        both.events_dropped += other.events_dropped
        return both

    def settle(self, account: RequestAccount) -> None:
        """Add one request's final account."""
        self.host.add(account.host)
        self.store.add(account.store)
        self.reasons.update(account.reasons)
