"""Peers that fail, in real processes: the request is a miss within its time, nothing hangs, nothing is reused early.

Timeouts of the target are short here; the source keeps the default, so that a busy machine is no stall.
"""

from __future__ import annotations

import signal
from contextlib import ExitStack
from time import monotonic, sleep

import pytest

from examples.two_workers.process import WorkerProcess, free_port
from kvcr_actors_kvcr import FetchHint

SHORT = {"operation_timeout_ms": 2_000, "abandon_timeout_ms": 4_000, "remote_wait_ms": 2_000}
BRIEF = ("--config", '{"drain_budget_s": 5.0}')
"""Claims on memory that does not become quiet take the whole budget at the close; one test leaves it as it is."""
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
    assert (worker.last["mapped_bytes"] > 0) == (close_errors > 0), "what is not quiet stays mapped, all else is not"
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
    again = target.ask("state")
    assert again["operations"] == state["operations"], "a source that failed is not asked again at once"
    assert again["hints_refused"] == {"cooling": 1}
    assert_clean_exit(target, close_errors=1)
    (late,) = (line for line in target.log.splitlines() if "kvcr.late" in line)
    assert stored["endpoint"] in late, "the log names who did not answer"


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_a_source_killed_during_its_transfers_leaves_only_right_pages(delay_s: float, start):
    source, target = start("--tokens", "1024"), start("--tokens", "1024", *BRIEF, chunk_bytes=16 << 20, **SHORT)
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


def test_a_source_frozen_for_longer_than_its_own_deadline_serves_no_peer_any_more_and_says_so(start):
    source, target = start(operation_timeout_ms=1_000, abandon_timeout_ms=2_000, remote_wait_ms=1_000), start(**SHORT)
    stored = source.ask("store")
    assert source.ask("state")["stalled"] is None
    source.signal(signal.SIGSTOP)
    sleep(1.5)
    source.signal(signal.SIGCONT)
    assert_miss(target, hint_of(stored["endpoint"], stored["hashes"]))
    assert "restart" in source.ask("state")["stalled"]
    assert source.ask("reuse")["reused"] == 192, "its own work goes on"
    assert target.ask("state")["unquiet_bytes"] == 0
    assert_clean_exit(target, close_errors=0)
    assert_clean_exit(source, close_errors=0)


def test_a_target_without_room_for_the_pages_asks_for_none_and_goes_on_once_it_has_some(start):
    source, other = start(), start("--salt", "other")
    target = start("--host-pages", "3", **SHORT)
    stored, held = source.ask("store"), other.ask("store")
    hint = hint_of(stored["endpoint"], stored["hashes"])
    assert target.ask("hold", hint=hint_of(held["endpoint"], held["hashes"]), salt="other")["held"] == 3
    operations = target.ask("state")["operations"]
    assert_miss(target, hint)
    state = target.ask("state")
    assert (state["operations"], state["unquiet_bytes"]) == (operations, 0), "nobody was asked"
    assert state["reasons"] == {"no_host_memory": 3}
    target.ask("release")
    answer = target.ask("reuse", hint=hint)
    assert (answer["reused"], answer["digests"]) == (192, stored["digests"][:3])
    for worker in (target, source, other):
        assert_clean_exit(worker, close_errors=0)


def test_a_target_with_room_for_a_part_asks_for_that_part(start):
    source, target = start(), start("--host-pages", "2", **SHORT)
    stored = source.ask("store")
    answer = target.ask("reuse", hint=hint_of(stored["endpoint"], stored["hashes"]))
    assert (answer["reused"], answer["digests"]) == (128, stored["digests"][:2])
    assert target.ask("state")["delivered"] == 2
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
    target = start(*BRIEF, **SHORT)
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
    assert f"{stored['endpoint']} refused 3 of 3 blocks" in target.log


def test_a_close_with_an_operation_open_ends_in_time(start):
    target = start(*BRIEF, **SHORT)
    hashes = start().ask("store")["hashes"]
    target.send(do="reuse", hint=hint_of(f"tcp://127.0.0.1:{free_port()}", hashes))
    # The request is over after its 2 s; the runner's operation is open for 2 more, and not quiet after that.
    assert_clean_exit(target, close_errors=1)


def test_beyond_the_bound_on_memory_that_is_not_quiet_no_peer_is_asked(start):
    source, target = start(), start(*BRIEF, **SHORT, quarantine_bytes=1 << 20)
    stored = source.ask("store")
    assert_miss(target, hint_of(f"tcp://127.0.0.1:{free_port()}", stored["hashes"]))
    state = target.ask("state")
    assert state["unquiet_bytes"] > 1 << 20
    assert_miss(target, hint_of(stored["endpoint"], stored["hashes"]))
    again = target.ask("state")
    assert (again["operations"], again["hints_refused"]) == (state["operations"], {"quarantine_full": 1})
    assert_clean_exit(target, close_errors=1)
