"""An exception on any line of any clean-up: everything is given back and answered all the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from kvcr_actors.actors import prefix_end
from kvcr_actors.actors.confirmation import ConfirmationActor
from kvcr_actors.actors.deposit import DepositActor
from kvcr_actors.actors.filling import Filling
from kvcr_actors.actors.following import SearchFollower
from kvcr_actors.actors.prefetch import PrefetchActor
from kvcr_actors.actors.ready_prefixes import ReadyPrefixes
from kvcr_actors.actors.restore import RestoreActor
from kvcr_actors.actors.staging import StepStaging
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.invariants import check_answers, check_claims, check_host
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from tests.actors.rig import PlantedError, Rig, in_time, live
from tests.planting import Planter, assert_broken, failures_of, planted

FINALISERS: list[Callable[..., Any]] = [
    prefix_end.end_prefix,
    prefix_end._end_once,
    prefix_end.answer_prefix,
    prefix_end.end_ready,
    PrefetchActor._cancel,
    PrefetchActor._end,
    PrefetchActor._forget,
    PrefetchActor._follow_on,
    PrefetchActor._note_idle,
    ReadyPrefixes.conclude,
    ReadyPrefixes._hold_or_end,
    ReadyPrefixes.end_without,
    SearchFollower._conclude,
    HeldPrefix.end,
    HeldPrefix.account,
    Filling.leave,
    Filling._give_back,
    Filling._keep_landed,
    StepStaging.give_back,
    ConfirmationActor._settle,
    ConfirmationActor._give_up,
    ConfirmationActor._end,
    ConfirmationActor._unpin,
    ConfirmationActor._forget,
    DepositActor._fail,
    DepositActor._give_up,
    DepositActor._end,
    DepositActor._shed,
    RestoreActor._settle,
    RestoreActor._finish,
    RestoreActor._end,
    RestoreActor._forget,
    LoopState.release_when_quiet,
    LoopState.abandon_unfilled,
    LoopState.end_deposit,
]


class Planted:
    """Raises once, on the k-th line (from 1) that runs in any finaliser."""

    def __init__(self, k: int) -> None:
        self.raised_in = ""
        self._left = k
        self._codes = {function.__code__ for function in FINALISERS}

    def __enter__(self) -> Planted:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._trace if frame.f_code in self._codes else None

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._left -= 1
            if not self._left:
                self.raised_in = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                raise PlantedError(self.raised_in)
        return self._trace


def sound() -> Rig:
    return Rig(store_latency_s=0.002, restart_backoff_s=0.001)


def late() -> Rig:
    """Copies and reads whose memory is not quiet when they are given up."""
    device = FaultPlan({("to_host", 1): Fault.LATE, ("to_device", 0): Fault.LATE})
    store = FaultPlan({("read", 1): Fault.LATE, ("write", 0): Fault.LATE})
    return Rig(store_latency_s=0.002, restart_backoff_s=0.001, device_faults=device, store_faults=store)


def crowded() -> Rig:
    return Rig(store_latency_s=0.01, restart_backoff_s=0.001, host_slots=6, deposit_queue_pages=1, inbox_limit=1)


def check(rig: Rig, *, quiet: bool = True) -> None:
    """Claims are released, tables empty, orders answered once. A count may be one short where it was to be made."""
    rig.take()
    check_claims(rig.assembly, quiet=quiet)
    check_host(rig.assembly, quiet=quiet)
    check_answers(rig.orders, rig.completions, quiet=quiet)
    state = rig.assembly._state
    assert state is not None
    assert not state.prefixes
    assert not state.depositing
    assert not any(actor["busy"] for actor in rig.assembly.describe()["actors"].values())


async def one_life(make: Callable[[], Rig], lines: Planted) -> None:
    rig = make()
    ended_in_a_port = False
    try:
        async with rig.running():
            with lines, in_time("not over"):
                await live(rig)
                await rig.quiet()
                await rig.ports_quiet()
            if rig.host.is_running:
                check(rig)
    except* PlantedError:
        # A late copy releases its claim in a task of the device, whose error ends the controller.
        ended_in_a_port = True
    check(rig, quiet=not ended_in_a_port)
    assert rig.failure is None


def raise_on_every_line(make: Callable[[], Rig], backend: BackendName = "asyncio-virtual") -> int:
    """Live once for each line; returns how many there were."""
    k = 1
    while True:
        planted = Planted(k)
        try:
            run_virtual(partial(one_life, make, planted), backend=backend)
        except BaseException as error:
            error.add_note(f"after an exception in {planted.raised_in}")
            raise
        if not planted.raised_in:
            return k - 1
        k += 1


@pytest.mark.parametrize("backend", VIRTUAL)
@pytest.mark.parametrize("make", [sound, late, crowded], ids=lambda make: make.__name__)
def test_scenario_16_an_exception_on_any_line_of_any_finaliser_leaves_no_claim_and_no_order_open(
    make: Callable[[], Rig], backend: BackendName
) -> None:
    assert raise_on_every_line(make, backend) > 200


def no_second_try(planter: Planter) -> None:
    """What broke off is not begun again."""

    def only_once(*calls: Callable[[], object]) -> None:
        for call in calls:
            call()

    for module in (
        prefix_end,
        *(sys.modules[one.__module__] for one in (StepStaging, ConfirmationActor, DepositActor, PrefetchActor)),
    ):
        planter.setattr(module, "run_endings", only_once)


def test_scenario_16_without_a_second_try_of_what_broke_off_something_stays_open() -> None:
    with planted(no_second_try) as planter:
        failures = failures_of(partial(raise_on_every_line, sound))
    assert_broken(planter, "AssertionError: (no answer|not quiet|not over) within", failures)
