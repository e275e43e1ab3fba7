"""Figures of runs in several processes: a prompt reused from a peer by a hint, and out of the runner alone."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.two_workers.process import WorkerProcess, free_port
from kvcr_actors_kvcr import FetchHint

SHORT = ("--tokens", "256")
RUN = Path(__file__).parents[1] / "examples" / "two_workers" / "run.py"


def test_a_hint_brings_all_but_the_last_page_of_a_prompt_from_the_peer():
    done = subprocess.run([sys.executable, RUN], check=False, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [
        "cold reuse: 0 of 2,048 tokens",
        "with the hint: 1,984 of 2,048 tokens",
        "delivered: 31 blocks, 62 spans, 227,540,992 bytes",
        "failed or partial transfers: 0",
        "digests equal on both sides",
        "exit statuses: (0, 0)",
    ]
    assert done.returncode == 0


@pytest.fixture
def start():
    """Starts workers, and ends those that a test leaves."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(WorkerProcess(*SHORT, *arguments, **options))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prefix_that_only_the_runner_has_is_restored_on_every_rank(ranks: int, start):
    port = free_port()
    workers = [start("--rank", str(rank), "--ranks", str(ranks), port=port) for rank in range(ranks)]
    stored = [worker.ask("store") for worker in workers]
    gone = [worker.ask("forget") for worker in workers]
    assert [answer["host_pages_of_the_prompt"] for answer in gone] == [0] * ranks
    again = [worker.ask("reuse") for worker in workers]
    assert [(answer["reused"], answer["tokens"]) for answer in again] == [(192, 256)] * ranks
    assert [answer["digests"] for answer in again] == [answer["digests"][:3] for answer in stored]
    assert len({tuple(answer["digests"]) for answer in stored}) == ranks, "each rank has a shard of its own"
    assert [worker.quit() for worker in workers] == [0] * ranks


def test_digests_travel_with_the_pages_where_both_sides_verify(start):
    source, target = start(verify_transfer_bytes=True), start(verify_transfer_bytes=True)
    assert target.ask("reuse", hint=hint_of(source.ask("store")))["reused"] == 192
    state = target.ask("state")
    assert (state["delivered"], state["damaged"]) == (3, 0)
    assert (target.quit(), source.quit()) == (0, 0)


def test_a_salted_prompt_is_not_served_to_another_salt(start):
    source, target = start("--salt", "a"), start("--salt", "b")
    assert target.ask("reuse", hint=hint_of(source.ask("store")))["reused"] == 0
    assert target.ask("state")["hinted"] == 0


def test_hints_that_cannot_be_used_give_no_remote_read_and_are_counted(start):
    source, target = start(), start()
    stored = source.ask("store")
    elsewhere, wildcard, moving = (hint_of(stored) for _ in range(3))
    elsewhere["actions"][0]["payload"]["source_control_endpoint"] = "tcp://10.0.0.1:5000"
    wildcard["actions"][0]["payload"]["source_control_endpoint"] = "tcp://0.0.0.0:5000"
    moving["actions"][0]["payload"]["mode"] = "move"
    for hint in (elsewhere, wildcard, moving, "nonsense", {"protocol_version": "9"}):
        assert target.ask("reuse", hint=hint)["reused"] == 0
    state = target.ask("state")
    assert state["hints_refused"] == {"host": 1, "malformed": 2, "move": 1, "version": 1}
    assert (state["hinted"], state["operations"], state["open_requests"]) == (0, 0, 0)
    assert target.ask("reuse", hint=hint_of(stored))["reused"] == 192


def hint_of(stored: dict) -> dict:
    return FetchHint(stored["endpoint"], frozenset(stored["hashes"])).envelope("test")
