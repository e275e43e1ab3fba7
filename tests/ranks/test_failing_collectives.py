"""The k-th collective fails on one rank, before or after its data went out: the ranks end alike, for every k."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import anyio
import anyio.to_thread
import pytest
import torch.distributed as dist

from kvcr_actors.errors import DeadlineError
from kvcr_actors.ports import RankTerms
from kvcr_actors.ranks import _gloo
from kvcr_actors.ranks.torch_distributed import TorchDistributedRanks
from kvcr_actors.testing.services import open_services

pytestmark = [pytest.mark.anyio, pytest.mark.real_clock]

Plan = Callable[[int, int], str | None]


def fail_gathers(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    """`plan(rank, n)` says how the n-th collective of a rank fails: `before` it joined or `after`."""
    gather, counts = _gloo.GlooGroup.gather, dict.fromkeys(range(4), 0)

    def failing(group: _gloo.GlooGroup, mine: bytes, goes_on: Callable[[], bool]) -> list[bytes]:
        rank = group._group.rank()
        counts[rank] += 1
        how = plan(rank, counts[rank])
        if how == "before":
            raise _gloo.CollectiveError("injected, before")
        result = gather(group, mine, goes_on)
        if how == "after":
            raise _gloo.CollectiveError("injected, after")
        return result

    monkeypatch.setattr(_gloo.GlooGroup, "gather", failing)


async def agree_on_all(ranks: list[TorchDistributedRanks], name: str) -> list[int]:
    results = [-1] * len(ranks)

    async def agree(index: int) -> None:
        results[index] = await ranks[index].agree(("test", name), 0b11)

    async with anyio.create_task_group() as tasks:
        for index in range(len(ranks)):
            tasks.start_soon(agree, index)
    return results


async def run(size: int, operations: int) -> list[list[int]]:
    store = dist.HashStore()
    ranks = [TorchDistributedRanks(rank, size, store) for rank in range(size)]
    async with open_services() as services:
        async with anyio.create_task_group() as tasks:
            for one in ranks:
                tasks.start_soon(one.open, services, RankTerms(1.0))
        results = [await agree_on_all(ranks, f"operation {index}") for index in range(operations)]
        assert all(one.describe()["open"] == 0 for one in ranks)
        for one in ranks:
            await one.close(10)
    return results


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
async def test_ranks_end_alike_whichever_collective_fails_on_one(
    monkeypatch: pytest.MonkeyPatch, failing: int, how: str
) -> None:
    fail_gathers(monkeypatch, lambda rank, n: how if rank == 1 and n == failing else None)
    results = await run(2, 4)
    assert all(len(set(result)) == 1 for result in results), results
    assert results[-1] == [3, 3], "one fault costs one operation at most"


async def test_a_result_that_every_rank_has_counts_though_the_second_collective_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail_gathers(monkeypatch, lambda rank, n: "after" if rank == 1 and n == 2 else None)
    assert (await run(2, 1)) == [[3, 3]]


async def test_without_the_decision_in_the_store_ranks_would_part(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_gathers(monkeypatch, lambda rank, n: "after" if rank == 1 and n == 2 else None)
    monkeypatch.setattr(TorchDistributedRanks, "_decide", lambda self, result: {})
    assert (await run(2, 1)) == [[3, 0]]


async def test_a_store_that_is_gone_makes_misses_and_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_gathers(monkeypatch, lambda rank, n: "before")

    def gone(self: _gloo.SharedStore, *arguments: object) -> str:
        raise _gloo.CollectiveError("injected: the store is gone")

    monkeypatch.setattr(_gloo.SharedStore, "swap", gone)
    assert (await run(2, 2)) == [[0, 0], [0, 0]]


async def test_a_collective_that_ends_just_after_a_slice_of_its_wait_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gloo, "_SLICE", timedelta(milliseconds=1))
    store, ended = _gloo.SharedStore(dist.HashStore()), threading.Event()
    results: list[list[list[bytes]]] = [[], []]

    def gather_often(rank: int) -> None:
        group = _gloo.GlooGroup(store, "slices", rank, 2, "lo", 10.0)
        for turn in range(20):
            time.sleep(0.003 * rank)
            results[rank].append(group.gather(bytes([rank, turn]), lambda: True))

    def keep_the_interpreter_busy() -> None:  # so that time passes between a slice and the look at what it left
        while not ended.is_set():
            sum(range(100))

    busy = threading.Thread(target=keep_the_interpreter_busy)
    busy.start()
    try:
        async with anyio.create_task_group() as tasks:
            for rank in range(2):
                tasks.start_soon(anyio.to_thread.run_sync, gather_often, rank)
    finally:
        ended.set()
        busy.join()
    assert results == [[[bytes([0, turn]), bytes([1, turn])] for turn in range(20)]] * 2


async def test_a_store_that_hangs_hangs_nobody_who_waits_for_an_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_gathers(monkeypatch, lambda rank, n: "before")
    released = threading.Event()

    def hang(self: _gloo.SharedStore, *arguments: object) -> str:
        released.wait(60)
        raise _gloo.CollectiveError("injected: the store came back")

    monkeypatch.setattr(_gloo.SharedStore, "swap", hang)
    ranks = TorchDistributedRanks(0, 1, dist.HashStore())
    async with open_services() as services:
        await ranks.open(services, RankTerms(0.2))
        assert await ranks.agree(("test", "operation"), 1) == 0
        with pytest.raises(DeadlineError, match="the shared store hangs"):
            await ranks.close(0.2)
        released.set()
        await ranks.close(10)
