"""Every notebook runs from top to bottom in a kernel of its own, and its cells show what its text claims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ALL_RIGHT = "device holds the right bytes: {'kv': True, 'swa': True, 'mamba': True}"
ALL_WRONG = "device holds the right bytes: {'kv': False, 'swa': False, 'mamba': False}"

PRINTED = {
    "01_life_of_a_node": {
        "load": [ALL_RIGHT],
        "backup": ["BackupAck(step=1, node_ids=(1,), failed=(), missing=())", "submits: 1"],
        "deposit": ["device: a0 a1 a2 a3", "host: a0 a1 a2 a3", "store: a0 a1 a2 a3"],
        "poison": [ALL_WRONG],
        "prefetch": ["4 of 4 pages are ready; open claims: 1"],
        "restore": [ALL_RIGHT, "used from host: 4, from store: 0", "open claims: 0"],
        "forget": ["device: -", "host: b0 b1 b2 b3 c0", "store: a0 a1 a2 a3 b0"],
        "store": ["4 of 4 pages are ready", ALL_RIGHT, "used from host: 0, from store: 4", "open claims: 0"],
        "cancel": [
            "aborted: {<MissReason.CANCELLED: 'cancelled'>: 4}",
            "revoked: 4 pages are ready; claims more than before: 1",
            "claims more than before, at the end: 0",
        ],
        "events": ["0  device  +  a0 a1 a2 a3", "equals host:  True", "equals store: True", "anomalies: 0"],
        "close": ["open: 0"],
    }
}
"""For each notebook, what must be in the text that a cell (by its id) printed."""


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path):
    for cell in code_cells(read(path)):
        assert (cell.outputs, cell.execution_count) == ([], None), cell.id


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def executed(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A notebook's name, and its code cells by id after the run; a cell that raises fails here with its traceback."""
    notebook = read(request.param)
    client = NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    return request.param.stem, {cell.id: cell for cell in code_cells(notebook)}


def test_every_cell_of_a_notebook_runs_in_order_without_a_word_on_stderr(executed: tuple[str, dict[str, Any]]):
    _, cells = executed
    assert [cell.execution_count for cell in cells.values()] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells.values() for output in cell.outputs]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []


def test_key_cells_print_what_the_text_around_them_claims(executed: tuple[str, dict[str, Any]]):
    name, cells = executed
    assert name in PRINTED, f"say in PRINTED what {name} must show"
    for cell_id, expected in PRINTED[name].items():
        text = "".join(output.text for output in cells[cell_id].outputs if output.output_type == "stream")
        for fragment in expected:
            assert fragment in text, cell_id


def test_the_life_of_a_node_ends_in_a_picture(executed: tuple[str, dict[str, Any]]):
    name, cells = executed
    if name == "01_life_of_a_node":
        assert any("image/png" in output.get("data", {}) for output in cells["picture"].outputs)
