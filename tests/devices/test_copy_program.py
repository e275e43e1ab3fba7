from __future__ import annotations

import random
import weakref

import numpy as np
import pytest

from kvcr_actors.core.copy_plan import CopyPlan, Direction, plan_copy
from kvcr_actors.devices.copy_program import HEADER_FIELDS, TileShape, cut_parts, encode, index_words
from kvcr_actors.devices.host_transfers import PITCHED_PAGES, HostPairs, HostRun, Transfers
from kvcr_actors.devices.pairs import check_pairs
from kvcr_actors.devices.staging_ring import StagingRing
from kvcr_actors.errors import DeviceError
from kvcr_actors.types import CacheLayout, PoolSpec

LAYOUT = CacheLayout((PoolSpec("kv", 4, 8), PoolSpec("swa", 2, 24), PoolSpec("mamba", 1, 100)))
WHOLE = [tuple((0, pool.planes) for pool in LAYOUT.pools)]


HOST = 1_000_000


def pairs_of(plan: CopyPlan, chunk_slots: int = 1 << 30) -> list[HostPairs]:
    found: list[HostPairs] = []
    for copy in plan.pools:
        spec = LAYOUT.pools[copy.pool]
        pairs = check_pairs(LAYOUT, plan.direction, copy, 1000, 1000)
        run = HostRun(0, spec.planes, HOST, spec.page_bytes, chunk_slots)
        found.append(HostPairs(pairs, spec.page_bytes, spec.plane_bytes, [run]))
    return found


def plan_of(*slots: list[int]) -> CopyPlan:
    return plan_copy(Direction.TO_HOST, [(tuple(list(range(len(of_pool))) for of_pool in slots), tuple(slots))])


@pytest.mark.parametrize("limit", [100, 101, 116, 250, 1 << 20])
def test_parts_hold_every_pair_once_in_order_and_fit_the_limit(limit: int) -> None:
    copies = pairs_of(plan_of(list(range(7)), list(range(3)), list(range(4))))
    parts = cut_parts(LAYOUT, copies, WHOLE, limit)
    assert all(part.size <= limit for part in parts)
    for copy in copies:
        pieces = [piece for part in parts for piece in part.pieces if piece.pairs is copy]
        assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert pieces[-1].end == copy.count
    for part in parts:
        assert len({piece.pairs.pool for piece in part.pieces}) == len(part.pieces)
        ends = [piece.offset + piece.pages * piece.row_bytes for piece in part.pieces]
        begins = [piece.offset for piece in part.pieces]
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
        assert ends[-1] == part.size


def test_a_pool_begins_at_a_multiple_of_sixteen_bytes_since_the_kernel_moves_as_many_at_once() -> None:
    layout = CacheLayout((PoolSpec("odd", 1, 100), PoolSpec("kv", 4, 8)))
    plan = plan_copy(Direction.TO_HOST, [((range(3), range(3)), (range(3), range(3)))])
    pairs = [check_pairs(layout, plan.direction, copy, 3, 3) for copy in plan.pools]
    copies = [
        HostPairs(of_pool, layout.pools[of_pool.pool].page_bytes, layout.pools[of_pool.pool].plane_bytes, [])
        for of_pool in pairs
    ]
    (part,) = cut_parts(layout, copies, [((0, 1), (0, 4))], 1 << 20)
    assert [piece.offset for piece in part.pieces] == [0, 304]


def test_a_page_that_no_part_can_hold_is_an_error_that_names_the_pool() -> None:
    with pytest.raises(DeviceError, match="pool mamba: a page's 100 bytes exceed 99"):
        cut_parts(LAYOUT, pairs_of(plan_of([1], [1], [1])), WHOLE, 99)


def test_a_group_without_planes_of_a_pool_leaves_it_out() -> None:
    copies = pairs_of(plan_of([1, 2], [1, 2], [1, 2]))
    parts = cut_parts(LAYOUT, copies, [((0, 1), (0, 0), (0, 1)), ((1, 3), (0, 2), (1, 0))], 1 << 20)
    assert [[piece.pairs.pool for piece in part.pieces] for part in parts] == [[0, 2], [0, 1]]
    assert [part.group for part in parts] == [0, 1]


