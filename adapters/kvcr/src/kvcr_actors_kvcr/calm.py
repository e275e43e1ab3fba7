"""NIXL's UCX backend spins a core in each runner: its Python API fixes the delay of the progress thread at 0.

Where the installed NIXL is one that this module knows, a delay is set on the agent's configuration instead.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from types import ModuleType
from typing import Any

KNOWN = frozenset({"1.5.0"})
DELAY_US = 1_000

_one_at_a_time = Lock()


def can_calm() -> bool:
    """Whether the installed NIXL is one whose configuration this module knows."""
    try:
        return version("nixl") in KNOWN
    except PackageNotFoundError:
        return False


class _Bindings(ModuleType):
    """NIXL's bindings with another configuration class; everything else is theirs."""

    def __init__(self, real: ModuleType, delay_us: int) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(real.__dict__)
        configuration: Any = real.__dict__["nixlAgentConfig"]

        class CalmConfig(configuration):
            def __setattr__(self, name: str, value: object) -> None:
                configuration.__setattr__(self, name, delay_us if name == "pthrDelay" else value)

        self.__dict__["nixlAgentConfig"] = CalmConfig


@contextmanager
def calm_progress(*, enabled: bool, delay_us: int = DELAY_US) -> Generator[bool]:
    """Make the agents that are built inside the block sleep between polls; yields whether that took effect.

    One block runs at a time in a process.
    """
    if not enabled or not can_calm():
        yield False
        return
    import nixl  # noqa: F401  # pyright: ignore[reportUnusedImport, reportMissingTypeStubs]

    api = sys.modules["nixl._api"].__dict__
    with _one_at_a_time:
        real: ModuleType = api["nixlBind"]
        api["nixlBind"] = _Bindings(real, delay_us)
        try:
            yield True
        finally:
            api["nixlBind"] = real
