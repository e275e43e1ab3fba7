"""`HostTier.forget`: nothing of a generation is found, filled or committed again, and every slot comes back."""

from __future__ import annotations

import random
from itertools import count

import pytest

from kvcr_actors.core.host_tier import HostPage, HostTier, PagesForgotten, PagesStored, PageState
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import CacheLayout, PoolSpec

LAYOUT = CacheLayout((PoolSpec("kv", 1, 8), PoolSpec("side", 1, 8)))
A = chain("a", 5)


class Gone:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def ready(host: HostTier, keys: tuple[bytes, ...], parent: HostPage | None = None) -> list[HostPage]:
    pages = host.reserve(parent, keys)
    assert host.commit(pages) == pages
    return pages


def test_pages_that_nothing_holds_go_at_once() -> None:
    host, gone = HostTier(LAYOUT, 8), Gone()
    pages = ready(host, A)
    host.take_changes()
    assert host.forget(gone) == 5
    assert (host.generation, host.free_pages) == (1, 8)
    assert (host.ready_pages, host.filling_pages, host.forgotten_pages) == (0, 0, 0)
    assert {page.state for page in pages} == {PageState.GONE}
    assert (host.get(A[0]), host.match(A), host.contents(), gone.calls) == (None, [], frozenset(), 1)
    assert host.take_changes()[0] == PagesForgotten(5)
    host.check()


def test_an_empty_tier_tells_of_nothing() -> None:
    host, gone = HostTier(LAYOUT, 8), Gone()
    assert host.forget(gone) == 0
    assert (host.take_changes(), gone.calls, host.generation) == ([], 1, 1)


def test_a_pin_keeps_the_slots_of_its_path_and_of_nothing_else() -> None:
    host, gone = HostTier(LAYOUT, 8), Gone()
    pages = ready(host, A)
    host.pin(pages[2])
    host.pin(pages[2])
    host.forget(gone)
    assert [page.state for page in pages] == [PageState.FORGOTTEN] * 3 + [PageState.GONE] * 2
    assert (host.forgotten_pages, gone.calls) == (3, 0)
    host.check()
    new = ready(host, A)
    assert new[0] is not pages[0], "the same keys can be held again"
    host.unpin(pages[2])
    assert host.forgotten_pages == 3
    host.unpin(pages[2])
    assert (host.forgotten_pages, gone.calls, host.ready_pages) == (0, 1, 5)
    host.check()


def test_two_pins_on_branches_share_their_root() -> None:
    host, gone = HostTier(LAYOUT, 8), Gone()
    root = ready(host, A[:2])
    left, right = ready(host, chain("l", 2), root[1]), ready(host, chain("r", 1), root[1])
    host.pin(left[1])
    host.pin(right[0])
    host.forget(gone)
    host.unpin(left[1])
    assert [page.state for page in (*root, *left, *right)] == [
        *[PageState.FORGOTTEN] * 2,
        *[PageState.GONE] * 2,
        PageState.FORGOTTEN,
    ]
    host.unpin(right[0])
    assert (host.forgotten_pages, gone.calls) == (0, 1)
    host.check()


def test_a_page_that_is_being_filled_never_becomes_ready_and_is_abandoned() -> None:
    host, gone = HostTier(LAYOUT, 8), Gone()
    above = ready(host, A[:2])
    filling = host.reserve(above[1], A[2:])
    host.forget(gone)
    assert [page.state for page in above] == [PageState.GONE] * 2, "its copy needs its own slots alone"
    assert all(page.is_unfilled and page.is_forgotten for page in filling)
    host.take_changes()
    assert host.commit(filling) == []
    assert host.take_changes() == []
    host.abandon(filling[:1])
    assert (host.forgotten_pages, gone.calls) == (2, 0)
    host.abandon(filling[1:])
    assert (host.forgotten_pages, gone.calls, host.free_pages) == (0, 1, 8)
    host.check()


