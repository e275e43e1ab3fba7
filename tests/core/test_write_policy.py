"""Which pages are backed up when: write-through, selective, write-back ahead of need and blocking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcr_actors.core.eviction import LruEviction
from kvcr_actors.core.prefix_tree import PrefixTree
from kvcr_actors.core.write_policy import Backup, SavedPage, WriteBook, WriteSettings, path_of
from kvcr_actors.errors import ConfigError
from kvcr_actors.types import BackupNode, SkipReason, WritePolicy

Tree = PrefixTree[SavedPage]


def tree_of(*paths: str) -> Tree:
    tree = PrefixTree(LruEviction[SavedPage](), SavedPage)
    for path in paths:
        parent = None
        for letter in path:
            page = tree.get(letter.encode() * 32)
            parent = page or tree.insert(letter.encode() * 32, parent, ord(letter), ready=True)
    return tree


def book_of(tree: Tree, policy: WritePolicy, **numbers: float) -> WriteBook[SavedPage]:
    settings = WriteSettings(policy, **numbers)  # type: ignore[arg-type]
    return WriteBook(tree, lambda pages: (tuple(page.payload for page in pages),), settings)


def path(tree: Tree, text: str) -> list[SavedPage]:
    return tree.match(letter.encode() * 32 for letter in text)


def keys(node: BackupNode | None) -> str:
    assert node is not None
    return "".join(chr(key[0]) for key in node.keys)


def test_write_through_saves_what_is_new_below_what_is_saved() -> None:
    tree = tree_of("abc")
    book = book_of(tree, WritePolicy.WRITE_THROUGH)
    node = book.finished(path(tree, "ab"))
    assert (keys(node), node.parent, node.pages) == ("ab", None, ((97, 98),))
    assert book.finished(path(tree, "ab")) is None
    below = book.finished(path(tree, "abc"))
    assert (keys(below), below.parent) == ("c", b"b" * 32)
    assert book.open_nodes == 2
    book.acknowledge([node.node_id, below.node_id], [])
    assert [page.backup for page in path(tree, "abc")] == [Backup.DONE] * 3
    assert book.ahead(3, 0) == book.blocking(3) == []


def test_a_node_is_pinned_until_its_ack_and_a_failed_one_is_tried_again() -> None:
    tree = tree_of("ab")
    book = book_of(tree, WritePolicy.WRITE_THROUGH)
    node = book.finished(path(tree, "ab"))
    assert tree.evict(1) == []
    book.acknowledge([], [(node.node_id, SkipReason.NO_HOST_MEMORY)])
    assert keys(book.finished(path(tree, "ab"))) == "ab"


def test_where_the_host_lost_the_parents_the_next_node_begins_with_them() -> None:
    tree = tree_of("abc")
    book = book_of(tree, WritePolicy.WRITE_THROUGH)
    book.acknowledge([book.finished(path(tree, "ab")).node_id], [])
    node = book.finished(path(tree, "abc"))
    book.acknowledge([], [(node.node_id, SkipReason.PARENT_ABSENT)])
    assert keys(book.finished(path(tree, "abc"))) == "abc"


def test_parents_that_are_still_on_their_way_are_not_asked_for_again() -> None:
    tree = tree_of("abc")
    book = book_of(tree, WritePolicy.WRITE_THROUGH)
    above = book.finished(path(tree, "ab"))
    below = book.finished(path(tree, "abc"))
    book.acknowledge([], [(below.node_id, SkipReason.PARENT_ABSENT)])
    assert [page.backup for page in path(tree, "abc")] == [Backup.PENDING, Backup.PENDING, Backup.NONE]
    book.acknowledge([above.node_id], [])
    assert keys(book.finished(path(tree, "abc"))) == "c"


def test_selective_saves_pages_asked_for_often_enough() -> None:
    tree = tree_of("abc")
    book = book_of(tree, WritePolicy.SELECTIVE, hits=3)
    for page in path(tree, "ab"):
        page.hits = 3
    assert keys(book.finished(path(tree, "abc"))) == "ab"
    assert book.finished(path(tree, "abc")) is None


def test_write_back_saves_ahead_of_need_up_to_its_watermark_parents_first() -> None:
    tree = tree_of("abc", "xy")
    book = book_of(tree, WritePolicy.WRITE_BACK, watermark=0.4)
    assert book.finished(path(tree, "abc")) is None
    assert book.ahead(5, free=2) == []
    (node,) = book.ahead(5, free=1)
    assert keys(node) == "abc", "the first victim, with the ancestors that lack a backup"
    assert [keys(node) for node in book.ahead(5, free=0)] == ["xy"], "what is pending is pinned, and the next one goes"
    assert len(tree) == 5, "asking evicts nothing"


def test_write_back_waits_for_what_must_go_and_goes_without_what_the_host_refuses() -> None:
    tree = tree_of("ab", "xy")
    book = book_of(tree, WritePolicy.WRITE_BACK)
    first, second = book.blocking(3)
    assert [keys(first), keys(second)] == ["ab", "xy"]
    book.acknowledge([first.node_id], [(second.node_id, SkipReason.NO_HOST_MEMORY)])
    assert book.blocking(3) == []
    assert [page.backup for page in path(tree, "xy")] == [Backup.REFUSED] * 2
    assert [page.backup for page in path(tree, "ab")] == [Backup.DONE] * 2


def test_write_back_begins_again_at_the_parents_that_the_host_lost() -> None:
    tree = tree_of("ab")
    book = book_of(tree, WritePolicy.WRITE_BACK)
    (node,) = book.blocking(1)
    book.acknowledge([], [(node.node_id, SkipReason.PARENT_ABSENT)])
    assert [keys(node) for node in book.blocking(1)] == ["ab"]


def acks_until_none(book: WriteBook[SavedPage], reason: SkipReason, wanted: int = 9) -> list[str]:
    """Have the host refuse every node that must go, and ask again, as an engine does; gives the nodes asked for."""
    asked: list[str] = []
    while nodes := book.blocking(wanted):
        asked += map(keys, nodes)
        assert len(asked) < 20, f"asked without end: {asked}"
        book.acknowledge([], [(node.node_id, reason) for node in nodes])
    return asked


def test_below_a_page_that_was_refused_write_back_begins_with_it_and_gives_up_after_one_more_try() -> None:
    tree = tree_of("ab")
    book = book_of(tree, WritePolicy.WRITE_BACK)
    assert acks_until_none(book, SkipReason.NO_HOST_MEMORY) == ["ab"]
    tree.insert(b"c" * 32, path(tree, "ab")[-1], ord("c"), ready=True)
    (node,) = book.blocking(1)
    assert (keys(node), node.parent) == ("abc", None), "without them the host could never take it"
    book.acknowledge([], [(node.node_id, SkipReason.NO_HOST_MEMORY)])
    assert book.blocking(3) == []
    assert book.refused == {SkipReason.NO_HOST_MEMORY: 3}


def test_a_refused_page_that_a_page_below_took_along_is_saved() -> None:
    tree = tree_of("ab")
    book = book_of(tree, WritePolicy.WRITE_BACK)
    acks_until_none(book, SkipReason.COPY_FAILED)
    tree.insert(b"c" * 32, path(tree, "ab")[-1], ord("c"), ready=True)
    book.acknowledge([book.blocking(1)[0].node_id], [])
    assert [page.backup for page in path(tree, "abc")] == [Backup.DONE] * 3
    tree.insert(b"d" * 32, path(tree, "abc")[-1], ord("d"), ready=True)
    assert [keys(node) for node in book.blocking(1)] == ["d"]


def test_a_host_that_always_lacks_the_parents_is_asked_twice_a_page() -> None:
    tree = tree_of("abc", "xy")
    book = book_of(tree, WritePolicy.WRITE_BACK)
    assert acks_until_none(book, SkipReason.PARENT_ABSENT) == ["abc", "xy"] * 2
    assert book.refused == {SkipReason.PARENT_ABSENT: 5}
    assert book.open_nodes == 0


def test_write_through_asks_again_at_each_finish_and_gives_nothing_up() -> None:
    tree = tree_of("ab")
    book = book_of(tree, WritePolicy.WRITE_THROUGH)
    for _ in range(5):
        node = book.finished(path(tree, "ab"))
        assert keys(node) == "ab"
        book.acknowledge([], [(node.node_id, SkipReason.PARENT_ABSENT)])
    assert not book.refused


@given(
    refusals=st.lists(st.sampled_from([None, *SkipReason]), max_size=60),
    grown=st.lists(st.integers(0, 11), max_size=12),
)
def test_write_back_always_comes_to_an_end(refusals: list[SkipReason | None], grown: list[int]) -> None:
    tree: Tree = PrefixTree(LruEviction[SavedPage](), SavedPage)
    book = book_of(tree, WritePolicy.WRITE_BACK)
    pages: list[SavedPage | None] = [None]
    asked = 0
    for number, below in enumerate(grown):
        pages.append(tree.insert(bytes([number]) * 32, pages[below % len(pages)], number, ready=True))
        while nodes := book.blocking(len(tree)):
            for node in nodes:
                why = refusals[asked % len(refusals)] if refusals else SkipReason.PARENT_ABSENT
                asked += 1
                book.acknowledge([] if why else [node.node_id], [(node.node_id, why)] if why else [])
            assert asked <= 4 * len(tree) * (number + 1), "asked without end"
    assert book.open_nodes == 0


def test_a_path_runs_from_the_root() -> None:
    tree = tree_of("abc")
    assert path_of(path(tree, "abc")[-1]) == path(tree, "abc")


@pytest.mark.parametrize("numbers", [{"hits": 0}, {"watermark": 1.5}, {"watermark": -0.1}])
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="watermark"):
        WriteSettings(**numbers)  # type: ignore[arg-type]


def test_a_failed_node_takes_nothing_back_that_was_saved_or_refused_before() -> None:
    tree = tree_of("abcd")
    a, b, c, d = path(tree, "abcd")
    book = book_of(tree, WritePolicy.WRITE_THROUGH)
    b.backup = Backup.DONE
    node = book.finished([a, b, c])
    book.acknowledge([], [(node.node_id, SkipReason.COPY_FAILED)])
    assert [page.backup for page in (a, b, c)] == [Backup.NONE, Backup.DONE, Backup.NONE]
    a.backup, c.backup = Backup.DONE, Backup.REFUSED
    node = book.finished([a, b, c, d])
    book.acknowledge([], [(node.node_id, SkipReason.PARENT_ABSENT)])
    assert [page.backup for page in (a, b, c, d)] == [Backup.NONE, Backup.NONE, Backup.REFUSED, Backup.NONE]
