"""What stands outside the library imports its public modules alone; what it imports beside those is listed.

usage: check_imports.py FILE_OR_FOLDER...: exit status 1 if an internal module, or a name that a module does not export,
is imported. Folders are searched for Python files and for Markdown with Python in it.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = "kvcr_actors"
EXPORTING: Final = frozenset({PACKAGE, f"{PACKAGE}.ports", f"{PACKAGE}.stores"})
"""Public modules of which the names in `__all__` are public, and no others."""
TOOLS: Final = (f"{PACKAGE}.testing", f"{PACKAGE}.replay")
"""Public packages for tests and for measuring: all modules in them, for what is not itself a library."""


def faults_of(source: str, *, is_library: bool) -> Iterator[tuple[int, str]]:
    """Give the line and the words of each import that is not public."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name != PACKAGE and alias.name.startswith(f"{PACKAGE}."):
                    yield from _module_fault(node.lineno, alias.name, [], is_library=is_library)
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}.") and not node.level:
            names = [alias.name for alias in node.names]
            yield from _module_fault(node.lineno, str(node.module), names, is_library=is_library)


def _module_fault(line: int, module: str, names: list[str], *, is_library: bool) -> Iterator[tuple[int, str]]:
    if module in EXPORTING:
        exported: list[str] = importlib.import_module(module).__all__
        for name in sorted(set(names) - set(exported)):
            if f"{module}.{name}" not in EXPORTING:
                yield line, f"{module} does not export {name}"
    elif not any(f"{module}.".startswith(f"{tool}.") for tool in TOOLS):
        yield line, f"{module} is internal; import from {', '.join(sorted(EXPORTING))}"
    elif is_library:
        yield line, f"{module} is for tests and examples; a library imports from {', '.join(sorted(EXPORTING))}"


def check(paths: list[Path]) -> list[str]:
    """Check files and folders; returns the faults as `FILE:LINE: WORDS`."""
    faults: list[str] = []
    for path in paths:
        files = sorted([*path.rglob("*.py"), *path.rglob("*.md")]) if path.is_dir() else [path]
        for file in files:
            text = file.read_text()
            blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL) if file.suffix == ".md" else [text]
            for block in blocks:
                faults += [
                    f"{file}:{line}: {words}" for line, words in faults_of(block, is_library="src" in file.parts)
                ]
    return faults


def main(arguments: list[str]) -> int:
    """Print the faults."""
    faults = check([Path(argument) for argument in arguments])
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
