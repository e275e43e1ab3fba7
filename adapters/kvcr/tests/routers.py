"""A real Dynamo router for tests, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

CONSUMERS = Path(__file__).parents[3] / "tests" / "events" / "dynamo" / "consumers.py"
PAGE_TOKENS, TOKENS = 64, list(range(256))
VERSION = "1.6.1"


class Router:
    """A router with a KV state agent that reads both workers' events, in a process of its own."""

    def __init__(self, interpreter: str, events_port: int, controls: list[str], page_tokens: int = PAGE_TOKENS) -> None:
        workers = [
            {"events": f"tcp://127.0.0.1:{events_port + rank}", "control": control}
            for rank, control in enumerate(controls)
        ]
        config = json.dumps({"block_size": page_tokens, "workers": workers})
        command = [interpreter, str(CONSUMERS), "agent", config]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        assert self._answer() == "ready"

    def depths(self, tokens: Sequence[int] = TOKENS) -> dict[str, list[int]]:
        return self._ask("overlap", token_ids=list(tokens))

    def hint(self, worker: int) -> dict[str, Any] | None:
        return self._ask("hint", token_ids=TOKENS, worker=worker)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, what: str, **query: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ask": what, "query": query}) + "\n")
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # the runtime logs to the same pipe
            try:
                return json.loads(line)
            except ValueError:
                continue
        raise AssertionError(f"the router ended with {self._process.poll()}")


def dynamo_interpreter() -> str:
    """An interpreter with ai-dynamo-runtime; the test is skipped, with what to do, where there is none."""
    found = os.environ.get("KVCR_ACTORS_DYNAMO_PYTHON", sys.executable)
    ask = "from importlib.metadata import version; print(version('ai-dynamo-runtime'))"
    answer = subprocess.run([found, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    if answer.stdout.strip() != VERSION:
        pytest.skip(f"ai-dynamo-runtime {VERSION} is not there; name a python that has it in KVCR_ACTORS_DYNAMO_PYTHON")
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
