"""The device contract: checks that a `Device` keeps the promises of its port, for any implementation to run.

Each check takes a factory that makes a fresh device with what an engine does to its pages (see `DeviceFactory`), and
raises ContractError.

    @pytest.mark.parametrize("check", EVERY_DEVICE, ids=lambda check: check.__name__)
    async def test_contract(check): await check(make_bench)
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import anyio.to_thread

from kvcr_actors.core.copy_plan import CopyPlan, Direction, plan_copy
from kvcr_actors.errors import DeadlineError
from kvcr_actors.ports import CopyOutcome
from kvcr_actors.testing.device_driver import DEADLINE_S, PAUSE_S, DeviceDriver, DeviceFactory, benched, driven
from kvcr_actors.testing.services import open_services
from kvcr_actors.testing.store_driver import ContractError, expect

DeviceCheck: TypeAlias = Callable[[DeviceFactory], Awaitable[None]]


async def both_directions_move_exactly_the_plan(make: DeviceFactory) -> None:
    """Random pages over all pools or some, single pages, and a slot that is restored to two pages."""
    async with driven(make) as driver:
        for direction in Direction:
            for pairs in (1, 3, 8):
                await driver.copy(driver.plan(direction, pairs))
            for pool in driver.pools:
                await driver.copy(driver.plan(direction, 5, [pool]))
        pools = len(driver.pools)
        await driver.copy(plan_copy(Direction.TO_DEVICE, [(([6, 1],) * pools, ([3, 3],) * pools)]))


async def a_plan_is_one_launch(make: DeviceFactory) -> None:
    """Eight nodes over all pools are one launch, and end once."""
    async with driven(make) as driver:
        for direction in Direction:
            nodes = [(([node],) * len(driver.pools), ([7 - node],) * len(driver.pools)) for node in range(8)]
            plan = plan_copy(direction, nodes)
            ends: list[CopyOutcome] = []
            operation = driver.submit(plan)
            operation.when_settled(ends.append)
            driver.expect_whole(plan, await driver.end_of(operation))
            expect(len(ends) == 1, "a plan has one outcome")


async def every_fence_is_waited_for_and_never_by_the_caller(make: DeviceFactory) -> None:
    """Three fences, each of them the last: what was written before it is copied, and nothing moves before that."""
    async with driven(make) as driver:
        for direction in Direction:
            for last in range(3):
                plan = driver.plan(direction)
                before, fences = driver.memory(), [driver.fence() for _ in range(3)]
                operation = driver.submit(plan, *(fence for fence, _ in fences))
                for place, (_, set_fence) in enumerate(fences):
                    if place != last:
                        set_fence()
                await anyio.sleep(PAUSE_S)
                expect(not operation.is_settled, "a copy waits for every one of its fences")
                expect(driver.memory() == before, "nothing is written before every fence is set")
                driver.fill_pages()
                expected = driver.memory()
                expected.move(plan)
                fences[last][1]()
                driver.expect_whole(plan, await driver.end_of(operation))
                expect(driver.memory() == expected, "a copy has what was written before its last fence was set")


async def a_fence_that_it_does_not_know_is_an_outcome(make: DeviceFactory) -> None:
    """Nothing is launched for it, also beside a fence that is right."""
    async with driven(make) as driver:
        for direction in Direction:
            await driver.expect_refused(driver.plan(direction), driver.fence()[0], object())
            await driver.copy(driver.plan(direction))


async def a_pool_that_fails_leaves_the_others_be(make: DeviceFactory) -> None:
    """A page or a slot that does not exist fails its own pool, by its name, wherever it is in the plan."""
    async with driven(make) as driver:
        for direction in Direction:
            for pool in driver.pools:
                for page, slot in _outside(driver, pool):
                    await _expect_one_failure(driver, direction, pool, page, slot)
            await driver.copy(driver.plan(direction))


async def the_outcome_comes_on_the_loop_and_before_quiet(make: DeviceFactory) -> None:
    """The bytes are in place when the outcome is told; once the memory is quiet, it is left alone."""
    async with driven(make) as driver:
        for direction in Direction:
            plan = driver.plan(direction)
            expected, heard = driver.memory(), list[tuple[str, int]]()
            expected.move(plan)
            operation = driver.submit(plan)
            in_place: list[bool] = []
            operation.when_quiet(lambda heard=heard: heard.append(("quiet", threading.get_ident())))
            operation.when_settled(lambda _, heard=heard: heard.append(("settled", threading.get_ident())))
            operation.when_settled(
                lambda _, expected=expected, found=in_place: found.append(driver.memory() == expected)
            )
            await driver.end_of(operation)
            expect(in_place == [True], "the bytes are in place when the outcome is told")
            expect([what for what, _ in heard] == ["settled", "quiet"], "an operation settles, and then becomes quiet")
            ours = {thread for _, thread in heard} == {threading.get_ident()}
            expect(ours, "an operation is settled on the loop: come back to it with services.post")
            driver.fill()
            after = driver.memory()
            await anyio.sleep(PAUSE_S)
            expect(driver.memory() == after, "memory that is quiet is left alone")


async def plans_of_one_direction_run_in_order(make: DeviceFactory) -> None:
    """Later plans wait for the first, which waits for its fence; where they write one place, the last one's stay."""
    async with driven(make) as driver:
        for direction in Direction:
            fence, set_fence = driver.fence()
            plans = [_onto_one_place(driver, direction, number) for number in range(6)]
            order: list[int] = []
            operations = [driver.submit(plan, *([] if number else [fence])) for number, plan in enumerate(plans)]
            for number, operation in enumerate(operations):
                operation.when_settled(lambda _, number=number, order=order: order.append(number))
            await anyio.sleep(PAUSE_S)
            expect(not order, "a plan waits for those that were submitted before it in its direction")
            expected = driver.memory()
            for plan in plans:
                expected.move(plan)
            set_fence()
            for operation in operations:
                await driver.end_of(operation)
            expect(order == sorted(order), "plans of one direction end in order of submission")
            expect(driver.memory() == expected, "of plans that write one place, the last one's bytes stay")


