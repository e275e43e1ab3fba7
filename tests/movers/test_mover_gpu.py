"""The mover on a real GPU: memory of others, page lists on the GPU, and the races that only hardware can lose."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvcr_actors import CacheLayout, CudaDevice, CudaRuntime, ForeignHostPools, PoolSpec
from kvcr_actors.core.copy_plan import Direction
from kvcr_actors.movers.mover import PageMover
from kvcr_actors.movers.orders import MoveAck, MoveOrder

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LAYOUT = CacheLayout((PoolSpec("kv", 4, 16 << 10), PoolSpec("swa", 6, 4 << 10), PoolSpec("mamba", 2, 64 << 10)))
PAGES, SLOTS = 200, 160
POOLS = range(3)
OUT, BACK = Direction.TO_HOST, Direction.TO_DEVICE
ROUNDS = 300


class Rig:
    """An engine's pools, and its own pinned memory: layer-first or page-first, registered in chunks of its own."""

    def __init__(self, *, layer_first: bool, chunk: int = 3 << 20) -> None:
        self.planes = [[self.random((PAGES, spec.plane_bytes)) for _ in range(spec.planes)] for spec in LAYOUT.pools]
        shapes = [
            (spec.planes, SLOTS, spec.plane_bytes) if layer_first else (SLOTS, spec.planes, spec.plane_bytes)
            for spec in LAYOUT.pools
        ]
        self.runs = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes]
        self.layer_first = layer_first
        self.runtime, self.registered = CudaRuntime(0), list[int]()
        for run in self.runs:
            for at in range(0, run.nbytes, chunk):
                self.runtime.register(run.data_ptr() + at, min(chunk, run.nbytes - at))
                self.registered.append(run.data_ptr() + at)
        runs = [list(run.unbind(0)) if layer_first else [run] for run in self.runs]
        host = ForeignHostPools(LAYOUT, runs, borders=self.registered, registered=True)
        layers = [list(range(spec.planes)) for spec in LAYOUT.pools]
        self.device = CudaDevice(LAYOUT, self.planes, host, layers=layers, staging_bytes=64 << 20)

    @staticmethod
    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")

    def pages(self, pool: int, ids: list[int]) -> torch.Tensor:
        return torch.cat([plane[ids].cpu() for plane in self.planes[pool]], dim=1)

    def slots(self, pool: int, ids: list[int]) -> torch.Tensor:
        run = self.runs[pool][:, ids].transpose(0, 1) if self.layer_first else self.runs[pool][ids]
        return run.flatten(1)


@contextmanager
def opened(rig: Rig) -> Iterator[PageMover]:
    with PageMover(rig.device) as mover:
        yield mover
    for address in rig.registered:
        rig.runtime.unregister(address)


def ack(mover: PageMover) -> MoveAck:
    assert mover.wait(30)
    (found,) = mover.take()
    assert isinstance(found, MoveAck)
    return found


def delay(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * 1_500_000))


@pytest.mark.parametrize("layer_first", [False, True])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_64_orders_over_three_pools_are_one_submit_with_equal_bytes_both_ways(layer_first: bool, on_gpu: bool) -> None:
    rig, rng = Rig(layer_first=layer_first), random.Random(1)
    with opened(rig) as mover:
        for number, direction in enumerate((OUT, BACK, OUT, BACK), start=1):
            pages = [rng.sample(range(PAGES), 128) for _ in POOLS]
            slots = [rng.sample(range(SLOTS), 128) for _ in POOLS]
            read = rig.pages if direction is OUT else rig.slots
            expected = [read(pool, (pages if direction is OUT else slots)[pool]).clone() for pool in POOLS]
            lists = [torch.tensor(of, device="cuda") if on_gpu else of for of in pages]
            for order in range(64):
                mine = slice(2 * order, 2 * order + 2)
                mover.move(MoveOrder(order, direction, [of[mine] for of in lists], [of[mine] for of in slots]))
            mover.flush(torch.cuda.current_stream())
            assert ack(mover).done == tuple(range(64))
            assert rig.device.submits == number
            read = rig.slots if direction is OUT else rig.pages
            for pool in POOLS:
                found = read(pool, (slots if direction is OUT else pages)[pool])
                assert torch.equal(found, expected[pool])


