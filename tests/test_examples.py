"""The examples run, and the README shows what runs."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
IN_ASYNCIO = ROOT / "examples" / "embed_in_asyncio.py"
EMBEDDING = ROOT / "examples" / "embed_in_a_loop.py"


def test_the_embedding_example_reuses_what_earlier_requests_computed():
    done = subprocess.run([sys.executable, EMBEDDING], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "request 0: 0 pages reused, 6 computed",
        "request 1: 6 pages reused, 4 computed",
        "request 2: 6 pages reused, 0 computed",
    ]


def test_the_asyncio_example_gets_its_pages_back_and_is_what_the_readme_shows():
    done = subprocess.run([sys.executable, IN_ASYNCIO], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["backed up: (1,), failed: ()", "restored: 3 pages, equal: True"]
    (marked,) = re.findall(r"# README: begin\n(.*?)\n *# README: end", IN_ASYNCIO.read_text(), re.DOTALL)
    assert f"```python\n{textwrap.dedent(marked)}\n```" in (ROOT / "README.md").read_text()


def test_the_readme_shows_the_loop_of_the_embedding_example():
    section = (ROOT / "README.md").read_text().partition("## Put it in a scheduler loop")[2]
    shown = section.partition("```python\n")[2].partition("```")[0]
    marked = re.findall(r"# README: begin\n(.*?)\n *# README: end", EMBEDDING.read_text(), re.DOTALL)
    assert len(marked) == 2
    assert shown == "\n".join(textwrap.dedent(part) for part in marked) + "\n"
