"""The tree evicts as an LRU would in which every use of a page is a use of all pages above it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcr_actors.core.eviction import LruEviction
from kvcr_actors.core.prefix_tree import PrefixTree, TreePage

Tree = PrefixTree[TreePage]


@pytest.fixture
def tree() -> Tree:
    return PrefixTree(LruEviction[TreePage]())


def grow(tree: Tree, keys: str, parent: TreePage | None = None, *, ready: bool = True) -> list[TreePage]:
    """Insert a path of one-letter keys below a page."""
    pages: list[TreePage] = []
    for key in keys:
        parent = tree.insert(key.encode(), parent, payload=key, ready=ready)
        pages.append(parent)
    return pages


def evict_all(tree: Tree) -> str:
    return "".join(page.payload for page in tree.evict(len(tree)))


def test_a_match_is_the_leading_run_of_ready_pages(tree: Tree) -> None:
    pages = grow(tree, "abc")
    grow(tree, "d", pages[-1], ready=False)
    assert tree.match([b"a", b"b", b"c", b"d"]) == pages
    assert tree.match([b"a", b"x", b"c"]) == pages[:1]
    assert tree.match([]) == []
    assert tree.get(b"d") is not None
    assert tree.get(b"x") is None
    assert b"a" in tree
    assert len(tree) == len(list(tree)) == 4


def test_leaves_leave_before_their_parents(tree: Tree) -> None:
    grow(tree, "abc")
    assert evict_all(tree) == "cba"


def test_a_touched_path_leaves_last_and_tail_first(tree: Tree) -> None:
    first = grow(tree, "ab")
    grow(tree, "xy")
    tree.touch(first)
    tree.touch([])
    assert evict_all(tree) == "yxba"


def test_a_parent_is_never_older_than_the_child_that_left(tree: Tree) -> None:
    (root,) = grow(tree, "a")
    (pinned,) = grow(tree, "x")
    tree.pin(pinned)
    (child,) = grow(tree, "b", root)
    assert tree.evict(1) == [child]
    tree.unpin(pinned)
    assert evict_all(tree) == "xa"


def test_a_use_of_a_child_that_was_taken_out_counts_for_its_parent(tree: Tree) -> None:
    (root,) = grow(tree, "a")
    grow(tree, "x")
    (child,) = grow(tree, "b", root)
    tree.remove(child)
    assert evict_all(tree) == "xa"


def test_one_pin_protects_the_whole_path(tree: Tree) -> None:
    pages = grow(tree, "abc")
    grow(tree, "d", pages[0])
    tree.pin(pages[2])
    tree.pin(pages[2])
    assert evict_all(tree) == "d"
    tree.unpin(pages[2])
    assert evict_all(tree) == ""
    tree.unpin(pages[2])
    assert evict_all(tree) == "cba"


def test_pages_that_are_not_ready_are_never_evicted(tree: Tree) -> None:
    a, b = grow(tree, "ab", ready=False)
    assert evict_all(tree) == ""
    tree.make_ready(a)
    assert evict_all(tree) == ""
    tree.make_ready(b)
    assert evict_all(tree) == "ba"


def test_a_page_that_never_became_ready_can_go_before_its_children(tree: Tree) -> None:
    a, b = grow(tree, "ab", ready=False)
    tree.remove(a)
    tree.check()
    assert tree.get(b"b") is b
    with pytest.raises(ValueError, match="or its parent is not"):
        tree.make_ready(b)
    tree.remove(b)
    assert len(tree) == 0


def test_a_removed_leaf_makes_its_parent_evictable(tree: Tree) -> None:
    _, b = grow(tree, "ab")
    tree.remove(b)
    assert evict_all(tree) == "a"


def test_evictions_can_be_undone(tree: Tree) -> None:
    pages = grow(tree, "abc")
    grow(tree, "d", pages[0])
    tree.pin(pages[0])
    gone = tree.evict(3)
    assert tree.evict(1) == []
    for page in reversed(gone):
        assert page is not None
        tree.restore(page)
    tree.check()
    tree.unpin(pages[0])
    assert evict_all(tree) == "cbda"
    tree.restore(pages[0])
    assert evict_all(tree) == "a"


def test_misuse_is_refused_before_any_change(tree: Tree) -> None:
    a, b = grow(tree, "ab")
    (waiting,) = grow(tree, "w", ready=False)
    gone = TreePage(b"z", None, "z", ready=True)
    lost = TreePage(b"y", gone, "y", ready=True)
    for call, words in [
        (lambda: tree.insert(b"a", None, "a", ready=True), "in the tree already"),
        (lambda: tree.insert(b"n", gone, "n", ready=True), "is not in the tree"),
        (lambda: tree.insert(b"n", waiting, "n", ready=True), "cannot be ready before"),
        (lambda: tree.make_ready(a), "is ready already"),
        (lambda: tree.make_ready(gone), "is not in the tree"),
        (lambda: tree.remove(gone), "is not in the tree"),
        (lambda: tree.remove(a), "1 children; it must stay"),
        (lambda: tree.pin(gone), "is not in the tree"),
        (lambda: tree.unpin(a), "no pin to take back"),
        (lambda: tree.restore(b), "cannot return"),
        (lambda: tree.restore(lost), "cannot return"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    tree.pin(b)
    with pytest.raises(ValueError, match="1 pins"):
        tree.remove(b)
    tree.check()
    assert len(tree) == 3


def test_touching_tells_the_policy_of_an_evictable_tail_only() -> None:
    touched: list[str] = []

    class Watching(LruEviction[TreePage]):
        def touch(self, page: TreePage) -> None:
            touched.append(page.payload)

    tree = PrefixTree(Watching())
    pages = grow(tree, "ab")
    tree.touch(pages[:1])
    tree.touch(pages)
    tree.pin(pages[1])
    tree.touch(pages)
    tree.touch(grow(tree, "c", ready=False))
    assert touched == ["b"]


def test_the_invariant_checker_sees_damage(tree: Tree) -> None:
    a, b = grow(tree, "ab")
    a.children = 2
    with pytest.raises(AssertionError, match="counts 2 children"):
        tree.check()
    a.children = 1
    a.ready = False
    with pytest.raises(AssertionError, match="ready before its parent"):
        tree.check()
    a.ready = True
    del tree._pages[b"a"]
    with pytest.raises(AssertionError, match="its parent is not in the tree"):
        tree.check()
    b.ready = False
    tree.check()


class TreeMachine(RuleBasedStateMachine):
    """Against a model in which each use gives new stamps to the page and to everything above it, child first."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LruEviction[TreePage]()
        self.tree: Tree = PrefixTree(self.policy)
        self.used: dict[TreePage, int] = {}
        self.clock = 0
        self.names = 0

    def _use(self, page: TreePage | None) -> None:
        while page is not None:
            self.clock += 1
            if page in self.used:
                self.used[page] = self.clock
            page = page.parent

    def _path(self, page: TreePage | None) -> list[TreePage]:
        path: list[TreePage] = []
        while page is not None:
            path.append(page)
            page = page.parent
        return path[::-1]

    def _evictable(self) -> list[TreePage]:
        parents = {page.parent for page in self.used}
        return [page for page in self.used if page.ready and not page.pins and page not in parents]

    def _some(self, data: st.DataObject) -> TreePage:
        return data.draw(st.sampled_from(list(self.used)))

    @rule(data=st.data(), ready=st.booleans(), root=st.booleans())
    def insert(self, data: st.DataObject, ready: bool, root: bool) -> None:
        parent = None if root or not self.used else self._some(data)
        self.names += 1
        key = self.names.to_bytes(4, "big")
        page = self.tree.insert(key, parent, None, ready=ready and (parent is None or parent.ready))
        self.used[page] = 0
        self._use(page)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        path = self._path(self._some(data))
        if all(page in self.used for page in path):
            first = data.draw(st.integers(0, len(path) - 1))
            self.tree.touch(path[first:])
            self._use(path[-1])

    @precondition(lambda self: self.used)
    @rule(data=st.data(), keep=st.booleans())
    def pin_or_unpin(self, data: st.DataObject, keep: bool) -> None:
        page = self._some(data)
        if page.pins and not keep:
            self.tree.unpin(page)
        else:
            self.tree.pin(page)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def make_ready(self, data: st.DataObject) -> None:
        page = self._some(data)
        if not page.ready and (page.parent is None or page.parent.ready):
            self.tree.make_ready(page)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        page = self._some(data)
        if not page.pins and not (page.ready and page.children):
            self.tree.remove(page)
            del self.used[page]

    @rule(count=st.integers(1, 4))
    def evict_and_undo(self, count: int) -> None:
        gone = self.tree.evict(count)
        for page in reversed(gone):
            self.tree.restore(page)

    @rule()
    def evict(self) -> None:
        expected = min(self._evictable(), key=lambda page: self.used[page], default=None)
        assert self.tree.evict(1) == ([] if expected is None else [expected])
        if expected is not None:
            del self.used[expected]

    @invariant()
    def holds_the_models_pages(self) -> None:
        self.tree.check()
        assert set(self.tree) == set(self.used)
        assert len(self.policy) == len(self._evictable())


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
