"""Ready prefixes that are given up before their restore: no page of the device is lost, and the books balance."""

from __future__ import annotations

import itertools

import pytest

from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.replay import session
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.report import ReplayReport
from kvcr_actors.replay.trace import read_trace, shipped_trace
from kvcr_actors.types import MissReason, RestoreOrder


def replay(**values: int) -> ReplayReport:
    options = ReplayOptions(device_blocks=64, host_blocks=256, store_blocks=1_024, page_bytes=64, **values)
    return session.run_replay(options, read_trace(shipped_trace(), limit=150), lambda _finished: None)


class FullRestores(CacheController):
    """Every third restore order is answered as one that finds its inbox full: the prefix is cancelled."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._orders = itertools.count(1)

    def restore(self, order: RestoreOrder) -> None:
        if next(self._orders) % 3:
            super().restore(order)
        else:
            self.cancel(order.request_id)


def test_the_pages_of_a_restore_that_never_runs_are_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CacheController", FullRestores)
    report = replay(concurrency=8)
    assert report.prefetch.cancelled > 0
    assert report.faults() == []
    assert (report.device.in_flight, report.device.capacity) == (0, 64)


def test_a_prefix_that_expires_while_it_waits_for_room_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ControllerConfig(claim_lifetime_s=1e-6, poison_freed_pages=True)
    monkeypatch.setattr(session, "_config", lambda _options: config)
    report = replay(concurrency=16)
    assert report.reasons[MissReason.NOT_RESTORED] > 0
    assert report.faults() == []