async def a_fence_holds_up_no_plan_of_the_other_direction(make: DeviceFactory) -> None:
    """A backup that waits for a step must not keep the restore that the step waits for."""
    async with driven(make) as driver:
        for held in Direction:
            (free,) = (direction for direction in Direction if direction is not held)
            fence, set_fence = driver.fence()
            waiting = driver.submit(driver.plan(held), fence)
            try:
                await driver.copy(driver.plan(free))
            except ContractError as error:
                raise ContractError(f"a fence holds up no plan of the other direction ({error})") from error
            expect(not waiting.is_settled, "a copy waits for its fence")
            set_fence()
            await driver.end_of(waiting)


async def close_lets_copies_end(make: DeviceFactory) -> None:
    """What was submitted before a close has been copied after it; a second close has nothing to do."""
    async with driven(make) as driver:
        expected = driver.memory()
        plans = [driver.plan(direction, pools=[pool]) for pool, direction in enumerate(Direction)]
        operations = [driver.submit(plan) for plan in plans]
        await driver.close()
        for plan, operation in zip(plans, operations, strict=True):
            expect(operation.is_quiet, "a close lets what was submitted end")
            driver.expect_whole(plan, await driver.end_of(operation))
            expected.move(plan)
        expect(driver.memory() == expected, "what was submitted before a close is copied")
        await driver.close()


async def a_close_that_is_late_says_so(make: DeviceFactory) -> None:
    """DeadlineError from each close while a copy runs; when that has ended it is quiet, and the device opens again."""
    async with driven(make) as driver:
        for direction in Direction:
            fence, set_fence = driver.fence()
            running = driver.submit(driver.plan(direction), fence)
            for _ in range(2):
                await driver.expect_late()
                expect(not running.is_quiet, "memory is not quiet before the copy is over")
            await driver.expect_refused(driver.plan(direction))
            set_fence()
            await driver.close()
            expect(running.is_quiet, "after a close that was in time all memory is quiet")
            await driver.open()
            await driver.copy(driver.plan(direction))


async def a_device_that_is_not_open_refuses(make: DeviceFactory) -> None:
    """Before the open and after the close a submit is an outcome; a close bears being called at any time."""
    async with benched(make) as driver:
        await driver.expect_refused(driver.plan(Direction.TO_HOST))
        await driver.close()
        await driver.open()
        await driver.close()
        for direction in Direction:
            await driver.expect_refused(driver.plan(direction))


async def it_opens_again(make: DeviceFactory) -> None:
    """A device has several lives, one after the other."""
    async with benched(make) as driver:
        for _ in range(3):
            await driver.open()
            for direction in Direction:
                await driver.copy(driver.plan(direction))
            await driver.close()


