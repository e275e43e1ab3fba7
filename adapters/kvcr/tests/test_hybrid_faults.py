"""Confirmations that go wrong, in a process of their own: the boundary does not count, and the process ends in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from examples.two_workers.process import free_port
from kvcr_actors.testing.store_driver import chain
from tests.pairs import side
from tests.programs.hybrid_target import HYBRID

PROGRAM = Path(__file__).parent / "programs" / "hybrid_target.py"
MISS_WITHIN_S = 15.0


def run(scenario: str, endpoint: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, PROGRAM, scenario, endpoint]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_endpoint_without_anybody_confirms_nothing_and_its_buffers_stay_mapped():
    answer = run("dead", f"tcp://127.0.0.1:{free_port()}")
    assert (answer["confirmed"], answer["again"], answer["operations"]) == (False, [0] * 4, 1)
    assert answer["seconds"] < MISS_WITHIN_S
    assert "its buffers stay mapped" in answer["error"]
    assert answer["mapped_bytes"] > 0


@pytest.mark.anyio
async def test_a_full_runner_confirms_nothing_and_does_not_blame_the_peer():
    async with side(HYBRID) as source:
        for name in "ab":
            assert await source.write(chain(name, 1), [3]) == "o"
        assert source.store.endpoint is not None
        with anyio.fail_after(90):
            answer = await anyio.to_thread.run_sync(partial(run, "pressed", source.store.endpoint))
    assert answer["confirmed"] == [True, False, True], "the claim of another request is in the way until it ends"
    assert answer["promised"] == [3], "the source is asked again"
    assert (answer["read"], answer["error"], answer["mapped_bytes"]) == ("o", "", 0)
    assert answer["seconds"] < MISS_WITHIN_S
