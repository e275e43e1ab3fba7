"""Each promise of the device contract can be broken: the device of the page, with one fault each, fails the check."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvcr_actors.ports import CopyOutcome, Direction, Operation
from kvcr_actors.testing import device_contract as contract
from kvcr_actors.testing import device_driver
from kvcr_actors.testing.store_driver import ContractError
from tests.pages import code_of_page

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

CODE = code_of_page(Path("docs/write_a_device.md"))
ArrayDevice: Any = CODE["ArrayDevice"]


class ForgetsTheLastPair(ArrayDevice):
    def _copy(self, direction: Any, copy: Any) -> int:
        return super()._copy(
            direction, attrs.evolve(copy, device_pages=copy.device_pages[:-1], host_slots=copy.host_slots[:-1])
        )


class CopiesOneMore(ArrayDevice):
    def _run(self, plan: Any, fences: Any) -> CopyOutcome:
        outcome = super()._run(plan, fences)
        self.pools[0][-1] ^= 1
        return outcome


class LaunchesEachPool(ArrayDevice):
    def _run(self, plan: Any, fences: Any) -> CopyOutcome:
        return attrs.evolve(super()._run(plan, fences), launches=len(plan.pools))


class WaitsForTheFirstFence(ArrayDevice):
    def _run(self, plan: Any, fences: Any) -> CopyOutcome:
        return super()._run(plan, fences[:1])


class WaitsInSubmit(ArrayDevice):
    def submit(self, plan: Any, fences: Any = ()) -> Any:
        for fence in fences:
            fence.wait()
        return super().submit(plan, fences)


class RaisesForAFence(ArrayDevice):
    def submit(self, plan: Any, fences: Any = ()) -> Any:
        if not all(isinstance(fence, threading.Event) for fence in fences):
            raise TypeError("a fence")
        return super().submit(plan, fences)


class IgnoresAFence(ArrayDevice):
    def submit(self, plan: Any, fences: Any = ()) -> Any:
        return super().submit(
            plan, [fence for fence in fences if isinstance(fence, threading.Event) and fence.is_set()]
        )


class FailsAsAWhole(ArrayDevice):
    def _run(self, plan: Any, fences: Any) -> CopyOutcome:
        outcome = super()._run(plan, fences)
        return CODE["_failed"](plan, "kv, swa or mamba") if outcome.failed else outcome


class NamesNoPool(ArrayDevice):
    def _run(self, plan: Any, fences: Any) -> CopyOutcome:
        outcome = super()._run(plan, fences)
        return attrs.evolve(outcome, failed=dict.fromkeys(outcome.failed, "bad index"))


class TakesMinusOneForTheLast(ArrayDevice):
    def _copy(self, direction: Any, copy: Any) -> int:
        return super()._copy(direction, attrs.evolve(copy, device_pages=[max(page, 0) for page in copy.device_pages]))


class ClampsAndTells(ArrayDevice):
    """Fails the pool as it must, but writes to a place that the plan does not name."""

    def _copy(self, direction: Any, copy: Any) -> int:
        if min(copy.host_slots) < 0:
            self._slots[copy.pool][:] = 0
            self.pools[copy.pool][:] = 0
        return super()._copy(direction, copy)


class SettlesBeforeItCopies(ArrayDevice):
    def _run(self, plan: Any, fences: Any) -> CopyOutcome:
        time.sleep(0.05)
        return super()._run(plan, fences)

    def submit(self, plan: Any, fences: Any = ()) -> Any:
        under_way = super().submit(plan, fences)
        if under_way.is_settled:
            return under_way
        early: Operation[CopyOutcome] = Operation()
        early.settle(CopyOutcome(plan.bytes_for(self.layout)), quiet=False)
        under_way.when_quiet(early.become_quiet)
        return early


class SettlesOnItsThread(ArrayDevice):
    def _work(self, queue: Any) -> None:
        self._services = self
        super()._work(queue)

    def post(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # trio refuses what asyncio takes without a word
            call()


class WritesOn(ArrayDevice):
    """Writes still when the memory is another's."""

    def _end(self, operation: Any, outcome: Any) -> None:
        super()._end(operation, outcome)
        threading.Thread(target=self._spoil, daemon=True).start()

    def _spoil(self) -> None:
        for _ in range(40):
            time.sleep(0.005)
            self._slots[0][0] += 1


class HasAThreadAPlan(ArrayDevice):
    def submit(self, plan: Any, fences: Any = ()) -> Any:
        operation: Operation[CopyOutcome] = Operation()
        self._running.add(operation)
        one: Any = CODE["SimpleQueue"]()
        one.put((plan, fences, operation))
        one.put(None)
        threading.Thread(target=self._work, args=(one,), daemon=True).start()
        return operation


