"""A store that is killed while it writes: it opens, holds its capacity, and serves right bytes only."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from tests.stores.crash_writer import CAPACITY, PREFIXES
from tests.stores.pages import open_disk, page_files

KILLS = 10


def _write_until_killed(folder: Path, seed: int, seconds: float) -> None:
    command = [sys.executable, "-m", "tests.stores.crash_writer", str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n", "the store did not open after a kill"
        time.sleep(seconds)
        assert writer.poll() is None, "the writer ended by itself: it read wrong bytes, or an event was wrong"
        writer.kill()


def test_a_store_killed_at_random_moments_serves_every_page_it_claims(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    rng = random.Random(5)
    served = 0
    for turn in range(KILLS):
        _write_until_killed(folder, turn, rng.uniform(0.0, 0.12))
        if turn % 2:
            continue  # the next writer opens what this one left
        pages = open_disk(folder, CAPACITY)
        held = pages.backend.contents()
        assert len(held) <= CAPACITY
        assert len(page_files(folder)) == len(held), "a file is left that no page stands for"
        for key in sorted(held):
            assert pages.read([key], pages.backend.lookup(key)) == "o"
            served += 1
        assert held <= {key for keys in PREFIXES for key in keys}
        pages.close()
    assert served > CAPACITY