def test_page_lists_behind_a_busy_stream_are_read_when_they_are_there() -> None:
    rig = Rig(layer_first=False)
    with opened(rig) as mover:
        for number in range(20):
            ids = torch.zeros(8, dtype=torch.int64, device="cuda")
            right = torch.arange(number, number + 8, device="cuda")
            torch.cuda.synchronize()
            delay(20)
            ids.copy_(right)
            mover.move(MoveOrder(number, OUT, (ids, [], []), (list(range(8)), [], [])))
            begin = time.perf_counter()
            mover.flush(torch.cuda.current_stream(), urgent=True)
            handed_over = time.perf_counter() - begin
            assert ack(mover).done == (number,)
            assert time.perf_counter() - begin > handed_over
            assert torch.equal(rig.slots(0, list(range(8))), rig.pages(0, list(range(number, number + 8))))


def backups_see_the_writer(rounds: int, *, fenced: bool) -> bool:
    rig, right, ids = Rig(layer_first=False), True, list(range(100))
    with opened(rig) as mover:
        written = rig.random((PAGES, 16 << 10))
        for number in range(rounds):
            written.add_(37)
            torch.cuda.synchronize()
            delay(3)
            for plane in rig.planes[0]:
                plane.copy_(written)
            mover.move(MoveOrder(number, OUT, (ids, [], []), (ids, [], [])))
            mover.flush(*([torch.cuda.current_stream()] if fenced else []), urgent=True)
            right &= ack(mover).done == (number,)
            right &= torch.equal(rig.slots(0, ids), rig.pages(0, ids))
    return right


def restores_spare_the_reader(rounds: int, *, fenced: bool) -> bool:
    rig, right, ids = Rig(layer_first=False), True, list(range(100))
    with opened(rig) as mover:
        seen = torch.empty_like(rig.planes[0][0])
        for number in range(rounds):
            rig.runs[0].fill_(number % 251)
            old = rig.planes[0][0].clone()
            torch.cuda.synchronize()
            delay(3)
            seen.copy_(rig.planes[0][0])
            mover.move(MoveOrder(number, BACK, (ids, [], []), (ids, [], [])))
            mover.flush(*([torch.cuda.current_stream()] if fenced else []))
            right &= ack(mover).done == (number,)
            torch.cuda.synchronize()
            right &= torch.equal(seen, old) and bool((rig.planes[0][0][ids] == number % 251).all())
    return right


def layers_are_waited_for(rounds: int, *, waits: bool) -> bool:
    rig, right, ids = Rig(layer_first=True), True, list(range(150))
    with opened(rig) as mover:
        seen = [torch.empty_like(plane[: len(ids)]) for plane in rig.planes[0]]
        for number in range(rounds):
            rig.runs[0].fill_(number % 251)
            torch.cuda.synchronize()
            mover.move(MoveOrder(number, BACK, (ids, [], []), (ids, [], [])))
            mover.flush(torch.cuda.current_stream())
            for layer, plane in enumerate(rig.planes[0]):
                if waits:
                    mover.wait_layer(layer)
                seen[layer].copy_(plane[: len(ids)])
            right &= ack(mover).done == (number,)
            torch.cuda.synchronize()
            right &= all(bool((one == number % 251).all()) for one in seen)
    return right


def test_a_backup_waits_for_the_writer_and_without_its_fence_loses() -> None:
    assert backups_see_the_writer(ROUNDS, fenced=True)
    assert not backups_see_the_writer(20, fenced=False)


def test_a_restore_spares_the_reader_and_without_its_fence_does_not() -> None:
    assert restores_spare_the_reader(ROUNDS, fenced=True)
    assert not restores_spare_the_reader(20, fenced=False)


def test_a_layer_is_there_when_it_was_waited_for_and_else_is_not() -> None:
    assert layers_are_waited_for(100, waits=True)
    assert not layers_are_waited_for(20, waits=False)
