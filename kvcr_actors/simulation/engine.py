"""The simulated engine: one scheduler for all ranks, with its device tier, its write policy and its requests."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, cast

import attrs

from kvcr_actors.core.eviction import LruEviction
from kvcr_actors.core.hit_policy import boundaries, longest, needed_masks
from kvcr_actors.core.prefix_tree import PrefixTree
from kvcr_actors.core.write_policy import Backup, SavedPage, WriteBook, WriteSettings
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    PrefetchCancelled,
    PrefetchReady,
    ResetFinished,
    RestoreFinished,
)
from kvcr_actors.simulation.checks import check_current, check_equal_nodes, check_equal_prefixes
from kvcr_actors.simulation.member import DEVICE_PAGES, Member
from kvcr_actors.simulation.orders import Reset, StepOrders, check_all_bytes
from kvcr_actors.simulation.pages import LAYOUT, POOLS, computed_mask, draw_prompt
from kvcr_actors.simulation.restores import check_equal_restores, check_restored, draw_plan, own_pages, whole_plan
from kvcr_actors.types import (
    NO_SLOT,
    BackupNode,
    Components,
    NodeId,
    PageKey,
    PrefetchRequest,
    RestoreOrder,
    SkipReason,
    StopPolicy,
    WritePolicy,
)

_RUNNING = 8
"""Requests that run at a time."""


class SimPage(SavedPage):
    """A page on the device: its page id (one id in every pool), and the pools that hold something for it."""

    __slots__ = ("mask", "page_id")

    if TYPE_CHECKING:
        parent: SimPage | None

    def __init__(self, key: PageKey, parent: SimPage | None, payload: tuple[int, int], ready: bool) -> None:
        super().__init__(key, parent, None, ready)
        self.page_id, self.mask = payload


class Phase(enum.Enum):
    """Where a request stands."""

    SEARCHING = "searching"
    RESTORING = "restoring"
    ENDING = "ending"
    """Nothing will be restored; what ranks still hold is being given back, or expires."""


@attrs.define(eq=False)
class Request:
    """A running request. `ready` and `ended` say how far each rank has its prefix, in host memory and at the end."""

    number: int
    keys: tuple[PageKey, ...]
    held: int
    """Its pages on the device at the look-up."""
    pinned: SimPage | None
    phase: Phase = Phase.SEARCHING
    ready: dict[int, int] = attrs.field(factory=dict[int, int])
    ended: dict[int, int] = attrs.field(factory=dict[int, int])
    order: RestoreOrder | None = None
    ids: tuple[int, ...] = ()
    restored: int = 0
    generation: int = 0

    @property
    def own(self) -> int:
        """What the device has by itself, as the engine said last."""
        return self.held if self.order is None else own_pages(self.order, self.held)


class SimEngine:
    """Runs requests step by step and orders alike on every rank. `crashes` counts what may part the ranks' answers.

    `resets` draws whether the weights change in a step.
    """

    def __init__(self, members: Sequence[Member], rng: random.Random, resets: Callable[[], bool]) -> None:
        self.running: dict[int, Request] = {}
        self.finished = 0
        self.crashes = 0
        self.generation = 0
        """How often the weights changed: with each change everything is reset."""
        self._members = members
        self._rng = rng
        self._resets = resets
        self._tree = PrefixTree(LruEviction[SimPage](), SimPage)
        self._free = list(range(DEVICE_PAGES))
        policy = rng.choice(
            (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH, WritePolicy.SELECTIVE, WritePolicy.WRITE_BACK)
        )
        self.policy = policy
        self._settings, self._node_ids = WriteSettings(policy, watermark=0.9), count(1)
        self._book = WriteBook(self._tree, _components, self._settings, self._node_ids)
        self._old_trees: list[PrefixTree[SimPage]] = []
        """Those of earlier generations, until nothing works on their device pages."""
        self._books: dict[NodeId, WriteBook[SimPage]] = {}
        self._over: dict[int, int] = {}
        """The generation to which each rank's last reset is over."""
        self._numbers = count(1)
        self._orders = StepOrders()
        self._acks: dict[NodeId, dict[int, SkipReason | None]] = {}
        self._written_at: dict[NodeId, tuple[int, int]] = {}
        """Crashes and resets by then: each may have a rank answer otherwise than the others."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is awaited, but restores on ranks where one will never tell that it is over."""
        endless = {member.rank for member in self._members if member.rank in member.faults.unquiet}
        waits = [one for one in self.running.values() if not endless or one.phase is not Phase.RESTORING]
        return not waits and not self._acks

    def step(self, now: float, *, busy: bool = True) -> None:
        """One turn of the scheduler; with `busy` false it admits nothing and ends what stands ready."""
        for member in self._members:
            member.tick(now)
            for completion in member.take(now):
                self._complete(member, completion)
        for request in list(self.running.values()):
            self._advance(request, busy=busy)
        self._free_old()
        if busy:
            resets, is_early = self._resets(), self._rng.random() < 0.5
            if resets and is_early:
                self.reset()
            self._act_at_random()
            if resets and not is_early:
                self.reset()
        for node in self._book.ahead(DEVICE_PAGES, len(self._free)) if busy else ():
            self._write(node)
        orders, self._orders = self._orders, StepOrders()
        if orders.size or orders.computed:
            for member in self._members:
                member.post(orders, now)

    def admit(self, keys: tuple[PageKey, ...], stop: StopPolicy | None = None) -> Request:
        """Start a request."""
        path = self._tree.match(keys)
        held = longest(boundaries([page.mask for page in path], LAYOUT))
        request = Request(next(self._numbers), keys, held, path[held - 1] if held else None, generation=self.generation)
        if request.pinned is not None:
            self._tree.touch(path[:held])
            self._tree.pin(request.pinned)
        self.running[request.number] = request
        self._orders.requests.append(PrefetchRequest(request.number, keys, held, stop=stop))
        return request

    def evict(self, pages: int) -> None:
        """Throw pages away, the least recently used leaves first; their bytes are poisoned on every rank."""
        for page in self._tree.evict(pages):
            self._release((page.page_id,))

    def rank_lost(self, rank: int) -> None:
        """A rank's controller began anew: what it had not answered by then, it never will."""
        for request in self.running.values():
            request.ended.setdefault(rank, request.own)
        self._over.pop(rank, None)

    def reset(self) -> None:
        """New weights: forget all that was computed, on every rank, in the middle of the step."""
        self.generation += 1
        self._old_trees.append(self._tree)
        self._tree = PrefixTree(LruEviction[SimPage](), SimPage)
        self._book = WriteBook(self._tree, _components, self._settings, self._node_ids)
        orders = self._orders
        counts = len(orders.nodes), len(orders.requests), len(orders.restores)
        orders.reset = Reset(self.generation, self._rng.random() < 0.5, *counts)

    def _free_old(self) -> None:
        for tree in self._old_trees:
            for page in tree.evict(DEVICE_PAGES):
                self._release((page.page_id,))
        self._old_trees = [tree for tree in self._old_trees if len(tree)]

    # -- what came back

    def _complete(self, member: Member, completion: Completion) -> None:
        rank = member.rank
        match completion:
            case BackupAck():
                for node_id in completion.node_ids:
                    self._acknowledge(node_id, rank, None)
                for node_id, reason in completion.failed:
                    self._acknowledge(node_id, rank, reason)
            case PrefetchReady() | PrefetchCancelled() | RestoreFinished():
                request = self.running.get(cast("int", completion.request_id))
                if request is None:
                    return
                if isinstance(completion, PrefetchReady) and completion.account is None:
                    check_current(rank, request.number, request.generation, self._over.get(rank, 0))
                    request.ready[rank] = completion.pages
                elif isinstance(completion, RestoreFinished):
                    self._verify(member, request, completion)
                    request.ended[rank] = completion.pages
                else:
                    request.ended[rank] = request.own
            case ResetFinished():
                self._over[rank] = cast("int", completion.label)
            case _:
                pass

    def _verify(self, member: Member, request: Request, done: RestoreFinished) -> None:
        own, end, order = request.own, done.pages, request.order
        if order is not None:  # else it came late, to another life of the controller
            check_restored(member.rank, order, request.held, len(request.keys), done)
        if end <= own:
            return
        check_current(member.rank, request.number, request.generation, self._over.get(member.rank, 0))
        masks = needed_masks(LAYOUT, end)[own:]
        for key, page, mask in zip(request.keys[own:end], request.ids, masks, strict=False):
            found = [member.life.device.gather(pool, (page,)) for pool in POOLS]
            where = f"restored for request {request.number}"
            check_all_bytes(member.rank, key, request.generation, mask, found, where)

    def _acknowledge(self, node_id: NodeId, rank: int, reason: SkipReason | None) -> None:
        answers = self._acks[node_id]
        answers[rank] = reason
        if len(answers) < len(self._members):
            return
        del self._acks[node_id]
        if self._written_at.pop(node_id) == (self.crashes, self.generation):
            check_equal_nodes(node_id, [why is None for why in answers.values()])
        failed = [why for why in answers.values() if why is not None]
        # A rank that lacks the parents decides: the next node begins above them.
        why = SkipReason.PARENT_ABSENT if SkipReason.PARENT_ABSENT in failed else next(iter(failed), None)
        book = self._books.pop(node_id)
        book.acknowledge((node_id,) if why is None else (), () if why is None else ((node_id, why),))

    # -- what a request does next

    def _advance(self, request: Request, *, busy: bool) -> None:
        everyone = len(self._members)
        if request.phase is Phase.SEARCHING and len(request.ready.keys() | request.ended.keys()) == everyone:
            check_equal_prefixes(request.number, request.ready)
            self._decide(request, busy=busy)
        if request.phase is not Phase.SEARCHING and len(request.ended) == everyone:
            self._finish(request)

    def _decide(self, request: Request, *, busy: bool) -> None:
        whole = not request.ended
        roll = self._rng.random()
        if whole and roll < (0.8 if busy else 1.0):
            self._restore(request, busy=busy)
            return
        request.phase = Phase.ENDING
        if request.ready and (roll < 0.97 or not busy):
            self._orders.cancels.append(request.number)

    def _restore(self, request: Request, *, busy: bool) -> None:
        ready = next(iter(request.ready.values()))
        plan = whole_plan(request.held, ready)
        if busy and request.generation == self.generation:
            path = self._tree.match(request.keys)
            legal = boundaries([page.mask for page in path], LAYOUT)
            shorter = [end for end in range(request.held) if legal >> end & 1]
            plan = draw_plan(self._rng, request.held, ready, shorter, longest(legal))
            if plan.device_pages is not None:
                self._tree.pin(path[plan.device_pages - 1])
                self._unpin(request)
                request.pinned = path[plan.device_pages - 1]
        ids = self._allocate(len(plan.masks))
        if ids is None:
            request.phase = Phase.ENDING
            self._orders.cancels.append(request.number)
            return
        request.phase, request.order, request.ids = Phase.RESTORING, plan.order(request.number, ids), ids
        self._orders.restores.append(request.order)

    def _finish(self, request: Request) -> None:
        """Take in what was restored, compute the rest, and have it backed up as the policy says."""
        del self.running[request.number]
        self.finished += 1
        if request.generation != self.generation:
            self._release(request.ids)
            self._unpin(request)
            return
        parent, own, end = request.pinned, request.own, min(request.ended.values())
        if request.order is not None:
            check_equal_restores(request.order, request.held, request.ended)
        if end > own:
            masks = needed_masks(LAYOUT, end)[own:]
            parent = self._insert(request.keys[own:end], masks, request.ids[: end - own], parent)
            request.restored = end - own
        self._release(request.ids[request.restored :])
        keys = request.keys[max(own, end) :]
        ids = self._allocate(len(keys), parent)
        if ids is not None:
            masks = [computed_mask(key) for key in keys]
            self._orders.computed += zip(ids, keys, masks, [self.generation] * len(ids), strict=True)
            self._insert(keys, masks, ids, parent)
            path = self._tree.match(request.keys)
            for page in path:
                page.hits += 1
            node = self._book.finished(path)
            if node is not None:
                self._write(node)
        self._unpin(request)

    def _unpin(self, request: Request) -> None:
        page = request.pinned
        if page is not None:
            tree = next(one for one in (self._tree, *self._old_trees) if one.get(page.key) is page)
            tree.unpin(page)

    def _write(self, node: BackupNode) -> None:
        self._orders.nodes.append(node)
        self._acks[node.node_id] = {}
        self._books[node.node_id] = self._book
        self._written_at[node.node_id] = self.crashes, self.generation

    def _insert(
        self, keys: Sequence[PageKey], masks: Sequence[int], ids: Sequence[int], parent: SimPage | None
    ) -> SimPage | None:
        """Hold pages; where the tree has one already, it gains what it lacked, and is to be backed up again."""
        for key, mask, page_id in zip(keys, masks, ids, strict=True):
            page = self._tree.get(key)
            if page is None:
                parent = self._tree.insert(key, parent, (page_id, mask), ready=True)
                continue
            gained = mask & ~page.mask
            if gained:
                self._orders.computed.append((page.page_id, key, gained, self.generation))
                page.mask |= gained
                if page.backup is not Backup.PENDING:
                    page.backup = Backup.NONE
            self._release((page_id,))
            parent = page
        return parent

    def _allocate(self, pages: int, keep: SimPage | None = None) -> tuple[int, ...] | None:
        if keep is not None:
            self._tree.pin(keep)
        self.evict(pages - len(self._free))
        if keep is not None:
            self._tree.unpin(keep)
        if len(self._free) < pages:
            return None
        ids, self._free = self._free[:pages], self._free[pages:]
        return tuple(ids)

    def _release(self, ids: Sequence[int]) -> None:
        self._free += ids
        for member in self._members:
            for pool in POOLS:
                member.life.device.poison(pool, ids)

    # -- chance

    def _act_at_random(self) -> None:
        rng = self._rng
        if len(self.running) < _RUNNING and rng.random() < 0.5:
            stop = rng.choice((None, None, StopPolicy.BEST_EFFORT, StopPolicy.TIMEOUT))
            self.admit(draw_prompt(rng), stop)
        if rng.random() < 0.2:
            self.evict(rng.randrange(1, 60))
        if rng.random() < 0.06:
            for member in self._members:
                member.clear_host()
        for request in self.running.values():
            if request.phase is Phase.SEARCHING and rng.random() < 0.02:
                self._orders.cancels.append(request.number)
            elif request.phase is Phase.SEARCHING and rng.random() < 0.03:
                self._orders.stops.append(request.number)


def _components(pages: Sequence[SimPage]) -> Components:
    return tuple(tuple(page.page_id if page.mask >> pool & 1 else NO_SLOT for page in pages) for pool in POOLS)
