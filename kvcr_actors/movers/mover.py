"""The front door of the lower half, for engines that keep a host tier of their own: orders in, acks out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Literal, TypeAlias

import anyio
import attrs
import structlog

from kvcr_actors.core.copy_plan import Direction
from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.errors import ConfigError, DeadlineError, InboxClosedError, InboxFullError, InvalidNodeError
from kvcr_actors.movers.local import LocalMover, MoveOutcome
from kvcr_actors.movers.orders import MoveAck, Moved, MoveFailure, MoveOrder, MoverFailed, OrderId
from kvcr_actors.port_life import LatePorts, give_back, opened
from kvcr_actors.ports import Description, Device, LayerWaits
from kvcr_actors.runtime.bell import LoopBell
from kvcr_actors.runtime.foreign import containing
from kvcr_actors.runtime.hosts import ThreadHost
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.inline_host import InlineHost
from kvcr_actors.runtime.memory_lease import take_memory
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.runtime.progress import Progress
from kvcr_actors.runtime.supervisor import raising_sole_cause
from kvcr_actors.runtime.traces import traced
from kvcr_actors.services import LoopServices
from kvcr_actors.transfers import Operation

log = structlog.get_logger()

HostKind: TypeAlias = Literal["thread", "inline"]
Loop: TypeAlias = Literal["asyncio", "trio"]


@attrs.frozen
class _Step:
    """A step's orders, one list a direction, as they cross to the loop."""

    number: int
    to_host: Sequence[MoveOrder]
    to_device: Sequence[MoveOrder]
    fences: Sequence[object]
    submitted: set[Direction] = attrs.field(factory=set[Direction])
    """On the loop: the directions whose ack comes from their submit."""


