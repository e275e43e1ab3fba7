"""The comparison of bytes must be able to fail: faults planted in the device are seen."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import attrs
import pytest

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.ports import CopyOutcome
from kvcr_actors.replay import session
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.report import ReplayReport
from kvcr_actors.replay.trace import read_trace, shipped_trace
from kvcr_actors.transfers import Operation


def replay(**values) -> ReplayReport:
    options = ReplayOptions(device_blocks=64, host_blocks=256, store_blocks=1_024, page_bytes=512, **values)
    return session.run_replay(options, read_trace(shipped_trace(), limit=150), lambda _finished: None)


class ShiftedDevice(CpuDevice):
    """Copies one plan in five, in one direction, to or from the host slot after the right one."""

    direction = Direction.TO_HOST

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._plans = itertools.count(1)

    def submit(self, plan: CopyPlan, fences: Sequence[object] = ()) -> Operation[CopyOutcome]:
        if plan.direction is self.direction and next(self._plans) % 5 == 0:
            plan = attrs.evolve(plan, pools=tuple(map(self._shifted, plan.pools)))
        return super().submit(plan, fences)

    def _shifted(self, copy: PoolCopy) -> PoolCopy:
        slots = [(slot + 1) % self.host.slots for slot in copy.host_slots]
        slots, pages = zip(*sorted(zip(slots, copy.device_pages, strict=True)), strict=True)
        return PoolCopy(copy.pool, array("q", pages), array("q", slots))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("pools", [("kv",), ("kv", "swa", "mamba")])
def test_a_host_slot_off_by_one_shows_as_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch, direction: Direction, pools: tuple[str, ...]
) -> None:
    monkeypatch.setattr(session, "CpuDevice", ShiftedDevice)
    monkeypatch.setattr(ShiftedDevice, "direction", direction)
    report = replay(pools=pools)
    assert report.verify.mismatches > 0
    assert not report.healthy


@pytest.mark.parametrize("pools", [("kv",), ("kv", "swa", "mamba")])
def test_without_a_fault_every_byte_is_right(pools: tuple[str, ...]) -> None:
    report = replay(pools=pools)
    assert report.verify.pages > 0
    assert report.faults() == []
