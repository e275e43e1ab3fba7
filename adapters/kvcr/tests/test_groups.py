"""Tensor-parallel groups of real processes that agree: each rank asks its counterpart, all of them reuse alike."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from torch.distributed import TCPStore

from examples.two_workers.process import WorkerProcess, free_port
from kvcr_actors_kvcr import FetchHint


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_group(stack: ExitStack, port: int, *by_rank: dict[str, Any]) -> list[WorkerProcess]:
    """A group of ranks, each with its options; the ports from `port` on are theirs."""
    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda: meeting.port)  # it serves until the group has ended
    common = ("--tokens", "256", "--ranks", str(len(by_rank)), "--rendezvous", str(meeting.port))
    ranks = [
        stack.enter_context(WorkerProcess("--rank", str(rank), *common, port=port, wait=False, **options))
        for rank, options in enumerate(by_rank)
    ]
    for rank in ranks:
        rank.wait_ready()
    return ranks


def ask(group: list[WorkerProcess], do: str, **order: Any) -> list[dict[str, Any]]:
    """Order the same of every rank, as an engine does, and wait for all."""
    for rank in group:
        rank.send(do=do, **order)
    return [rank.answer() for rank in group]


def hint_of(stored: list[dict[str, Any]]) -> dict[str, Any]:
    """A router knows the endpoint of the first shard."""
    return FetchHint(stored[0]["endpoint"], frozenset(stored[0]["hashes"])).envelope("test")


def test_one_hint_brings_every_rank_its_own_shard_from_its_counterpart(stack: ExitStack):
    source, target = (start_group(stack, free_port(), {}, {}) for _ in range(2))
    stored = ask(source, "store")
    assert stored[0]["digests"] != stored[1]["digests"]
    assert [answer["reused"] for answer in ask(target, "reuse")] == [0, 0]
    answers = ask(target, "reuse", hint=hint_of(stored))
    assert [answer["reused"] for answer in answers] == [192, 192]
    assert [answer["digests"] for answer in answers] == [answer["digests"][:3] for answer in stored]
    assert [state["delivered"] for state in ask(target, "state")] == [3, 3]
    assert [rank.quit() for rank in (*target, *source)] == [0] * 4


def test_a_rank_whose_store_cannot_start_is_known_to_the_group_which_reads_nothing_in_vain(stack: ExitStack):
    port = free_port()
    taken = stack.enter_context(socket.create_server(("127.0.0.1", port + 1)))
    assert taken.getsockname()[1] == port + 1
    source = start_group(stack, free_port(), {}, {})
    target = start_group(stack, port, {"required": False}, {"required": False})
    stored = ask(source, "store")
    assert [answer["reused"] for answer in ask(target, "reuse", hint=hint_of(stored))] == [0, 0]
    whole, without = ask(target, "state")
    assert (whole["cannot_store"], whole["operations"]) == ("", 0)
    assert whole["reasons"] == {"rank_without_store": 3}
    assert "did not start" in without["cannot_store"]
    assert without["reasons"] == {"absent": 3}
    # Host memory is shared as before: what both ranks backed up, both restore.
    ask(target, "store")
    assert [answer["reused"] for answer in ask(target, "reuse")] == [192, 192]
    assert [rank.quit() for rank in (*target, *source)] == [0] * 4
    assert "store.stands_aside" in target[1].log