def test_old_and_new_pages_are_abandoned_together() -> None:
    host = HostTier(LAYOUT, 8)
    old = host.reserve(None, A[:2])
    host.forget(Gone())
    new = host.reserve(None, A[:2])
    host.abandon([*old, *new])
    assert (host.forgotten_pages, host.free_pages) == (0, 8)
    host.check()


def test_components_that_come_for_a_forgotten_page_are_given_back() -> None:
    host, gone = HostTier(LAYOUT, 8), Gone()
    pages = host.reserve(None, A[:2], [0b01, 0b01])
    host.commit(pages)
    growths = host.reserve_more([(page, 0b10) for page in pages])
    host.forget(gone)
    assert host.grow(growths[:1]) == []
    host.drop(growths[1:])
    assert (host.forgotten_pages, host.free_pages, gone.calls) == (0, 8, 1)
    host.check()


def test_forgotten_slots_are_room_that_nobody_has() -> None:
    host = HostTier(LAYOUT, 4)
    pages = ready(host, A[:4])
    host.pin(pages[3])
    host.forget(Gone())
    with pytest.raises(NoHostMemoryError):
        host.reserve(None, A[:1])
    host.unpin(pages[3])
    assert len(ready(host, A[:4])) == 4


def test_misuse_of_a_forgotten_page_is_refused() -> None:
    host = HostTier(LAYOUT, 4)
    pages = ready(host, A[:2])
    host.pin(pages[1])
    host.forget(Gone())
    with pytest.raises(ValueError, match="not in the tree"):
        host.pin(pages[1])
    with pytest.raises(ValueError, match="is gone; reserve below"):
        host.reserve(pages[1], A[2:3])
    with pytest.raises(ValueError, match="is not ready"):
        host.reserve_more([(pages[1], 0)])
    with pytest.raises(ValueError, match="is not filling"):
        host.abandon(pages)
    with pytest.raises(ValueError, match="no pin to take back"):
        host.unpin(pages[0])
    host.unpin(pages[1])
    with pytest.raises(ValueError, match="no pin to take back"):
        host.unpin(pages[1])


def test_what_is_forgotten_twice_is_told_of_once_all_of_it_is_gone() -> None:
    host, first, second = HostTier(LAYOUT, 8), Gone(), Gone()
    old = host.reserve(None, A[:1])
    host.forget(first)
    young = host.reserve(None, A[:1])
    host.forget(second)
    host.abandon(old)
    assert (first.calls, second.calls, host.forgotten_pages) == (0, 0, 1)
    host.abandon(young)
    assert (first.calls, second.calls) == (1, 1)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_moves_leaves_every_slot_free(seed: int) -> None:
    rng, host, numbers = random.Random(seed), HostTier(LAYOUT, 24), count()
    pinned: list[HostPage] = []
    filling: list[HostPage] = []
    generations = dict[HostPage, int]()
    for _ in range(300):
        roll = rng.random()
        held = [page for page in generations if page.state is PageState.READY]
        assert all(generations[page] == host.generation for page in held)
        if roll < 0.4:
            parent = rng.choice([None, *held])
            try:
                pages = host.reserve(parent, chain(str(next(numbers)), rng.randint(1, 3)))
            except NoHostMemoryError:
                continue
            generations.update(dict.fromkeys(pages, host.generation))
            filling += pages
        elif roll < 0.6 and filling:
            host.commit(filling)
            filling = [page for page in filling if page.is_unfilled]
        elif roll < 0.7 and filling:
            host.abandon(filling)
            filling = []
        elif roll < 0.85 and held:
            host.pin(page := rng.choice(held))
            pinned.append(page)
        elif roll < 0.95 and pinned:
            host.unpin(pinned.pop(rng.randrange(len(pinned))))
        else:
            host.forget(Gone())
            told = [type(change) for change in host.take_changes()]
            assert PagesStored not in told or PagesForgotten in told[told.index(PagesStored) :]
        host.check()
    host.abandon(filling)
    for page in pinned:
        host.unpin(page)
    host.forget(Gone())
    assert (host.forgotten_pages, host.free_pages) == (0, 24)
    host.check()