async def a_life_after_a_late_one_starts_afresh(make: DeviceFactory) -> None:
    """A copy that outlived its loop cannot tell its end there; the next life waits for nothing of it."""
    async with benched(make) as driver:
        for direction in Direction:
            fence, set_fence = driver.fence()
            async with open_services() as services:
                await driver.open(services)
                driver.submit(driver.plan(direction), fence)
                threads = await driver.expect_late()
            set_fence()
            for thread in threads:
                await anyio.to_thread.run_sync(thread.join, DEADLINE_S)
            await driver.open()
            await driver.copy(driver.plan(direction))
            try:
                await driver.close()
            except DeadlineError as error:
                raise ContractError(f"a life waits for nothing of the one before: {error}") from error


async def it_describes_itself_in_plain_values(make: DeviceFactory) -> None:
    """At any time: closed, open, with a copy that waits."""
    async with benched(make) as driver:
        _expect_plain(driver)
        await driver.open()
        fence, set_fence = driver.fence()
        running = driver.submit(driver.plan(Direction.TO_HOST), fence)
        _expect_plain(driver)
        set_fence()
        await driver.end_of(running)
        await driver.close()
        _expect_plain(driver)


EVERY_DEVICE: tuple[DeviceCheck, ...] = (
    both_directions_move_exactly_the_plan,
    a_plan_is_one_launch,
    every_fence_is_waited_for_and_never_by_the_caller,
    a_fence_that_it_does_not_know_is_an_outcome,
    a_pool_that_fails_leaves_the_others_be,
    the_outcome_comes_on_the_loop_and_before_quiet,
    plans_of_one_direction_run_in_order,
    a_fence_holds_up_no_plan_of_the_other_direction,
    close_lets_copies_end,
    a_close_that_is_late_says_so,
    a_device_that_is_not_open_refuses,
    it_opens_again,
    a_life_after_a_late_one_starts_afresh,
    it_describes_itself_in_plain_values,
)


def _outside(driver: DeviceDriver, pool: int) -> list[tuple[int, int]]:
    """Pairs of a page and a slot of which one does not exist."""
    pages, slots = driver.device.pages_of(pool), driver.device.host.slots_of(pool)
    return [(pages, 0), (-1, 0), (0, slots), (0, -1)]


async def _expect_one_failure(driver: DeviceDriver, direction: Direction, pool: int, page: int, slot: int) -> None:
    layout = driver.device.layout
    plan = driver.plan_with(driver.plan(direction), {pool: (page, slot)})
    others = CopyPlan(direction, tuple(copy for copy in plan.pools if copy.pool != pool))
    expected = driver.memory()
    expected.move(others)
    outcome = await driver.end_of(driver.submit(plan))
    expect(set(outcome.failed) == {pool}, "a page or slot that does not exist fails its pool, and no other")
    is_named = layout.pools[pool].name in outcome.failed[pool]
    expect(is_named, f"the error of a pool names it: {outcome.failed[pool]!r}")
    expect(
        outcome.bytes == others.bytes_for(layout), "the bytes of an outcome are those of the pools that did not fail"
    )
    found = driver.memory()
    for other in driver.pools:
        if other != pool:
            same = (found.pages[other], found.slots[other]) == (expected.pages[other], expected.slots[other])
            expect(same, "the other pools of a plan are copied")
    named = {copy.pool: copy.host_slots if direction is Direction.TO_HOST else copy.device_pages for copy in plan.pools}
    for memory in (found, expected):  # what the failed pool was to write is undefined, and nothing else is
        written = memory.slots[pool] if direction is Direction.TO_HOST else memory.pages[pool]
        for place in set(named[pool]) & set(range(len(written))):
            written[place] = b""
    expect(found == expected, "a pool that fails writes to none but the pages or slots that its plan names")


def _onto_one_place(driver: DeviceDriver, direction: Direction, number: int) -> CopyPlan:
    """A plan whose sources only this number has, and whose targets all numbers share."""
    pools = len(driver.pools)
    if direction is Direction.TO_HOST:
        return plan_copy(direction, [(([number],) * pools, ([7],) * pools)])
    return plan_copy(direction, [(([7],) * pools, ([number],) * pools)])


def _expect_plain(driver: DeviceDriver) -> None:
    description = driver.device.describe()
    try:
        json.dumps(description)
    except (TypeError, ValueError) as error:
        raise ContractError(f"a description has plain values alone: {error}") from error
    expect(bool(description), "a description says something")
