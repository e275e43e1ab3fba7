"""Where the real consumers run: this interpreter, or the one that KVCR_ACTORS_DYNAMO_PYTHON names."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

VERSION = "1.6.1"
_ASK = "from importlib.metadata import version; print(version('ai-dynamo-runtime'))"


@cache
def _found(interpreter: str) -> str:
    answer = subprocess.run([interpreter, "-c", _ASK], capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout.strip()


def dynamo_interpreter() -> str:
    """An interpreter with ai-dynamo-runtime; the test is skipped, with what to do, where there is none."""
    interpreter = os.environ.get("KVCR_ACTORS_DYNAMO_PYTHON", sys.executable)
    if Path(interpreter).exists() and _found(interpreter) == VERSION:
        return interpreter
    pytest.skip(
        f"ai-dynamo-runtime {VERSION} is not there: install it into an environment of its own, and name its python in "
        "KVCR_ACTORS_DYNAMO_PYTHON"
    )
