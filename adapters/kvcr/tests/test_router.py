"""Dynamo's own router hints at what a runner holds, by the events that the runner caused, and the pages arrive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from examples.two_workers.process import WorkerProcess, free_port
from tests.routers import TOKENS, Router, dynamo_interpreter, wait_for


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, port: int, rank: int, **options: Any) -> WorkerProcess:
    words = ("--tokens", str(len(TOKENS)), "--events", str(port), "--data-rank", str(rank), "--data-ranks", "2")
    return stack.enter_context(WorkerProcess(*words, **options))


def test_a_hint_for_what_the_runner_holds_brings_the_pages_to_the_other_process(stack: ExitStack):
    interpreter, port = dynamo_interpreter(), free_port()
    source, target = start(stack, port, 0), start(stack, port, 1)
    router = Router(interpreter, port, [source.endpoint, target.endpoint])
    stack.callback(router.close)
    assert router.hint(2) is None
    stored = source.ask("store")
    wait_for(lambda: router.depths().get("1") == [0, 4, 4] and router.hint(2) is not None)
    hint = router.hint(2)
    assert hint is not None
    assert hint["actions"][0]["payload"] == {
        "block_hashes": stored["hashes"],
        "source_control_endpoint": source.endpoint,
    }
    answer = target.ask("reuse", hint=hint)
    assert (answer["reused"], answer["digests"]) == (192, stored["digests"][:3])
    state = target.ask("state")
    assert (state["delivered"], state["hints_refused"]) == (3, {})
    assert (target.quit(), source.quit()) == (0, 0)


def test_what_only_the_engines_host_tier_has_is_seen_and_not_hinted_at(stack: ExitStack):
    interpreter, port = dynamo_interpreter(), free_port()
    source, target = start(stack, port, 0, publish_inventory=False), start(stack, port, 1)
    router = Router(interpreter, port, [source.endpoint, target.endpoint])
    stack.callback(router.close)
    source.ask("store")
    wait_for(lambda: router.depths().get("1") == [0, 4, 4])
    assert router.hint(2) is None
    source.ask("forget")
    wait_for(lambda: router.depths().get("1") == [0, 0, 0])