class PageMover:
    """Moves pages between an engine's pools and host slots that the engine names. One thread, the engine's, calls it.

    A step's orders are collected by `move`, and `flush` ends the step: they become one submit a direction, over all
    pools, behind the step's fences. One `MoveAck` a submit has every id, once the memory is quiet. With `host="thread"`
    the work is done on a loop in a thread of its own, with `host="inline"` inside `pump`, `wait` and `close`. At most
    `limit` steps wait for the loop: what a flush hands over beyond that is acknowledged as failed at once.
    """

    def __init__(
        self,
        device: Device,
        *,
        host: HostKind = "thread",
        loop: Loop = "asyncio",
        limit: int = 1024,
        drain_budget_s: float = 10.0,
    ) -> None:
        self._device = device
        self._names = [spec.name for spec in device.layout.pools]
        self._budget_s = drain_budget_s
        self._threaded = host == "thread"
        self._inbox: Inbox[_Step] = Inbox("moves", limit)
        self._outbox: Outbox[Moved] = Outbox()
        self._submitted = Progress("steps with moves to the device that it knows of")
        self._in_hand: deque[_Step] = deque()
        """Steps that were taken and are not, or not wholly, submitted."""
        self._open: dict[tuple[int, Direction], Operation[MoveOutcome]] = {}
        self._bell: LoopBell | None = None
        self._step = 0
        self._last_to_device = 0
        self._to_host: list[MoveOrder] = []
        self._to_device: list[MoveOrder] = []
        self._idle: anyio.Event | None = None
        self._host: ThreadHost | InlineHost
        if host == "thread":
            self._host = ThreadHost(self._main, backend=loop, name="kvcr-mover")
        elif host == "inline":
            self._host = InlineHost(self._main, backend=loop, name="kvcr-mover")
        else:
            raise ConfigError(f"host {host!r}: choose 'thread' or 'inline'")

    def start(self, timeout_s: float = 60.0) -> PageMover:
        """Open the device; raises what keeps it from starting."""
        self._host.start(timeout_s)
        return self

    def close(self, timeout_s: float | None = None) -> None:
        """Let what runs end, then stop; acks can still be taken. DeadlineError names what did not end in time."""
        self._host.stop(4 * self._budget_s if timeout_s is None else timeout_s)

    def __enter__(self) -> PageMover:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def move(self, order: MoveOrder) -> None:
        """Queue an order for the step's submit; InvalidNodeError if it does not list the device's pools."""
        if len(order.pages) != len(self._names):
            raise InvalidNodeError(
                f"order {order.order_id!r} lists {len(order.pages)} pools; the layout has {len(self._names)}"
            )
        (self._to_host if order.direction is Direction.TO_HOST else self._to_device).append(order)

    def flush(self, *fences: object, urgent: bool = False) -> int | None:
        """End the step: hand over what is queued, behind every fence (indices ready, the forward done, ...).

        Returns the step's number, which its acks name, or None if nothing was queued. Moves to the host are taken up
        after a millisecond, so that the engine can launch its next step meanwhile; `urgent` ones, which somebody waits
        for, and moves to the device at once.
        """
        if not self._to_host and not self._to_device:
            return None
        self._step += 1
        step = _Step(self._step, self._to_host, self._to_device, fences)
        self._to_host, self._to_device = [], []
        try:
            self._inbox.post(step)
        except InboxFullError:
            self._refuse(step, "queue_full: too many steps wait already")
            return step.number
        except InboxClosedError:
            self._refuse(step, "stopped: the mover takes no more orders")
            return step.number
        if step.to_device:
            self._last_to_device = step.number
        if (bell := self._bell) is not None:
            (bell.ring if urgent or step.to_device else bell.ring_later)()
        return step.number

    def take(self) -> list[Moved]:
        """Everything that ended since the last call; never waits."""
        return self._outbox.take()

    def wait(self, timeout_s: float) -> bool:
        """Block until something can be taken: True, or False after the timeout."""
        if isinstance(self._host, InlineHost):
            return self._pump_until(lambda: len(self._outbox) > 0, timeout_s)
        return self._outbox.wait(timeout_s)

    def wait_layer(self, layer: int, stream: Any = None, *, deadline_s: float = 1.0) -> None:
        """Have the engine's later work wait for a layer of every flushed move to the device.

        ConfigError for a device that has no layers to wait for; DeadlineError past the deadline.
        """
        if not isinstance(self._device, LayerWaits):
            raise ConfigError(f"wait_layer: {type(self._device).__name__} has none; wait for the ack")
        until = monotonic() + deadline_s
        if not self._submitted.settles(self._last_to_device):
            if isinstance(self._host, InlineHost):
                self._pump_until(lambda: self._submitted.settles(self._last_to_device), deadline_s)
            self._submitted.wait(self._last_to_device, max(0.0, until - monotonic()))
        self._device.wait_layer(layer, stream, deadline_s=max(0.0, until - monotonic()))

    def pump(self, turns: int = 1) -> bool:
        """Run the loop for a while on this thread (`host="inline"` only); whether something is left to run."""
        if not isinstance(self._host, InlineHost):
            raise ConfigError("pump: the mover runs on a thread of its own; it is for host='inline'")
        return self._host.pump(turns)

    def describe(self) -> Description:
        """Steps that wait and submits in flight, and the device."""
        running = [f"{step} {way.value}" for step, way in tuple(self._open)]
        return {"waiting_steps": len(self._inbox), "running": running, "device": self._device.describe()}

    def _pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        assert isinstance(self._host, InlineHost)  # noqa: S101 - for the type checker
        host = self._host
        try:
            host.pump_until(lambda: condition() or not host.is_running, timeout_s)
        except DeadlineError:
            return False
        return condition()

    def _refuse(self, step: _Step, reason: str) -> None:
        """Answer what was not submitted of a step."""
        for direction, orders in ((Direction.TO_HOST, step.to_host), (Direction.TO_DEVICE, step.to_device)):
            if orders and direction not in step.submitted:
                self._outbox.deliver((MoveAck(step.number, direction, (), self._all_failed(orders, reason)),))

    def _all_failed(self, orders: Sequence[MoveOrder], reason: str) -> tuple[MoveFailure, ...]:
        return tuple(MoveFailure(order.order_id, dict.fromkeys(self._names, reason)) for order in orders)

    async def _main(self, started: Callable[[], None], stop: anyio.Event) -> None:
        """On the loop: open the device, submit steps until `stop`, let what runs end."""
        late, lease = LatePorts(), take_memory(self._device, self._device.host)
        bell = LoopBell(_log_fault, relay=self._threaded, name="kvcr-mover-bell")
        error: BaseException | None = None
        try:
            with raising_sole_cause(), containing():
                async with anyio.create_task_group() as tasks:
                    opening = partial(self._device.open, LoopServices(tasks, bell, _refuse_events))
                    async with opened("device", self._device, opening, self._budget_s, late, uses_memory=True):
                        bell.attach(self._inbox)
                        self._bell = bell
                        tasks.start_soon(self._close_at, stop, name="mover stop")
                        started()
                        await self._serve(LocalMover(self._device))
                        await self._drain()
                    tasks.cancel_scope.cancel()
        except BaseException as failure:
            error = failure
            raise
        finally:
            give_back(lease, late)
            self._end(bell, error)

    async def _close_at(self, stop: anyio.Event) -> None:
        await stop.wait()
        self._inbox.close()

    async def _serve(self, mover: LocalMover) -> None:
        while batch := await self._inbox.take():
            self._in_hand.extend(batch)
            while self._in_hand:
                step = self._in_hand[0]
                if step.to_device:
                    self._submit(mover, step, Direction.TO_DEVICE, step.to_device)
                    self._submitted.reach(step.number)
                if step.to_host:
                    self._submit(mover, step, Direction.TO_HOST, step.to_host)
                self._in_hand.popleft()

    def _submit(self, mover: LocalMover, step: _Step, direction: Direction, orders: Sequence[MoveOrder]) -> None:
        operation = mover.submit(direction, [(order.pages, order.slots) for order in orders], step.fences)
        step.submitted.add(direction)
        self._open[step.number, direction] = operation
        operation.when_quiet(partial(self._acknowledge, step.number, direction, orders, operation))

    def _acknowledge(
        self, step: int, direction: Direction, orders: Sequence[MoveOrder], operation: Operation[MoveOutcome]
    ) -> None:
        del self._open[step, direction]
        outcome = operation.settled_outcome()
        assert outcome is not None  # noqa: S101 - quiet comes after the outcome
        done: list[OrderId] = []
        failed: list[MoveFailure] = []
        for index, order in enumerate(orders):
            if errors := outcome.failed.get(index):
                failed.append(MoveFailure(order.order_id, {self._names[pool]: why for pool, why in errors.items()}))
            else:
                done.append(order.order_id)
        self._outbox.deliver((MoveAck(step, direction, tuple(done), tuple(failed), outcome.bytes, outcome.slices),))
        if not self._open and self._idle is not None:
            self._idle.set()

    async def _drain(self) -> None:
        with anyio.move_on_after(self._budget_s):
            while self._open:
                self._idle = anyio.Event()
                await self._idle.wait()

    def _end(self, bell: LoopBell, error: BaseException | None) -> None:
        """Nothing more is submitted: answer what waits, and say what still runs."""
        self._inbox.close()
        self._submitted.end()
        bell.close()
        self._bell = None
        for step in (*self._in_hand, *self._inbox.take_now()):
            self._refuse(step, "stopped: the mover ended before it was submitted")
        running = tuple(sorted({step for step, _ in self._open}))
        if error is not None:
            self._outbox.deliver((MoverFailed(str(error) or repr(error), running),))
        elif running:
            raise DeadlineError(f"mover: the copies of steps {list(running)} still run; their memory is not quiet")


def _refuse_events(events: Sequence[InventoryEvent]) -> None:
    raise TypeError(f"{len(events)} events were published by a device; only a store does")


def _log_fault(error: Exception) -> None:
    log.error("mover.call_failed", traceback=traced(error))
