"""Adapters, examples and pages import public modules alone, and the check of that notices what is not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvcr_actors.ports
import kvcr_actors.stores

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "check_imports.py"


def run_check(*paths: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, *paths], check=False, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_what_stands_outside_the_library_imports_its_public_modules_alone() -> None:
    assert run_check(ROOT / "adapters", ROOT / "examples", ROOT / "docs", ROOT / "README.md") == (0, "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("from kvcr_actors.transfers import Operation", "kvcr_actors.transfers is internal"),
        ("from kvcr_actors.movers.mover import PageMover", "kvcr_actors.movers.mover is internal"),
        ("import kvcr_actors.core.keys", "kvcr_actors.core.keys is internal"),
        ("    from kvcr_actors.runtime import bell", "kvcr_actors.runtime is internal"),
        ("from kvcr_actors import transfers", "kvcr_actors does not export transfers"),
        ("from kvcr_actors.ports import Callable", "kvcr_actors.ports does not export Callable"),
        ("from kvcr_actors.stores.disk import disk_backend", "kvcr_actors.stores.disk is internal"),
        ("from kvcr_actors.testing.stores import FaultyStore", "kvcr_actors.testing.stores is for tests and examples"),
    ],
)
def test_an_internal_import_that_is_planted_in_an_adapter_fails(tmp_path: Path, line: str, words: str) -> None:
    planted = tmp_path / "kvcr"
    shutil.copytree(ROOT / "adapters" / "kvcr" / "src", planted / "src")
    assert run_check(planted) == (0, "")
    file = planted / "src" / "kvcr_actors_kvcr" / "peers.py"
    lines = len(file.read_text().splitlines())
    file.write_text(file.read_text() + ("def later():\n" if line.startswith(" ") else "\n") + line + "\n")
    code, told = run_check(planted)
    assert code == 1
    assert told.startswith(f"{file}:{lines + 2}: {words}")
    assert told.count("\n") == 1


def test_one_that_is_planted_in_a_page_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.\n\n```python\nfrom kvcr_actors import Store\nfrom kvcr_actors.desk import EngineDesk\n```\n")
    code, told = run_check(tmp_path)
    assert (code, told.count("kvcr_actors.desk is internal")) == (1, 1)


def test_every_name_that_a_public_module_exports_is_there() -> None:
    for module in (kvcr_actors.ports, kvcr_actors.stores):
        assert all(module.__dict__[name] is not None for name in module.__all__)
        assert sorted(set(module.__all__)) == sorted(module.__all__)
