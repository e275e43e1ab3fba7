"""Tensor-parallel groups of real processes that agree: each rank asks its counterpart, all of them reuse alike."""

from __future__ import annotations

import json
import signal
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


def start_group(stack: ExitStack, port: int, *by_rank: dict[str, Any], **config: Any) -> list[WorkerProcess]:
    """A group of ranks, each with its options, all with one configuration; the ports from `port` on are theirs."""
    meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda: meeting.port)  # it serves until the group has ended
    common = ["--tokens", "256", "--ranks", str(len(by_rank)), "--rendezvous", str(meeting.port)]
    common += ["--config", json.dumps(config)]
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


def store(group: list[WorkerProcess], pages: tuple[int, ...] = (4, 4)) -> list[dict[str, Any]]:
    """Have every rank back up the prompt, and store so many of its pages: without them nothing could be reused."""
    answers = ask(group, "store")
    assert [(answer["not_backed_up"], answer["stored_pages"]) for answer in answers] == [([], some) for some in pages]
    return answers


def reuse(group: list[WorkerProcess], **order: Any) -> tuple[list[int], list[dict[str, int]]]:
    """What each rank reused of the prompt, in tokens, and why not the other pages."""
    answers = ask(group, "reuse", **order)
    return [answer["reused"] for answer in answers], [answer["not_reused"] for answer in answers]


def hint_of(stored: list[dict[str, Any]]) -> dict[str, Any]:
    """A router knows the endpoint of the first shard."""
    return FetchHint(stored[0]["endpoint"], frozenset(stored[0]["hashes"])).envelope("test")


ALL_BUT_THE_LAST_PAGE = ([192, 192], [{}, {}])


def nothing(*by_rank: str) -> tuple[list[int], list[dict[str, int]]]:
    """No rank reused any of the three pages, for these reasons."""
    return [0] * len(by_rank), [{reason: 3} for reason in by_rank]


def test_one_hint_brings_every_rank_its_own_shard_from_its_counterpart(stack: ExitStack):
    source, target = (start_group(stack, free_port(), {}, {}) for _ in range(2))
    stored = store(source)
    assert stored[0]["digests"] != stored[1]["digests"]
    assert reuse(target) == nothing("absent", "absent")
    answers = ask(target, "reuse", hint=hint_of(stored))
    assert [(answer["reused"], answer["not_reused"]) for answer in answers] == [(192, {})] * 2
    assert [answer["digests"] for answer in answers] == [answer["digests"][:3] for answer in stored]
    assert [state["delivered"] for state in ask(target, "state")] == [3, 3]
    assert [rank.quit() for rank in (*target, *source)] == [0] * 4


def test_a_rank_whose_store_cannot_start_is_known_to_the_group_which_reads_nothing_in_vain(stack: ExitStack):
    port = free_port()
    taken = stack.enter_context(socket.create_server(("127.0.0.1", port + 1)))
    assert taken.getsockname()[1] == port + 1
    source = start_group(stack, free_port(), {}, {})
    target = start_group(stack, port, {"required": False}, {"required": False})
    hint = hint_of(store(source))
    assert reuse(target, hint=hint) == nothing("rank_without_store", "absent")
    whole, without = ask(target, "state")
    assert (whole["cannot_store"], whole["operations"]) == ("", 0)
    assert "did not start" in without["cannot_store"]
    # Host memory is shared as before: what both ranks backed up, both restore.
    store(target, pages=(4, 0))
    assert reuse(target) == ALL_BUT_THE_LAST_PAGE
    assert [rank.quit() for rank in (*target, *source)] == [0] * 4
    assert "store.stands_aside" in target[1].log


def test_a_rank_that_comes_too_late_to_agree_costs_the_request_and_is_told_of_and_the_next_is_reused(stack: ExitStack):
    group = start_group(stack, free_port(), {}, {}, agreement_deadline_s=3.0)
    store(group)
    group[1].signal(signal.SIGSTOP)
    for rank in group:
        rank.send(do="reuse")
    first = group[0].answer()  # comes once it has given up waiting for the other
    group[1].signal(signal.SIGCONT)
    assert [(answer["reused"], answer["not_reused"]) for answer in (first, group[1].answer())] == [
        (0, {"ranks_disagreed": 3})
    ] * 2
    assert all(state["ranks"]["failed_rounds"] for state in ask(group, "state"))
    assert reuse(group) == ALL_BUT_THE_LAST_PAGE
    assert [rank.quit() for rank in group] == [0] * 2
    assert all("ranks.round_failed" in rank.log for rank in group)
