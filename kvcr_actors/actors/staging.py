"""Where a step's nodes go in host memory: the slots that its one copy fills."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter

import attrs
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.copy_plan import is_within
from kvcr_actors.core.hit_policy import component_masks
from kvcr_actors.core.host_page import first_not_ready
from kvcr_actors.core.host_tier import Growth, HostPage, NewPath, PageState
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.messages import StagedNode
from kvcr_actors.runtime.breath import PAGES_A_CALL
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.types import BackupNode, Components, NodeId, PageKey, SkipReason

log = structlog.get_logger()


@attrs.frozen
class _Waiting:
    """A node whose pages are to be reserved; `wanted` are its device pages that the host lacks."""

    position: int
    node: BackupNode
    path: NewPath
    wanted: Components
    growths: Sequence[Growth]


class StepStaging:
    """Reserves slots for the nodes of one step, and knows what was reserved until the confirmation owns it."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._device_pages = state.device_pages()
        self._waiting: list[_Waiting] = []
        self._waiting_keys: set[PageKey] = set()
        self.nodes: list[StagedNode] = []
        """Nodes that the confirmation decides on, in the order of the step."""
        self.pages: list[HostPage] = []
        self.growths: list[Growth] = []
        self.parts: list[tuple[Components, Components]] = []
        """Device pages and host slots to copy."""
        self.copied: set[NodeId] = set()
        """Nodes with something to copy."""
        self.done: list[NodeId] = []
        self.failed: list[tuple[NodeId, SkipReason]] = []
        self.missing: dict[NodeId, PageKey] = {}
        """What the nodes hang from that failed for it: the first key of each path that the host lacks."""
        self._missing_above: dict[PageKey, PageKey] = {}
        """The same for the keys that the host lacks of all nodes that failed: later ones may hang from them."""

    def stage(self, nodes: Sequence[BackupNode], stale: int = 0) -> None:
        """Reserve slots for what the host lacks of the nodes' pages, or note why not. Called once.

        The first `stale` nodes were written before a reset.
        """
        self.failed.extend((node.node_id, SkipReason.RESET) for node in nodes[:stale])
        for position, node in enumerate(nodes[stale:], stale):
            if len(self._waiting_keys) >= PAGES_A_CALL or self._waits_for_a_page_of(node):
                self._reserve()
            self._stage(position, node)
            self._state.breathe()
        self._reserve()
        # Those with nothing to reserve did not wait for the others, but ranks must decide in one order.
        self.nodes.sort(key=attrgetter("position"))
        if self._state.is_shared:
            needs = _needs(nodes, stale)
            self.nodes = [attrs.evolve(node, needs=needs[node.position]) for node in self.nodes]

    def give_back(self) -> None:
        """What the confirmation did not use goes back; the copy must be quiet."""
        run_endings(partial(self._state.drop_growths, self.growths), partial(self._state.abandon_unfilled, self.pages))

    def _stage(self, position: int, node: BackupNode) -> None:
        host = self._state.host
        parent = None
        if not is_within(node.pages, self._device_pages):
            # In the step's copy it would fail its pool, and with that the other nodes.
            log.error("backup.page_outside", node=node.node_id, device_pages=self._device_pages)
            self.failed.append((node.node_id, SkipReason.COPY_FAILED))
            return
        if node.parent is not None:
            parent = host.get(node.parent)
            if parent is None:
                missing = self._missing_above.get(node.parent, node.parent)
                self._fail(node, SkipReason.PARENT_ABSENT, node.keys, missing)
                return
        held = self._held(node)
        lacking = _lacking(node, held)
        if lacking and self._waiting:
            # Room for those that wait may be made at the cost of what is held here.
            self._reserve()
            self._stage(position, node)
            return
        try:
            growths = self._stage_growths(node, held, lacking)
        except NoHostMemoryError:
            self._fail(node, SkipReason.NO_HOST_MEMORY, node.keys[len(held) :])
            return
        parent = held[-1] if held else parent
        if len(held) == len(node.keys):
            self._stage_present(position, node, parent, growths)
            return
        keys, wanted = node.keys, node.pages
        if held:
            keys, wanted = keys[len(held) :], tuple(pages[len(held) :] for pages in wanted)
        if host.absent_run(keys) < len(keys):
            # A page of a given-up parent is still filling further down: it blocks its key until its copy is quiet.
            self._fail(node, SkipReason.PARENT_ABSENT, keys)
            return
        path = NewPath(parent, keys, component_masks(wanted))
        self._waiting.append(_Waiting(position, node, path, wanted, growths))
        self._waiting_keys.update(keys)

    def _fail(
        self, node: BackupNode, reason: SkipReason, lacking: Sequence[PageKey], missing: PageKey | None = None
    ) -> None:
        """Note a node that is not backed up, which keys the host lacks, and the first that is missing of its path."""
        self.failed.append((node.node_id, reason))
        if not lacking:
            return
        missing = lacking[0] if missing is None else missing
        if reason is SkipReason.PARENT_ABSENT:
            self.missing[node.node_id] = missing
        for key in lacking:
            self._missing_above.setdefault(key, missing)

    def _held(self, node: BackupNode) -> list[HostPage]:
        """The leading pages of a node that the host has, or that are on their way there."""
        held: list[HostPage] = []
        for key in node.keys:
            page = self._state.host.get(key)
            if page is None:
                break
            held.append(page)
        return held

    def _waits_for_a_page_of(self, node: BackupNode) -> bool:
        """Whether a page that the node names is still to be reserved for a node before it."""
        return node.parent in self._waiting_keys or not self._waiting_keys.isdisjoint(node.keys)

    def _reserve(self) -> None:
        """Reserve the pages of all nodes that wait for that; where there is no room for all, node by node."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self._waiting_keys.clear()
        try:
            reserved = self._state.host.reserve_all([one.path for one in waiting])
        except NoHostMemoryError:
            for one in waiting:
                self._reserve_one(one)
            return
        self.pages.extend(chain.from_iterable(reserved))
        for one, pages in zip(waiting, reserved, strict=True):
            self._note(one, pages)

    def _reserve_one(self, one: _Waiting) -> None:
        parent = one.path.parent
        if parent is not None and parent.state is PageState.GONE:
            # Evicted for a node before this one.
            self._fail(one.node, SkipReason.PARENT_ABSENT, one.path.keys, first_not_ready(parent).key)
            return
        try:
            (pages,) = self._state.host.reserve_all([one.path])
        except NoHostMemoryError:
            self._fail(one.node, SkipReason.NO_HOST_MEMORY, one.path.keys)
            return
        self.pages.extend(pages)
        self._note(one, pages)

    def _note(self, one: _Waiting, pages: Sequence[HostPage]) -> None:
        """Note the pages that were reserved for a node."""
        node_id = one.node.node_id
        self.nodes.append(StagedNode(node_id, pages, one.path.parent, one.position, one.growths))
        self.parts.append((one.wanted, tuple(zip(*(page.slots for page in pages), strict=True))))
        self.copied.add(node_id)

    def _stage_growths(
        self, node: BackupNode, held: Sequence[HostPage], lacking: Sequence[tuple[int, HostPage, int]]
    ) -> Sequence[Growth]:
        """Reserve slots for components that pages of the host lack. NoHostMemoryError: none."""
        if not lacking:
            return ()
        host = self._state.host
        host.pin(held[-1])
        try:
            growths = host.reserve_more([(page, mask) for _, page, mask in lacking])
        finally:
            host.unpin(held[-1])
        self.growths.extend(growths)
        wanted = tuple(tuple(pages[index] for index, _, _ in lacking) for pages in node.pages)
        self.parts.append((wanted, tuple(zip(*(growth.slots for growth in growths), strict=True))))
        self.copied.add(node.node_id)
        return growths

    def _stage_present(self, position: int, node: BackupNode, tail: HostPage | None, growths: Sequence[Growth]) -> None:
        """No page is to be added: the node is done if its bytes are in place and the store has it or soon will."""
        state = self._state
        at_rest = tail is not None and tail.state is PageState.READY and not state.lacks_deposit(tail)
        if at_rest and not growths and not state.is_shared:
            self.done.append(node.node_id)
            return
        self.nodes.append(StagedNode(node.node_id, (), tail, position, growths))


def _lacking(node: BackupNode, held: Sequence[HostPage]) -> list[tuple[int, HostPage, int]]:
    """The pages of a node that stand ready without components that it has: (index, page, pools)."""
    if not held:
        return []
    masks = component_masks(tuple(pages[: len(held)] for pages in node.pages))
    return [
        (index, page, mask & ~page.mask)
        for index, (page, mask) in enumerate(zip(held, masks, strict=True))
        if mask & ~page.mask and page.state is PageState.READY
    ]


def _needs(nodes: Sequence[BackupNode], stale: int = 0) -> list[int]:
    """For each node the bits of those before it, but for the `stale` first, that name its parent or a page of its own.

    It follows from the step alone, so every rank finds the same, whatever its host holds.
    """
    named: dict[PageKey, int] = {}
    needs = [0] * stale
    for position, node in enumerate(nodes[stale:], stale):
        above = 0 if node.parent is None else named.get(node.parent, 0)
        for key in node.keys:
            before = named.get(key, 0)
            above |= before
            named[key] = before | 1 << position
        needs.append(above)
    return needs
