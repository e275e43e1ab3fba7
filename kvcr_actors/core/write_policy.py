"""What an engine hands to the host tier, and when: nodes by write policy, and what their acks mean.

An engine keeps its pages in a `PrefixTree` of `SavedPage`s, and asks `WriteBook` at each finish, at each eviction and
once a step. The book makes nodes, parents first, and pins each node's deepest page until its ack.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import attrs

from kvcr_actors.core.prefix_tree import PrefixTree, TreePage
from kvcr_actors.errors import ConfigError
from kvcr_actors.types import BackupNode, Components, NodeId, PageKey, SkipReason, WritePolicy

_PARENT_TRIES = 2
"""With write-back: a page that the host lacks the parents of is asked for again, once, together with them."""


class Backup(enum.Enum):
    """What the engine believes of a page's copy in host memory."""

    NONE = "none"
    PENDING = "pending"
    DONE = "done"
    REFUSED = "refused"
    """It was not to be had when the page had to go; the page goes without, unless a page below it takes it along."""


class SavedPage(TreePage):
    """A page on the device: how often it was asked for, and its backup. `payload` is the engine's.

    `parentless` counts the backups of it that failed since its last because the host lacked its parents.
    """

    __slots__ = ("backup", "hits", "parentless")

    def __init__(self, key: PageKey, parent: Any, payload: Any, ready: bool) -> None:
        super().__init__(key, parent, payload, ready)
        self.hits = 0
        self.parentless = 0
        self.backup = Backup.NONE


PageT = TypeVar("PageT", bound=SavedPage)


@attrs.frozen
class WriteSettings:
    """A policy and its numbers: `hits` is for selective, `watermark` (a share of the device's pages) for write-back."""

    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    hits: int = 2
    """A page is backed up when it was asked for this often."""
    watermark: float = 0.1
    """Pages are backed up ahead until eviction could free this share of the device without waiting."""

    def __attrs_post_init__(self) -> None:
        if self.hits < 1 or not 0 <= self.watermark <= 1:
            raise ConfigError(f"hits {self.hits} must be 1 or more, watermark {self.watermark} a share from 0 to 1")


class WriteBook(Generic[PageT]):
    """Makes nodes of the pages of a tree that lack a backup. `components` gives the device pages of a run of pages.

    An engine that resets begins a new tree and a new book, and gives it the `ids` of the one before.
    """

    def __init__(
        self,
        tree: PrefixTree[PageT],
        components: Callable[[Sequence[PageT]], Components],
        settings: WriteSettings,
        ids: Iterator[NodeId] | None = None,
    ) -> None:
        self._tree = tree
        self._components = components
        self._settings = settings
        self._ids = count(1) if ids is None else ids
        self._open: dict[NodeId, Sequence[PageT]] = {}
        self.refused: Counter[SkipReason] = Counter()
        """With write-back: pages given up, by the reason of their last failure."""

    @property
    def open_nodes(self) -> int:
        """Nodes that wait for their ack."""
        return len(self._open)

    def finished(self, path: Sequence[PageT]) -> BackupNode | None:
        """The node that a finished request's path (root to tail) calls for, if any."""
        if self._settings.policy is WritePolicy.WRITE_BACK:
            return None
        if self._settings.policy is WritePolicy.SELECTIVE:
            path = [page for page in path if page.hits >= self._settings.hits]
        return self._node(path)

    def ahead(self, capacity: int, free: int) -> list[BackupNode]:
        """With write-back, once a step: nodes for what eviction would take to free the watermark's share."""
        return self._leaving(int(capacity * self._settings.watermark) - free)

    def blocking(self, wanted: int) -> list[BackupNode]:
        """With write-back, before `wanted` pages are evicted: nodes whose acks eviction must wait for; none if none.

        Ask again after the acks, until there are none.
        """
        return self._leaving(wanted)

    def acknowledge(self, done: Sequence[NodeId], failed: Sequence[tuple[NodeId, SkipReason]]) -> None:
        """Note what the host has now, and let the pages go."""
        for node_id in done:
            for page in self._close(node_id):
                page.backup, page.parentless = Backup.DONE, 0
        for node_id, reason in failed:
            pages = self._close(node_id)
            for page in pages:
                if page.backup is Backup.PENDING:
                    page.backup = self._after_failure(page, reason)
            if reason is SkipReason.PARENT_ABSENT:
                # The host let the parents go: the next node of this path begins where they began.
                for page in path_of(pages[0])[:-1]:
                    if page.backup is Backup.DONE:
                        page.backup = Backup.NONE

    def _leaving(self, wanted: int) -> list[BackupNode]:
        if self._settings.policy is not WritePolicy.WRITE_BACK:
            return []
        nodes = [self._node(path_of(page)) for page in self._unsaved_victims(wanted)]
        return [node for node in nodes if node is not None]

    def _unsaved_victims(self, wanted: int) -> list[PageT]:
        """Of the next `wanted` pages that eviction would take, those without a backup. Nothing is changed."""
        victims = self._tree.evict(wanted)
        for page in reversed(victims):
            self._tree.restore(page)
        return [page for page in victims if page.backup is Backup.NONE]

    def _after_failure(self, page: PageT, reason: SkipReason) -> Backup:
        if self._settings.policy is not WritePolicy.WRITE_BACK:
            return Backup.NONE
        page.parentless += reason is SkipReason.PARENT_ABSENT
        if reason is SkipReason.PARENT_ABSENT and page.parentless < _PARENT_TRIES:
            return Backup.NONE
        # Write-back asks only when a page must go: it goes, and is computed again when it is asked for.
        self.refused[reason] += 1
        return Backup.REFUSED

    def _node(self, path: Sequence[PageT]) -> BackupNode | None:
        first = next((index for index, page in enumerate(path) if page.backup is Backup.NONE), None)
        if first is None:
            return None
        while first and path[first - 1].backup is Backup.REFUSED:
            first -= 1  # The host lacks it, and without it nothing below it can be backed up.
        pages = path[first:]
        for page in pages:
            if page.backup is Backup.NONE:
                page.backup = Backup.PENDING
        self._tree.pin(pages[-1])
        parent = pages[0].parent
        node = BackupNode(
            node_id=next(self._ids),
            keys=tuple(page.key for page in pages),
            pages=self._components(pages),
            parent=None if parent is None else parent.key,
        )
        self._open[node.node_id] = pages
        return node

    def _close(self, node_id: NodeId) -> Sequence[PageT]:
        """The pages of a node whose ack came; they may be evicted again."""
        pages = self._open.pop(node_id)
        self._tree.unpin(pages[-1])
        return pages


def path_of(page: PageT) -> list[PageT]:
    """The pages from the root to a page."""
    path: list[PageT] = []
    step: PageT | None = page
    while step is not None:
        path.append(step)
        step = step.parent
    path.reverse()
    return path
