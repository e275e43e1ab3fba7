"""`kvcr-actors sweep` from words to tables and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcr_actors.cli.app import run
from kvcr_actors.replay.trace import read_trace, shipped_trace
from tests.replay.lru_reference import hits_at


def test_rows_are_written_as_the_sequential_rule_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, picture = tmp_path / "rows.json", tmp_path / "curves.png"
    words = ["--capacities", "100,200", "--policies", "lru,belady", "--json", str(target), "--plot", str(picture)]
    assert run(["sweep", str(shipped_trace()), *words]) == 0
    blocks = [request.hash_ids for request in read_trace(shipped_trace())]
    rows = json.loads(target.read_text())["rows"]
    assert [set(row) for row in rows] == [{"policy", "capacity_pages", "hits", "pages"}] * 4
    assert [(row["policy"], row["capacity_pages"]) for row in rows] == [
        ("lru", 100),
        ("lru", 200),
        ("belady", 100),
        ("belady", 200),
    ]
    assert [row["hits"] for row in rows[:2]] == [hits_at(blocks, 100), hits_at(blocks, 200)]
    assert {row["pages"] for row in rows} == {sum(map(len, blocks))}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"rows.json", "curves.png"}
    shown = capsys.readouterr().out
    assert f"{100 * rows[0]['hits'] / rows[0]['pages']:.2f}" in shown


def test_every_policy_a_budget_and_replicas_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--limit", "100", "--jobs", "1", "--budget", "2", "--model", "llama-3.1-8b", "--replicas", "2"]
    assert run(["sweep", *words]) == 0
    shown = capsys.readouterr().out
    assert "best" in shown
    assert "64 MiB a page" in shown
    assert "The next GiB saves" in shown
    assert "round-robin" in shown


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--capacities", "a"], "--capacities: 'a' is no list of pages"),
        (["--capacities", "0"], "capacities: 0 is not a number of pages"),
        (["--policies", "lru,mru"], "policies: 'mru' is not known"),
        (["--limit", "0"], "--limit: 0"),
        (["--replicas", "0"], "--replicas 0"),
        (["--budget", "1"], "give --model, or --page-bytes"),
        (["--budget", "0", "--page-bytes", "1"], "--budget: 0"),
        (["--model", "gpt", "--budget", "1"], "model: 'gpt' is not known"),
        (["--page-bytes", "0", "--budget", "1"], "page_bytes: 0 is not a number above 0"),
        (["--model", "qwen3-32b", "--page-bytes", "1"], "leave one of the two out"),
        (["--plot", "curves.txt"], "has no picture's suffix"),
        (["--plot", "same.png", "--json", "same.png"], "give each a file of its own"),
        (["--json", "/nowhere/rows.json"], "does not exist; make it first"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", *words]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert (shown.out, shown.err.count("\n")) == ("", 1)
