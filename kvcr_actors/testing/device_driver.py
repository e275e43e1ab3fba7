"""A device under test, opened with services, and the moves that a contract makes with it in an engine's place."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import anyio
import attrs

from kvcr_actors.core.copy_plan import CopyPlan, Direction, PoolCopy, plan_copy
from kvcr_actors.errors import DeadlineError, ThreadDeadlineError
from kvcr_actors.ports import CopyOutcome, Device
from kvcr_actors.runtime.supervisor import raising_sole_cause
from kvcr_actors.testing.services import RecordingServices, open_services
from kvcr_actors.testing.store_driver import ContractError, expect
from kvcr_actors.transfers import Operation

DEADLINE_S = 20.0
"""What a check waits for anything that must come."""

PAUSE_S = 0.02
"""What a check gives a device to do what it must not."""


@attrs.frozen
class DeviceBench:
    """A fresh device that is not open, and what checks do in the engine's place; they do it on the loop.

    `load(pool, pages, content)` writes pages as the engine would, `gather(pool, pages)` reads them; content is one page
    of `page_bytes` after the other. `make_fence()` gives a fence for `submit`, and the call that sets it.
    """

    device: Device
    load: Callable[[int, Sequence[int], bytes], None]
    gather: Callable[[int, Sequence[int]], bytes]
    make_fence: Callable[[], tuple[object, Callable[[], None]]]


DeviceFactory: TypeAlias = Callable[[], DeviceBench]
"""Makes a fresh device over `store_driver.LAYOUT`, with 8 pages and 8 page-first host slots a pool, or more."""


@attrs.define
class Memory:
    """All bytes of both sides: `pages[pool][page]` and `slots[pool][slot]`."""

    pages: list[list[bytes]]
    slots: list[list[bytes]]

    def move(self, plan: CopyPlan) -> None:
        """Do what a device must do."""
        for copy in plan.pools:
            pages, slots = self.pages[copy.pool], self.slots[copy.pool]
            for page, slot in zip(copy.device_pages, copy.host_slots, strict=True):
                if plan.direction is Direction.TO_HOST:
                    slots[slot] = pages[page]
                else:
                    pages[page] = slots[slot]


@attrs.define
class DeviceDriver:
    """Copies between a device's pages and its host slots, and knows what must be there afterwards."""

    bench: DeviceBench
    services: RecordingServices
    rng: random.Random = attrs.field(factory=lambda: random.Random(0))
    fences: list[Callable[[], None]] = attrs.field(factory=list[Callable[[], None]])

    @property
    def device(self) -> Device:
        """The device under test."""
        return self.bench.device

    @property
    def pools(self) -> range:
        """Its pools."""
        return range(len(self.device.layout.pools))

    async def open(self, services: RecordingServices | None = None) -> None:
        """Open the device, with other services if they are given."""
        with anyio.fail_after(DEADLINE_S):
            await self.device.open(self.services if services is None else services)

    async def close(self, deadline_s: float | None = None) -> None:
        """Close the device."""
        with anyio.fail_after(2 * DEADLINE_S):
            await self.device.close(DEADLINE_S if deadline_s is None else deadline_s)

    async def end(self) -> None:
        """Set every fence and close, also in a block that is cancelled."""
        self.set_all()
        with anyio.CancelScope(shield=True):
            await self.close()

    def fence(self) -> tuple[object, Callable[[], None]]:
        """Make a fence; one that the check does not set is set at its end."""
        fence, set_fence = self.bench.make_fence()
        self.fences.append(set_fence)
        return fence, set_fence

    def set_all(self) -> None:
        """Set every fence."""
        for set_fence in self.fences:
            set_fence()

    def submit(self, plan: CopyPlan, *fences: object) -> Operation[CopyOutcome]:
        """Submit a plan. If that waits for a fence, all are set after a while, and it is told as broken."""
        rescued = threading.Event()

        def rescue() -> None:
            rescued.set()
            self.set_all()

        timer = threading.Timer(DEADLINE_S, rescue)
        timer.start()
        try:
            operation = self.device.submit(plan, fences)
        except Exception as error:
            raise ContractError(f"a submit that fails is an outcome, not an exception: {error!r}") from error
        finally:
            timer.cancel()
        expect(not rescued.is_set(), "a submit waits for no fence")
        return operation

    async def end_of(self, operation: Operation[CopyOutcome]) -> CopyOutcome:
        """The outcome, once the memory is quiet."""
        outcome: CopyOutcome | None = None
        with anyio.move_on_after(DEADLINE_S):
            outcome = await operation.outcome()
            await operation.quiet()
        if outcome is None or not operation.is_quiet:
            raise ContractError("every operation settles and becomes quiet")
        return outcome

    async def copy(self, plan: CopyPlan) -> None:
        """Run a plan that nothing is wrong with, and check every byte of both sides."""
        expected = self.memory()
        expected.move(plan)
        outcome = await self.end_of(self.submit(plan))
        self.expect_whole(plan, outcome)
        expect(self.memory() == expected, "a copy writes the plan's pages or slots and no others, each with its bytes")

    def expect_whole(self, plan: CopyPlan, outcome: CopyOutcome) -> None:
        """Check the words of an outcome without failures."""
        expect(not outcome.failed, f"a plan of pages and slots that exist does not fail: {dict(outcome.failed)}")
        expect(outcome.bytes == plan.bytes_for(self.device.layout), "an outcome tells the bytes that were copied")
        expect(outcome.launches == 1, "a plan is one launch, whatever its pools and pages")
        expect(outcome.slices >= 1, "a plan that was copied took one slice or more")

    async def expect_refused(self, plan: CopyPlan, *fences: object) -> None:
        """Submit what the device must refuse."""
        before = self.memory()
        outcome = await self.end_of(self.submit(plan, *fences))
        expect(
            set(outcome.failed) == {copy.pool for copy in plan.pools}, "a submit that is refused fails all its pools"
        )
        expect((outcome.bytes, outcome.launches) == (0, 0), "a submit that is refused is no launch and copies nothing")
        expect(self.memory() == before, "a submit that is refused changes nothing")

    async def expect_late(self) -> tuple[threading.Thread, ...]:
        """Close while a copy runs; the threads that the error names, if it names some."""
        try:
            await self.close(PAUSE_S)
        except ThreadDeadlineError as error:
            return error.threads
        except DeadlineError:
            return ()
        raise ContractError("a close raises DeadlineError while a copy runs, and so does the next")

    def memory(self) -> Memory:
        """All bytes as they are now."""
        return Memory([self._pages(pool) for pool in self.pools], [self._slots(pool) for pool in self.pools])

    def fill(self) -> None:
        """Give all pages and slots random bytes."""
        for pool in self.pools:
            buffer = self.device.host.buffer(pool)
            buffer[:] = self.rng.randbytes(len(buffer))
        self.fill_pages()

    def fill_pages(self) -> None:
        """Write all pages, as a kernel of the engine's would."""
        for pool in self.pools:
            pages = self.device.pages_of(pool)
            self.bench.load(pool, range(pages), self.rng.randbytes(pages * self._page_bytes(pool)))

    def plan(self, direction: Direction, pairs: int = 4, pools: Sequence[int] | None = None) -> CopyPlan:
        """Pair `pairs` random pages with random slots in each of `pools`, all of them unless given."""
        chosen = self.pools if pools is None else pools
        pages = [self._some(self.device.pages_of(pool), pairs if pool in chosen else 0) for pool in self.pools]
        slots = [self._some(self.device.host.slots_of(pool), pairs if pool in chosen else 0) for pool in self.pools]
        return plan_copy(direction, [(tuple(pages), tuple(slots))])

    def plan_with(self, plan: CopyPlan, changed: Mapping[int, tuple[int, int]]) -> CopyPlan:
        """Give a pool of a plan another last pair: a page and a slot, whatever they are."""
        pools: list[PoolCopy] = []
        for copy in plan.pools:
            pairs = list(zip(copy.host_slots, copy.device_pages, strict=True))
            if copy.pool in changed:
                page, slot = changed[copy.pool]
                pairs[-1] = (slot, page)
            pairs.sort()
            pages, slots = copy.device_pages[:0], copy.host_slots[:0]
            slots.extend(slot for slot, _ in pairs)
            pages.extend(page for _, page in pairs)
            pools.append(PoolCopy(copy.pool, pages, slots))
        return CopyPlan(plan.direction, tuple(pools))

    def _some(self, count: int, pairs: int) -> list[int]:
        return self.rng.sample(range(count), pairs)

    def _page_bytes(self, pool: int) -> int:
        return self.device.layout.pools[pool].page_bytes

    def _pages(self, pool: int) -> list[bytes]:
        pages = self.device.pages_of(pool)
        return _cut(self.bench.gather(pool, range(pages)), self._page_bytes(pool))

    def _slots(self, pool: int) -> list[bytes]:
        return _cut(bytes(self.device.host.buffer(pool)), self._page_bytes(pool))


@asynccontextmanager
async def benched(make: DeviceFactory) -> AsyncGenerator[DeviceDriver]:
    """Make a device over random bytes; at the end of the block all fences are set, and it is closed."""
    with raising_sole_cause():
        async with open_services() as services:
            driver = DeviceDriver(make(), services)
            driver.fill()
            try:
                yield driver
            except BaseException:
                with suppress(DeadlineError, TimeoutError):  # what is told is the promise that was broken first
                    await driver.end()
                raise
            await driver.end()


@asynccontextmanager
async def driven(make: DeviceFactory) -> AsyncGenerator[DeviceDriver]:
    """The same with a device that is open."""
    async with benched(make) as driver:
        await driver.open()
        yield driver


def _cut(content: bytes, size: int) -> list[bytes]:
    return [content[at : at + size] for at in range(0, len(content), size)]