class HasOneThread(ArrayDevice):
    async def open(self, services: Any) -> None:
        await super().open(services)
        self._queues[Direction.TO_DEVICE] = self._queues[Direction.TO_HOST]


class ClosesAtOnce(ArrayDevice):
    async def close(self, deadline_s: float) -> None:
        self._queues = {}


class SaysOnceThatItIsLate(ArrayDevice):
    async def close(self, deadline_s: float) -> None:
        if self._queues or deadline_s > 1:
            await super().close(deadline_s)


class RaisesWhenItIsClosed(ArrayDevice):
    def submit(self, plan: Any, fences: Any = ()) -> Any:
        if not self._queues:
            raise RuntimeError("closed")
        return super().submit(plan, fences)


class CountsARefusedLaunch(ArrayDevice):
    def submit(self, plan: Any, fences: Any = ()) -> Any:
        operation = super().submit(plan, fences)
        found = operation.settled_outcome()
        return operation if found is None else Operation[CopyOutcome].finished(attrs.evolve(found, launches=1))


class OpensOnce(ArrayDevice):
    async def open(self, services: Any) -> None:
        if not self._threads:
            await super().open(services)


class WaitsForAnEarlierLife(ArrayDevice):
    async def open(self, services: Any) -> None:
        running = self._running
        await super().open(services)
        self._running = running


class DescribesItsThreads(ArrayDevice):
    def describe(self) -> dict[str, object]:
        return {"threads": list(self._threads), "device": self}


@pytest.mark.parametrize(
    ("fault", "check", "promise"),
    [
        (ForgetsTheLastPair, contract.both_directions_move_exactly_the_plan, "tells the bytes"),
        (CopiesOneMore, contract.both_directions_move_exactly_the_plan, "and no others, each with its bytes"),
        (LaunchesEachPool, contract.a_plan_is_one_launch, "one launch"),
        (WaitsForTheFirstFence, contract.every_fence_is_waited_for_and_never_by_the_caller, "every one of its fences"),
        (WaitsInSubmit, contract.every_fence_is_waited_for_and_never_by_the_caller, "a submit waits for no fence"),
        (RaisesForAFence, contract.a_fence_that_it_does_not_know_is_an_outcome, "not an exception"),
        (IgnoresAFence, contract.a_fence_that_it_does_not_know_is_an_outcome, "refused fails all its pools"),
        (FailsAsAWhole, contract.a_pool_that_fails_leaves_the_others_be, "and no other"),
        (NamesNoPool, contract.a_pool_that_fails_leaves_the_others_be, "names it"),
        (TakesMinusOneForTheLast, contract.a_pool_that_fails_leaves_the_others_be, "that does not exist fails"),
        (ClampsAndTells, contract.a_pool_that_fails_leaves_the_others_be, "writes to none but"),
        (SettlesBeforeItCopies, contract.the_outcome_comes_on_the_loop_and_before_quiet, "in place when the outcome"),
        (SettlesOnItsThread, contract.the_outcome_comes_on_the_loop_and_before_quiet, "settle"),
        (WritesOn, contract.the_outcome_comes_on_the_loop_and_before_quiet, "quiet is left alone"),
        (HasAThreadAPlan, contract.plans_of_one_direction_run_in_order, "submitted before it"),
        (HasOneThread, contract.a_fence_holds_up_no_plan_of_the_other_direction, "holds up no plan"),
        (ClosesAtOnce, contract.close_lets_copies_end, "lets what was submitted end"),
        (ClosesAtOnce, contract.a_close_that_is_late_says_so, "raises DeadlineError"),
        (SaysOnceThatItIsLate, contract.a_close_that_is_late_says_so, "and so does the next"),
        (RaisesWhenItIsClosed, contract.a_device_that_is_not_open_refuses, "not an exception"),
        (CountsARefusedLaunch, contract.a_device_that_is_not_open_refuses, "is no launch"),
        (OpensOnce, contract.it_opens_again, "the device is not open"),
        (WaitsForAnEarlierLife, contract.a_life_after_a_late_one_starts_afresh, "nothing of the one before"),
        (DescribesItsThreads, contract.it_describes_itself_in_plain_values, "plain values"),
    ],
)
async def test_a_broken_promise_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fault: type[Any], check: contract.DeviceCheck, promise: str
) -> None:
    monkeypatch.setattr(device_driver, "DEADLINE_S", 0.3)  # some faults are told by what never comes
    monkeypatch.setitem(CODE, "ArrayDevice", fault)
    with pytest.raises(ContractError, match=promise):
        await check(CODE["make_bench"])


def test_every_check_has_a_fault_that_it_notices() -> None:
    (mark,) = [mark for mark in test_a_broken_promise_is_noticed.pytestmark if mark.name == "parametrize"]
    assert {check for _, check, _ in mark.args[1]} == set(contract.EVERY_DEVICE)
