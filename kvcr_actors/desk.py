"""The engine's side of the hand-off: what its scheduler thread does, and nothing else.

A step appends to lists, posts one message an actor and rings one bell, last. No lock is waited for, no future made, no
tensor touched; a node costs one check and one append.

Orders check themselves where they are made; here it is checked that they are orders, of the layout's pools. A process
that is forked from the engine's has a copy of the desk and none of the threads behind it: there every method refuses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn
from weakref import WeakSet

from kvcr_actors.actors.state import Inboxes
from kvcr_actors.core.accounting import PrefixOutcome, RequestAccount, settle
from kvcr_actors.core.inventory import InventoryEvent, check_event
from kvcr_actors.core.rounds import first_agreement, step_operation
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.core.values import check_request_id, named, shown
from kvcr_actors.errors import ConfigError, InboxClosedError, InboxFullError, InvalidNodeError
from kvcr_actors.events.feed import EventFeed
from kvcr_actors.messages import (
    BackupAck,
    BackUpStep,
    CancelPrefetches,
    Completion,
    PrefetchCancelled,
    PrefetchReady,
    ResetCaches,
    RestoreStep,
    StartPrefetches,
    StopPrefetches,
)
from kvcr_actors.port_life import check_store
from kvcr_actors.ports import OperationId, Store
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.runtime.program import PROGRAM_NAME, wrong_process
from kvcr_actors.types import BackupNode, MissReason, PrefetchRequest, RequestId, RestoreOrder, SkipReason


class EngineDesk:
    """Collects one step's orders and hands them over. All methods belong to one thread, the engine's.

    `stats` counts what is refused here, because an inbox is full or the controller has stopped: each such order still
    ends in exactly one completion.
    """

    def __init__(
        self,
        inboxes: Inboxes,
        outbox: Outbox[Completion],
        ring: Callable[[], None],
        ring_later: Callable[[], None],
        *,
        feed: EventFeed,
        pools: int,
        host_on: bool,
        store_on: Callable[[], bool],
        give_reset: Callable[[ResetCaches], None],
        join_without: Callable[[Sequence[OperationId]], None] | None = None,
    ) -> None:
        self._inboxes = inboxes
        self._outbox = outbox
        self._ring = ring
        self._ring_later = ring_later
        self._feed = feed
        self._pools = pools
        self._host_on = host_on
        self._process = os.getpid()
        self._join_without = join_without
        self._store_on = store_on
        self._give_reset = give_reset
        self._resets = 0
        self._stale = 0
        """The queued nodes, from the first on, that were written before the last reset."""
        self._step = 0
        self.restore_steps = 0
        """Steps with restores that were handed over."""
        self._nodes: list[BackupNode] = []
        self._requests: list[PrefetchRequest] = []
        self._orders: list[RestoreOrder] = []
        self._cancels: list[RequestId] = []
        self._stops: list[RequestId] = []
        self._events: list[InventoryEvent] = []
        self._has_orders = False
        self.stats = ControllerStats()
        _desks.add(self)

    def disown(self) -> None:
        """Refuse every order from now on: this is a copy in a forked child. No layout has so many pools."""
        self._pools = _DISOWNED

    def check_process(self) -> None:
        """RuntimeError in a forked child."""
        if self._pools == _DISOWNED:
            raise wrong_process(PROGRAM_NAME, self._process)

    def check_order(self, order: object, kind: type) -> None:
        """InvalidNodeError for what is no order of a kind; RuntimeError in a forked child."""
        self.check_process()
        if type(order) is not kind:
            raise InvalidNodeError(f"{shown(order)} is a {type(order).__name__}; give a {kind.__name__}")

    def write(self, node: BackupNode, flush: bool = True) -> None:
        """Queue a node for the step's one submit; with `flush` the step ends here. InvalidNodeError: it is none."""
        if type(node) is not BackupNode or len(node.pages) != self._pools:
            self._refuse_node(node)
        self._nodes.append(node)
        if flush:
            self.flush_pending_backups()

    def write_all(self, nodes: Sequence[BackupNode]) -> None:
        """Queue nodes for the step's one submit; InvalidNodeError if one is none, and none is queued."""
        if not isinstance(nodes, list | tuple):
            self._refuse_node(nodes)
        for node in nodes:
            if type(node) is not BackupNode or len(node.pages) != self._pools:
                self._refuse_node(node)
        self._nodes.extend(nodes)

    def flush_pending_backups(self, fence: object | None = None) -> int | None:
        """End the step: hand over everything queued, with the fence that its copies must wait for on the device.

        Returns the step's number if it has nodes (its `BackupAck` names it), else None. With nothing queued it does
        nothing.
        """
        step = None
        if self._pools == _DISOWNED:
            self.check_process()
        if self._nodes:
            step = self._step = self._step + 1
            nodes, self._nodes = self._nodes, []
            self._hand_over_nodes(step, nodes, fence)
        elif not self._has_orders:
            return None
        if self._requests or self._orders or self._cancels or self._stops:
            self._hand_over_orders(fence)
            self._ring()
            return step
        if self._events:
            self._hand_over_orders(fence)
        self._ring_later()  # nobody waits for a backup or an event, and the engine is about to launch
        return step

    def prefetch(self, request: PrefetchRequest) -> None:
        """Queue a prefetch; it leaves with the end of the step."""
        self.check_order(request, PrefetchRequest)
        if self._join_without is not None and not isinstance(request.request_id, str | int | bytes):
            raise InvalidNodeError(f"request {request.request_id!r}: ranks can agree on a str, int or bytes only")
        self._requests.append(request)
        self._has_orders = True

    def restore(self, order: RestoreOrder) -> None:
        """Queue a restore of a prefix that is ready; all restores of a step become one submit.

        InvalidNodeError for wrong pools. One of a request that holds nothing is ignored: that request was answered
        with how it ended, or never ordered.
        """
        self.check_order(order, RestoreOrder)
        if len(order.pages) != self._pools:
            raise InvalidNodeError(
                f"restore of {named(order.request_id)} lists {len(order.pages)} pools; the layout has {self._pools}"
            )
        self._orders.append(order)
        self._has_orders = True

    def cancel(self, request_id: RequestId) -> None:
        """Queue the end of a prefetch, wherever it stands; one of this same step ends here."""
        self._check_id(request_id)
        self._cancels.append(request_id)
        self._has_orders = True
        for request in self._requests:
            if request.request_id == request_id:
                self._requests.remove(request)
                self.stats.prefetch.started += 1
                self.stats.prefetch.cancelled += 1
                account = self._refused(request, MissReason.CANCELLED)
                self._outbox.deliver((PrefetchCancelled(request_id, account),))
                return

    def stop_prefetch(self, request_id: RequestId) -> None:
        """Queue the end of a search: the request does with what has arrived, unless its policy is to wait."""
        self._check_id(request_id)
        self._stops.append(request_id)
        self._has_orders = True

    def reset(self, label: RequestId, *, clear: bool, store: Store | None, attached: Store | None) -> None:
        """Hand over a reset, at once: it ends what is queued here as well. ConfigError says what it must say."""
        self.check_process()
        if self._join_without is not None and not isinstance(label, str | int | bytes):
            raise ConfigError(f"reset {label!r}: ranks can agree on a str, int or bytes only")
        if label is None:
            raise ConfigError("reset: give it a label, by which its ResetFinished is known")
        check_request_id(label, "label")
        if type(clear) is not bool:
            raise ConfigError(f"reset {named(label)}: clear {shown(clear)} is not a bool")
        if store is not None:
            check_store(store)
        if attached is not None and not clear:
            if store is None:
                raise ConfigError(
                    f"reset {named(label)}: store {attached.name} holds pages of before; say clear=True to empty it, "
                    "or give the store that takes its place (detach_store before the reset leaves none)"
                )
            if attached.traits.namespace and attached.traits.namespace == store.traits.namespace:
                raise ConfigError(
                    f"reset {named(label)}: store {store.name} has the namespace of the pages to be forgotten; give it "
                    "a new one, or say clear=True"
                )
        self.forget(label, clear=clear, store=store)

    def forget(self, label: RequestId | None = None, *, clear: bool = False, store: Store | None = None) -> None:
        """Have everything forgotten that was computed before; without a label nobody hears of the end."""
        self._resets += 1
        self._stale = len(self._nodes)
        self._orders.clear()  # the prefixes that they name end with the reset
        requests, self._requests = self._requests, []
        for request in requests:
            account = self._refused(request, MissReason.RESET)
            self._outbox.deliver((PrefetchReady(request.request_id, request.device_pages, account),))
        self._give_reset(ResetCaches(self._resets, label, clear, store))

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Queue inventory events of the engine's own tier; they leave with the end of the step, in order."""
        self.check_process()
        if not isinstance(events, list | tuple):
            raise InvalidNodeError(f"events: {shown(events)} is not a list or tuple of inventory events")
        for event in events:
            check_event(event)
        self._events.extend(events)
        self._has_orders = True

    def take(self) -> list[Completion]:
        """Everything that completed since the last call; never waits."""
        self.check_process()
        return self._outbox.take()

    def _check_id(self, request_id: object) -> None:
        self.check_process()
        check_request_id(request_id)

    def _refuse_node(self, node: object) -> NoReturn:
        """Raise what is wrong with what was given for a node, or for nodes."""
        self.check_process()
        if type(node) is not BackupNode:
            raise InvalidNodeError(f"{shown(node)} is a {type(node).__name__}; give a BackupNode, or a list of them")
        raise InvalidNodeError(f"node {node.node_id} lists {len(node.pages)} pools; the layout has {self._pools}")

    def _hand_over_nodes(self, step: int, nodes: list[BackupNode], fence: object | None) -> None:
        stale, self._stale = self._stale, 0
        if not self._host_on:
            self._refuse_nodes(step, nodes, SkipReason.TIER_OFF)
            return
        try:
            self._inboxes.backup.post(BackUpStep(step, nodes, fence, self._resets, stale))
        except InboxFullError:
            self._refuse_nodes(step, nodes, SkipReason.QUEUE_FULL)
        except InboxClosedError:
            self._refuse_nodes(step, nodes, SkipReason.STOPPED)

    def _hand_over_orders(self, fence: object | None) -> None:
        self._has_orders = False
        inboxes = self._inboxes
        if self._events:
            self._hand_over_events()
        if self._orders:
            orders, self._orders = self._orders, []
            try:
                inboxes.restore.post(RestoreStep(orders, fence, self.restore_steps + 1, self._resets))
                self.restore_steps += 1
            except (InboxFullError, InboxClosedError):
                # Their prefixes are still held: a cancel ends them the same way.
                self._cancels.extend(order.request_id for order in orders)
        if self._cancels:
            try:
                inboxes.prefetch.post(CancelPrefetches(tuple(self._cancels)))
                self._cancels.clear()
            except InboxFullError as refusal:
                self._has_orders = True  # the next step tries again
                # A request that overtook a cancel of its own id would be ended by it.
                requests, self._requests = self._requests, []
                self._refuse_requests(requests, refusal)
            except InboxClosedError:
                self._cancels.clear()  # the stop ends them
        if self._requests:
            requests, self._requests = self._requests, []
            try:
                inboxes.prefetch.post(StartPrefetches(requests, self._resets))
            except (InboxFullError, InboxClosedError) as refusal:
                self._refuse_requests(requests, refusal)
        if self._stops:
            stops, self._stops = self._stops, []
            with suppress(InboxFullError, InboxClosedError):  # their deadlines stop them, too
                inboxes.prefetch.post(StopPrefetches(stops))

    def _hand_over_events(self) -> None:
        """Leave the engine's events for the publisher; once all is over they are counted, since no sink is open."""
        events, self._events = self._events, []
        if not self._feed.post(events):
            self.stats.events_dropped += len(events)

    def _refuse_nodes(self, step: int, nodes: Sequence[BackupNode], reason: SkipReason) -> None:
        if self._join_without is not None:
            self._join_without([step_operation(node.node_id for node in nodes)])
        self.stats.backup.skipped[reason] += len(nodes)
        self._outbox.deliver((BackupAck(step, (), tuple((node.node_id, reason) for node in nodes)),))

    def _refuse_requests(self, requests: Sequence[PrefetchRequest], refusal: Exception) -> None:
        reason = MissReason.QUEUE_FULL if isinstance(refusal, InboxFullError) else MissReason.STOPPED
        for request in requests:
            account = self._refused(request, reason)
            self._outbox.deliver((PrefetchReady(request.request_id, request.device_pages, account),))

    def _refused(self, request: PrefetchRequest, reason: MissReason) -> RequestAccount:
        """Account for a request that never left: all beyond the device was missed for one reason."""
        if self._join_without is not None:
            self._join_without([first_agreement(request.request_id)])
        device = request.device_pages
        account = settle(
            PrefixOutcome(
                total=len(request.keys),
                device=device,
                host=device,
                ready=device,
                used=device,
                miss=reason,
                store_on=self._store_on(),
            )
        )
        self.stats.settle(account)
        return account


_DISOWNED = -1
_desks: WeakSet[EngineDesk] = WeakSet()


def _disown_desks() -> None:
    for desk in _desks:
        desk.disown()


os.register_at_fork(after_in_child=_disown_desks)
