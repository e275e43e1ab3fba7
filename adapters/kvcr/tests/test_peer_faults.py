"""Peers that fail, in real processes: the request is a miss within its time, nothing hangs, nothing is reused early.

Timeouts of the target are short here; the source keeps the default, so that a busy machine is no stall.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

import pytest

from examples.two_workers.process import WorkerProcess, free_port
from kvcr_actors_kvcr import FetchHint

SHORT = {"operation_timeout_ms": 2_000, "abandon_timeout_ms": 4_000, "remote_wait_ms": 2_000}
MISS_WITHIN_S = 15.0
"""Far below the 30 s of a prefetch: what is measured is that nobody waits for a dead peer's end."""


@pytest.fixture
def start():
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(WorkerProcess("--tokens", "256", *arguments, **options))


def hint_of(endpoint: str, hashes: list[int]) -> dict:
    return FetchHint(endpoint, frozenset(hashes)).envelope("test")


def assert_miss(target: WorkerProcess, hint: dict) -> None:
    answer = target.ask("reuse", hint=hint)
    assert answer["reused"] == 0
    assert answer["seconds"] < MISS_WITHIN_S


def assert_clean_exit(worker: WorkerProcess, *, close_errors: int) -> None:
    started = monotonic()
    assert worker.quit() == 0
    assert monotonic() - started < 30
    assert worker.log.count("controller.close_deadline") == close_errors, worker.log
    # The runner logs refusals of peers with tracebacks of its own; these are ours, or nobody's.
    for fault in ("Exception in thread", "kvcr.owner_thread_failed", "kvcr.job_failed", "controller.failed"):
        assert fault not in worker.log, worker.log


def test_a_killed_source_is_a_miss_and_its_slots_stay_claimed(start):
    source, target = start(), start(**SHORT)
    stored = source.ask("store")
    hint = hint_of(stored["endpoint"], stored["hashes"])
    source.signal(signal.SIGKILL)
    source.process.wait()
    assert_miss(target, hint)
    state = target.ask("state")
    assert state["unquiet_bytes"] == state["quarantined_claim_bytes"] > 0
    assert state["claims_open"] == 1
    assert_miss(target, hint)
    assert target.ask("state")["operations"] == state["operations"], "a source that failed is not asked again at once"
    assert_clean_exit(target, close_errors=1)


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_a_source_killed_during_its_transfers_leaves_only_right_pages(delay_s: float, start):
    source, target = start("--tokens", "1024"), start("--tokens", "1024", chunk_bytes=16 << 20, **SHORT)
    stored = source.ask("store")
    target.send(do="reuse", hint=hint_of(stored["endpoint"], stored["hashes"]))
    sleep(delay_s)
    source.signal(signal.SIGKILL)
    answer = target.answer()
    assert answer["reused"] <= 960
    assert answer["digests"] == stored["digests"][: answer["reused"] // 64]
    assert answer["seconds"] < MISS_WITHIN_S
    state = target.ask("state")
    assert (state["claims_open"] > 0) == (state["unquiet_bytes"] > 0)
    assert_clean_exit(target, close_errors=int(state["unquiet_bytes"] > 0))


def test_a_frozen_source_is_a_miss_and_its_slots_come_back_when_it_thaws(start):
    source, target = start(), start(**SHORT)
    stored = source.ask("store")
    source.signal(signal.SIGSTOP)
    assert_miss(target, hint_of(stored["endpoint"], stored["hashes"]))
    assert target.ask("state")["unquiet_bytes"] > 0
    source.signal(signal.SIGCONT)
    until = monotonic() + 30
    while (state := target.ask("state"))["claims_open"] and monotonic() < until:
        pass
    assert (state["unquiet_bytes"], state["quarantined_claim_bytes"], state["claims_open"]) == (0, 0, 0)
    assert_clean_exit(target, close_errors=0)
    assert_clean_exit(source, close_errors=0)


def test_a_source_restarted_on_its_port_refuses_and_then_serves(start):
    source, target = start(), start(**SHORT)
    stored = source.ask("store")
    hint = hint_of(stored["endpoint"], stored["hashes"])
    assert target.ask("reuse", hint=hint)["reused"] == 192
    target.ask("forget")
    source.signal(signal.SIGKILL)
    source.process.wait()
    again = start(port=source.port)
    assert_miss(target, hint)
    assert_clean_exit(target, close_errors=0)
    assert_clean_exit(again, close_errors=0)


@pytest.mark.parametrize("spans", ["kv:1", "kv:4"])
def test_a_source_with_another_block_size_is_a_miss(spans: str, start):
    source, target = start(spans=spans), start(**SHORT)
    stored = source.ask("store")
    assert_miss(target, hint_of(stored["endpoint"], stored["hashes"]))
    state = target.ask("state")
    assert (state["delivered"], state["failed_deliveries"] > 0, state["unquiet_bytes"]) == (0, True, 0)
    assert_clean_exit(target, close_errors=0)
    assert_clean_exit(source, close_errors=0)


def test_an_endpoint_without_anybody_is_a_miss(start):
    target = start(**SHORT)
    hashes = start().ask("store")["hashes"]
    assert_miss(target, hint_of(f"tcp://127.0.0.1:{free_port()}", hashes))
    assert target.ask("state")["claims_open"] == 1
    assert_clean_exit(target, close_errors=1)


def test_pages_that_the_source_evicted_meanwhile_are_a_miss(start):
    source, target = start(), start(**SHORT)
    stored = source.ask("store")
    hint = hint_of(stored["endpoint"], stored["hashes"])
    for _ in range(2):
        source.ask("forget")
    assert_miss(target, hint)
    state = target.ask("state")
    assert (state["delivered"], state["unquiet_bytes"], state["claims_open"]) == (0, 0, 0)
    assert_clean_exit(target, close_errors=0)
    assert_clean_exit(source, close_errors=0)


def test_a_close_with_an_operation_open_ends_in_time(start):
    target = start(**SHORT)
    hashes = start().ask("store")["hashes"]
    target.send(do="reuse", hint=hint_of(f"tcp://127.0.0.1:{free_port()}", hashes))
    # The request is over after its 2 s; the runner's operation is open for 2 more, and not quiet after that.
    assert_clean_exit(target, close_errors=1)


def test_a_hybrid_lookup_at_an_endpoint_without_anybody_ends_in_time():
    program = Path(__file__).parent / "programs" / "dead_peer.py"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, program], check=False, capture_output=True, text=True, timeout=90, env=environment
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["confirmed"], answer["again"], answer["operations"]) == (False, [0] * 4, 1)
    assert answer["seconds"] < MISS_WITHIN_S
    assert "its buffers stay mapped" in answer["error"]


def test_beyond_the_bound_on_memory_that_is_not_quiet_no_peer_is_asked(start):
    source, target = start(), start(**SHORT, quarantine_bytes=1 << 20)
    stored = source.ask("store")
    assert_miss(target, hint_of(f"tcp://127.0.0.1:{free_port()}", stored["hashes"]))
    state = target.ask("state")
    assert state["unquiet_bytes"] > 1 << 20
    assert_miss(target, hint_of(stored["endpoint"], stored["hashes"]))
    assert target.ask("state")["operations"] == state["operations"]
    assert_clean_exit(target, close_errors=1)
