"""The page of scenarios names each of them once, and tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| (\d+) \|(.*)\|$", (ROOT / "docs/scenarios.md").read_text(), re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


@cache
def functions_of(path: Path) -> frozenset[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions))


def test_every_scenario_has_one_row() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, 58))


@pytest.mark.parametrize(("number", "row"), ROWS, ids=[number for number, _ in ROWS])
def test_every_test_that_a_row_names_exists(number: str, row: str) -> None:
    named = TEST.findall(row)
    assert named, f"scenario {number} has no test"
    for file, name in named:
        path = ROOT / file if file.startswith("adapters/") else ROOT / "tests" / file
        assert path.is_file(), f"{file} is gone"
        assert name in functions_of(path), f"{file} has no {name}"


def test_a_numbered_test_stands_in_the_rows_of_its_numbers() -> None:
    named = {int(number): {name for _, name in TEST.findall(row)} for number, row in ROWS}
    for name in set().union(*named.values()):
        if numbers := re.match(r"test_scenario((?:_\d\d)+)_", name):
            for number in numbers[1].split("_")[1:]:
                assert name in named[int(number)], f"row {int(number)} lacks {name}"
