"""A store that is killed while it writes: it opens, holds its capacity, and serves right bytes only."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcr_actors.testing.store_driver import chain
from tests.stores.crash_writer import CAPACITY, PREFIXES
from tests.stores.pages import open_disk, page_files

KILLS = 10

KILLED_AT = {
    "before its file": "disk_files.PageFiles._create = lambda files, path: die()",
    "in the middle": "disk_files._write_all = lambda fd, buffers: (os.write(fd, bytes(buffers[0])[:50]), die())",
    "before its name": "os.rename = lambda *paths, **more: die()",
}
PUT = """
import os, signal, sys
from pathlib import Path
from kvcr_actors.stores import disk_files
from kvcr_actors.testing.store_driver import chain
from tests.stores.pages import open_disk

pages = open_disk(Path(sys.argv[1]))
pages.write(chain("before", 2))
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
exec(sys.argv[2])
pages.write(chain("killed", 1))
"""


def _write_until_killed(folder: Path, seed: int, seconds: float) -> None:
    command = [sys.executable, "-m", "tests.stores.crash_writer", str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n", "the store did not open after a kill"
        time.sleep(seconds)
        assert writer.poll() is None, "the writer ended by itself: it read wrong bytes, or an event was wrong"
        writer.kill()


def test_scenario_33_a_store_killed_at_random_moments_serves_every_page_it_claims(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("where", KILLED_AT)
def test_scenario_33_a_put_that_is_killed_is_a_miss_and_can_be_made_again_at_once(tmp_path: Path, where: str) -> None:
    folder, killed = tmp_path / "store", chain("killed", 1)
    died = subprocess.run([sys.executable, "-c", PUT, str(folder), KILLED_AT[where]], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    pages = open_disk(folder)
    assert pages.backend.lookup(killed[0]) == 0
    assert pages.read(killed) == "m"
    assert len(page_files(folder)) == 2, "what was half written is gone"
    assert pages.write(killed) == "o"
    assert pages.read((*killed, *chain("before", 2))) == "ooo"
    pages.close()