def test_the_index_buffer_tells_each_part_its_programs_and_pages() -> None:
    copies = pairs_of(plan_of(list(range(5)), [], [9]))
    parts = cut_parts(LAYOUT, copies, WHOLE, 110)
    tile = TileShape(rows=2, columns=1, word_bytes=4)
    buffer = np.full(index_words(LAYOUT, parts, copies), -7)
    encoded = encode(LAYOUT, parts, [1000, 2000, 3000][: len(parts)], copies, tile, buffer)
    assert [part.programs for part in encoded] == [12, 8, 13][: len(parts)]
    headers = buffer[: len(parts) * 3 * HEADER_FIELDS].reshape(len(parts), 3, HEADER_FIELDS)
    first = len(parts) * 3 * HEADER_FIELDS
    assert headers[0].tolist() == [[0, 3, first, 1000, 0, 4], [12, 0, 0, 0, 0, 1], [12, 0, 0, 0, 0, 1]]
    assert headers[1].tolist() == [[0, 2, first + 3, 2000, 0, 4], [8, 0, 0, 0, 0, 1], [8, 0, 0, 0, 0, 1]]
    assert headers[2].tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1], [0, 1, first + 5, 3000, 0, 1]]
    assert encoded[1].pages_at == (first + 3,)
    assert buffer[first:].tolist() == [0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("seed", range(30))
def test_transfers_name_each_byte_once_whatever_the_runs(seed: int) -> None:
    rng = random.Random(seed)
    slots: list[int] = []
    while len(slots) < 60:
        begin = (slots[-1] + 2 if slots else 0) + rng.randrange(3)
        slots += range(begin, begin + rng.choice([1, 2, PITCHED_PAGES - 1, PITCHED_PAGES, 30]))
    chunk = rng.choice([7, 16, 1 << 30])
    (pairs,) = pairs_of(plan_of(slots, [], []), chunk)
    start = rng.choice([0, 0, 5])
    end = rng.choice([len(slots), len(slots), 40])
    planes = rng.choice([range(4), range(1, 3), range(3, 4)])
    width = len(planes) * 8
    transfers = pairs.transfers(start, end, planes, 10_000)
    for _, _, address, pitch, _, count in transfers.pitched:
        assert (address - HOST) // (32 * chunk) == (address + (count - 1) * pitch - HOST) // (32 * chunk)
    for _, host, size in rows_of(transfers):
        assert (host - HOST) // (32 * chunk) == (host + size - 1 - HOST) // (32 * chunk)
    assert bytes_of(transfers) == {
        10_000 + index * width + offset: HOST + slots[start + index] * 32 + planes.start * 8 + offset
        for index in range(end - start)
        for offset in range(width)
    }


@pytest.mark.parametrize("seed", range(40))
def test_memory_of_others_is_copied_byte_for_byte_and_no_copy_crosses_a_border(seed: int) -> None:
    rng = random.Random(seed)
    slots = sorted(rng.sample(range(60), 40))
    # A page has four planes of 8 bytes; they lie in runs of their own, with gaps behind the slots or none.
    cuts = rng.choice([[4], [1, 1, 1, 1], [3, 1], [2, 2]])
    runs: list[HostRun] = []
    where: dict[tuple[int, int], int] = {}
    borders = np.array(sorted(rng.sample(range(100_000, 110_000), 60)), np.int64) if rng.random() < 0.8 else None
    first, address = 0, 100_000
    for planes in cuts:
        pitch = planes * 8 + rng.choice([0, 0, 24])
        runs.append(HostRun(first, planes, address, pitch, borders=borders))
        for slot in range(60):
            for plane in range(planes):
                where[slot, first + plane] = address + slot * pitch + plane * 8
        first, address = first + planes, address + 60 * pitch + rng.randrange(64)
    (copy,) = plan_of(slots, [], []).pools
    pairs = HostPairs(check_pairs(LAYOUT, Direction.TO_HOST, copy, 1000, 1000), 32, 8, runs)
    start, end = rng.choice([(0, 40), (5, 31)])
    planes = rng.choice([range(4), range(1, 3), range(3, 4)])
    transfers = pairs.transfers(start, end, planes, 500)
    if borders is not None:
        for _, host, size in rows_of(transfers):
            assert not ((borders > host) & (borders < host + size)).any()
        for _, _, host, pitch, width, rows in transfers.pitched:
            assert not ((borders > host) & (borders < host + (rows - 1) * pitch + width)).any()
    assert bytes_of(transfers) == {
        500 + index * len(planes) * 8 + plane * 8 + offset: where[slots[start + index], planes.start + plane] + offset
        for index in range(end - start)
        for plane in range(len(planes))
        for offset in range(8)
    }
    addresses = np.array([10_000, 20_000, 30_000, 40_000], np.int64)
    direct = pairs.direct_transfers(planes, addresses, 16)
    assert bytes_of(direct) == {
        int(addresses[plane]) + page * 16 + offset: where[slot, plane] + offset
        for page, slot in zip(copy.device_pages, copy.host_slots, strict=True)
        for plane in planes
        for offset in range(8)
    }


def rows_of(transfers: Transfers) -> list[tuple[int, int, int]]:
    rows = list(zip(transfers.staging, transfers.host, transfers.sizes, strict=True))
    for staging, staging_pitch, host, host_pitch, width, count in transfers.pitched:
        rows += [(staging + row * staging_pitch, host + row * host_pitch, width) for row in range(count)]
    return rows


def bytes_of(transfers: Transfers) -> dict[int, int]:
    """Where in host memory each staging byte belongs."""
    seen: dict[int, int] = {}
    for staging, host, size in rows_of(transfers):
        for offset in range(size):
            assert staging + offset not in seen
            seen[staging + offset] = host + offset
    return seen


def test_one_run_is_one_copy() -> None:
    (pairs,) = pairs_of(plan_of(list(range(5, 50)), [], []))
    whole = pairs.transfers(0, 45, range(4), 0)
    assert (whole.staging, whole.host, whole.sizes, whole.pitched) == ([0], [HOST + 160], [45 * 32], [])
    column = pairs.transfers(0, 45, range(1, 3), 0)
    assert (column.sizes, column.pitched) == ([], [(0, 16, HOST + 168, 32, 16, 45)])


def test_a_region_comes_after_every_region_that_it_overlaps() -> None:
    rng = random.Random(1)
    ring = StagingRing[int](64 << 10, "staging_bytes")
    holders: list[tuple[int, int, int]] = []
    for number in range(500):
        region = ring.take(rng.choice([1, 300, 5_000, 30_000]))
        assert region.offset + region.size <= ring.size
        assert region.offset % 256 == 0
        over = {
            holder
            for holder, offset, size in holders
            if offset < region.offset + region.size and region.offset < offset + size
        }
        before = set(region.events_before())
        assert over <= before
        region.release(number)
        holders = [holder for holder in holders if holder[0] not in before]
        holders.append((number, region.offset, region.size))
    assert len(holders) < 300


def test_a_region_larger_than_the_ring_is_refused() -> None:
    ring = StagingRing[int](4096, "staging_bytes")
    assert ring.take(4096).before == ()
    with pytest.raises(DeviceError, match="ring of 4096: raise staging_bytes"):
        ring.take(4097)


def test_a_ring_forgets_regions_that_nobody_has_to_wait_for() -> None:
    ring = StagingRing[int](4096, "staging_bytes")
    empty = weakref.ref(ring.take(0))
    first = ring.take(4096)
    first.release(1)
    second = ring.take(4096)
    assert second.events_before() == [1]
    second.release(2)
    reference = weakref.ref(first)
    del first
    assert empty() is None, "a region of no bytes overlaps nothing"
    assert reference() is None, "behind the second region nobody waits for the first"
