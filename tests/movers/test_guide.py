"""The code of the guide runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "mover.md"


def test_the_guides_code_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(code, str(GUIDE), "exec"), scope)  # noqa: S102 - the guide's own code
    assert "ack" in scope
