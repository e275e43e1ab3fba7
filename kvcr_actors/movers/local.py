"""A mover on the device's own loop: the orders of a step become one submit, and each learns how its own bytes fared.

Steps of one direction are submitted in the order in which they were given. One whose page lists lie on the device waits
until they were read, off this thread, and those behind it wait with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from kvcr_actors.core.copy_plan import Direction
from kvcr_actors.core.order_merge import MergedOrders, Order, PageList, merge_orders
from kvcr_actors.ports import CopyOutcome, Device, PageListsRead, ReadsPageLists
from kvcr_actors.transfers import Operation


@attrs.frozen
class MoveOutcome:
    """How a step ended: for each order that failed, by its place in the list, its pools with their errors."""

    bytes: int
    slices: int
    launches: int
    failed: Mapping[int, Mapping[int, str]]


@attrs.define(eq=False)
class _Step:
    direction: Direction
    orders: Sequence[Order]
    fences: Sequence[object]
    operation: Operation[MoveOutcome] = attrs.field(factory=Operation[MoveOutcome])
    unread: bool = False
    error: str | None = None


class LocalMover:
    """Submits orders to a device. Everything is on the loop."""

    def __init__(self, device: Device) -> None:
        pools = range(len(device.layout.pools))
        self._device = device
        self._reader = device if isinstance(device, ReadsPageLists) else None
        self._pages = [device.pages_of(pool) for pool in pools]
        self._slots = [device.host.slots_of(pool) for pool in pools]
        self._waiting: dict[Direction, deque[_Step]] = {direction: deque() for direction in Direction}

    def submit(
        self, direction: Direction, orders: Sequence[Order], fences: Sequence[object] = ()
    ) -> Operation[MoveOutcome]:
        """Make one submit of a step's orders of one direction; its copies wait for every fence on the device."""
        step = _Step(direction, orders, fences)
        on_device = [ids for order in orders for side in order for ids in side if not _is_on_host(ids)]
        if on_device:
            self._read(step, on_device)
        self._waiting[direction].append(step)
        self._submit_waiting(direction)
        return step.operation

    def _read(self, step: _Step, on_device: Sequence[Any]) -> None:
        if self._reader is None:
            step.error = "its page lists lie on a device, and this one cannot read them"
            return
        step.unread = True
        self._reader.read_page_lists(on_device, step.fences).when_settled(partial(self._take_lists, step))

    def _take_lists(self, step: _Step, read: PageListsRead) -> None:
        step.unread, step.error = False, read.error
        if read.error is None:
            lists = iter([np.frombuffer(one, np.int64) for one in read.lists])
            step.orders = [(_filled(pages, lists), _filled(slots, lists)) for pages, slots in step.orders]
        self._submit_waiting(step.direction)

    def _submit_waiting(self, direction: Direction) -> None:
        waiting = self._waiting[direction]
        while waiting and not waiting[0].unread:
            step = waiting.popleft()
            if step.error is not None:
                failed = {index: {0: step.error} for index in range(len(step.orders))}
                step.operation.settle(MoveOutcome(0, 1, 0, failed))
                continue
            self._submit(step)

    def _submit(self, step: _Step) -> None:
        merged = merge_orders(step.direction, self._device.layout, step.orders, self._pages, self._slots)
        if not merged.plan.pools:
            step.operation.settle(_outcome(merged, CopyOutcome(0, launches=0)))
            return
        copy = self._device.submit(merged.plan, step.fences)
        copy.when_settled(lambda outcome: step.operation.settle(_outcome(merged, outcome), quiet=False))
        copy.when_quiet(step.operation.become_quiet)


def _is_on_host(ids: Any) -> bool:
    return isinstance(ids, Sequence | np.ndarray)


def _filled(side: Sequence[PageList], lists: Iterator[PageList]) -> Sequence[PageList]:
    """Replace each list that lies on a device by the next of those that were read."""
    return tuple(ids if _is_on_host(ids) else next(lists) for ids in side)


def _outcome(merged: MergedOrders, outcome: CopyOutcome) -> MoveOutcome:
    failed: dict[int, Mapping[int, str]] = {index: {pool: why} for index, (pool, why) in merged.refused.items()}
    for index, pools in enumerate(merged.pools if outcome.failed else ()):
        if errors := {pool: error for pool, error in outcome.failed.items() if pools >> pool & 1}:
            failed[index] = errors
    return MoveOutcome(outcome.bytes, outcome.slices, outcome.launches, failed)
