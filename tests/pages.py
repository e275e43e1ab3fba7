"""The Python that a page of the documentation shows, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def code_of_page(page: Path) -> dict[str, Any]:
    """The names that all Python blocks of a page make, one after the other in one namespace."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(compile(block, str(page), "exec"), names)  # noqa: S102 - the page is ours
    return names
