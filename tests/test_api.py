"""The names of the package: listed on their page, used by the examples, and cheap to import."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcr_actors
from kvcr_actors import KvcrActorsError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
LARGE = ("torch", "numpy", "matplotlib", "zmq", "prometheus_client")


def test_the_page_lists_every_name_once_in_a_line_and_no_other() -> None:
    listed = re.findall(r"^- `(\w+)`: \S.*$", PAGE.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(kvcr_actors.__all__)


def test_every_name_is_there_and_shown_by_dir() -> None:
    for name in kvcr_actors.__all__:
        assert getattr(kvcr_actors, name) is not None
    assert set(kvcr_actors.__all__) <= set(dir(kvcr_actors))
    with pytest.raises(AttributeError, match="no attribute 'CudaDevise'"):
        kvcr_actors.CudaDevise  # noqa: B018 - the access is what is tested


def test_the_page_has_the_errors_under_their_heading() -> None:
    section = PAGE.read_text().partition("## Errors\n")[2].partition("\n## ")[0]
    names = {name for name in kvcr_actors.__all__ if is_error(getattr(kvcr_actors, name))}
    assert set(re.findall(r"^- `(\w+)`", section, re.MULTILINE)) == names


def is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, KvcrActorsError)


def test_the_import_of_the_package_imports_nothing_large_and_a_device_does() -> None:
    program = (
        "import json, sys, kvcr_actors\n"
        f"before = [name for name in {LARGE!r} if name in sys.modules]\n"
        "kvcr_actors.CpuDevice\n"
        "print(json.dumps([before, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [[], True]


def shown_code() -> list[tuple[str, str]]:
    """The Python that users are shown: examples, notebooks, and the blocks of pages."""
    code = [(path.name, path.read_text()) for path in (ROOT / "examples").glob("*.py")]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        code += [(path.name, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        code += [(path.name, block) for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]
    return code


PUBLIC = ("kvcr_actors.ports", "kvcr_actors.stores", "kvcr_actors.testing")


def test_what_users_are_shown_imports_from_the_package_alone() -> None:
    imported: set[str] = set()
    for place, text in shown_code():
        for node in ast.walk(ast.parse(text, place, mode="exec", type_comments=False)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvcr_actors":
                if f"{node.module}.".startswith(tuple(f"{module}." for module in PUBLIC)):
                    continue  # scripts/check_imports.py looks at these
                assert node.module == "kvcr_actors", f"{place}: {ast.unparse(node)}"
                imported.update(alias.name for alias in node.names)
    assert {"CacheController", "CpuDevice", "CudaDevice", "open_controller", "ZmqEventSink"} <= imported
    assert imported <= set(kvcr_actors.__all__)
