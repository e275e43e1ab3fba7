"""The bounded index: exactly least recently used, whatever happens to the bytes beneath it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored
from kvcr_actors.errors import ConfigError
from kvcr_actors.ports import PageBatch
from kvcr_actors.stores.backend import removed_events, stored_events
from kvcr_actors.stores.bounded import BoundedBackend
from kvcr_actors.stores.disk import disk_backend
from kvcr_actors.stores.medium import Parts
from kvcr_actors.stores.memory import MemoryMedium, memory_backend
from kvcr_actors.testing.store_driver import ALL_POOLS, LAYOUT, chain
from kvcr_actors.types import PageKey, Tier
from tests.stores.pages import NAMESPACE, Pages, oldest_first


@pytest.fixture(params=["memory", "disk"])
def make_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], BoundedBackend]:
    if request.param == "memory":
        return memory_backend
    return lambda capacity: disk_backend(tmp_path / "store", capacity, NAMESPACE)


class _Oracle:
    """Least recently used, as the words say it: a list, oldest first, and the pools of each page."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: list[PageKey] = []
        self.pools: dict[PageKey, int] = {}

    def use(self, keys: tuple[PageKey, ...]) -> None:
        for key in reversed(keys):
            if key in self.pools:
                self.order.remove(key)
                self.order.append(key)

    def write(self, keys: tuple[PageKey, ...], pools: int) -> None:
        self.use(keys)
        for key in keys:
            if key not in self.pools:
                if len(self.order) == self.capacity:
                    if self.order[0] in keys:
                        continue
                    del self.pools[self.order.pop(0)]
                self.order.append(key)
                self.pools[key] = 0
            self.pools[key] |= pools
        self.use(keys)


@pytest.mark.parametrize("seed", range(4))
def test_any_run_of_operations_holds_what_an_exact_lru_holds(
    make_backend: Callable[[int], BoundedBackend], seed: int
) -> None:
    rng = random.Random(seed)
    capacity = rng.randint(1, 24)
    backend = make_backend(capacity)
    pages, oracle = Pages(backend), _Oracle(capacity)
    prefixes = [chain(f"{seed}/{index}", 9) for index in range(8)]
    for _ in range(250):
        prefix = rng.choice(prefixes)
        start = rng.randrange(len(prefix))
        keys = prefix[start : rng.randint(start + 1, len(prefix))]
        match rng.randrange(4):
            case 0:
                backend.align(keys)
                oracle.use(keys)
            case 1:
                pools = rng.randint(1, ALL_POOLS)
                found = pages.read(keys, pools)
                expected = "".join("o" if oracle.pools.get(key, 0) & pools == pools else "m" for key in keys)
                assert found == expected
                oracle.use(keys)
            case _:
                pools = rng.randint(1, ALL_POOLS)
                pages.write(keys, pools)
                oracle.write(keys, pools)
        assert oldest_first(backend) == oracle.order
        assert {key: backend.lookup(key) for key in oracle.order} == oracle.pools
    pages.close()


def test_one_batch_tells_what_went_before_what_came_and_orders_both(
    make_backend: Callable[[int], BoundedBackend],
) -> None:
    backend = make_backend(4)
    pages = Pages(backend)
    old, new = chain("old", 4), chain("new", 3)
    pages.write(old)
    # Made recent head to tail on purpose: the head is the oldest, and the event must still name leaves first.
    for key in old:
        backend.align([key])
    backend.write(_batch(new), pages.host)
    removed, stored = backend.take_events()
    assert isinstance(removed, BlocksRemoved)
    assert isinstance(stored, BlocksStored)
    assert removed.keys == old[2::-1]
    assert stored.keys == new
    assert stored.parents == (None, *new[:-1])
    pages.close()


def test_a_page_without_components_fails_and_is_not_held(make_backend: Callable[[int], BoundedBackend]) -> None:
    pages = Pages(make_backend(4))
    assert pages.write(chain("a", 1), pools=0) == "f"
    assert pages.last.error == "write: a page without components"
    assert pages.backend.contents() == frozenset()
    pages.close()


def test_a_merge_keeps_the_bytes_and_the_parent_that_are_held(make_backend: Callable[[int], BoundedBackend]) -> None:
    pages = Pages(make_backend(4))
    keys = chain("a", 2)
    pages.write(keys, pools=0b001)
    pages.write(keys[1:], version=1)
    assert pages.read(keys[1:], pools=0b001, version=0) == "o"
    assert pages.read(keys[1:], pools=0b110, version=1) == "o"
    assert pages.inventory.parent(Tier.STORE, keys[1]) == keys[0]
    pages.close()


class _BrokenMedium(MemoryMedium):
    """A medium with a bug, from the moment that it is told to break."""

    broken = False

    def save(self, key: PageKey, parent: PageKey | None, parts: Parts) -> None:
        if self.broken:
            raise ZeroDivisionError("a bug")
        super().save(key, parent, parts)


def test_a_batch_that_breaks_off_still_tells_what_it_evicted() -> None:
    medium = _BrokenMedium()
    pages = Pages(BoundedBackend(2, medium))
    pages.write(chain("old", 2))
    medium.broken = True
    with pytest.raises(ZeroDivisionError):
        pages.write(chain("new", 1))
    pages.publish()
    assert pages.inventory.keys(Tier.STORE) == {chain("old", 1)[0]}


def test_discarded_pages_are_gone_and_told(make_backend: Callable[[int], BoundedBackend]) -> None:
    pages = Pages(make_backend(4))
    keys = chain("a", 3)
    pages.write(keys)
    pages.backend.discard((keys[2], *chain("never", 1)))
    pages.publish()
    assert pages.read(keys) == "oom"
    pages.close()


def test_counters_tell_every_outcome(make_backend: Callable[[int], BoundedBackend]) -> None:
    pages = Pages(make_backend(3))
    keys = chain("a", 4)
    pages.write(keys)
    pages.write(keys[:1])
    pages.read(keys)
    pages.write(chain("b", 1))
    counters = pages.backend.counters()
    expected = {"held": 3, "written": 4, "full": 1, "already_held": 1, "read": 3, "missed": 1, "evicted": 1}
    assert {name: counters[name] for name in expected} == expected
    pages.close()


def test_memory_is_held_for_components_alone() -> None:
    pages = Pages(memory_backend(2))
    sizes = [pool.page_bytes for pool in LAYOUT.pools]
    pages.write(chain("whole", 2))
    assert pages.count("bytes_held") == 2 * sum(sizes)
    pages.write(chain("whole", 1))
    pages.write(chain("part", 1), pools=0b100)
    assert pages.count("bytes_held") == sum(sizes) + sizes[2]
    pages.close()
    assert pages.count("bytes_held") == 0


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_store_without_capacity_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match="capacity_pages"):
        memory_backend(capacity)


def test_events_name_parents_first_and_removals_leaves_first_however_pages_are_given() -> None:
    keys = chain("a", 50)
    pairs = list(zip(keys, (None, *keys[:-1]), strict=True))
    random.Random(1).shuffle(pairs)
    assert stored_events(pairs) == [BlocksStored(Tier.STORE, keys, (None, *keys[:-1]))]
    assert removed_events(pairs) == [BlocksRemoved(Tier.STORE, tuple(reversed(keys)))]


def _batch(keys: tuple[PageKey, ...]) -> PageBatch:
    return PageBatch(keys, (range(len(keys)),) * 3, (None, *keys[:-1]))
