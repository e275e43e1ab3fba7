from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _silent_log() -> Iterator[None]:
    """Thousands of planted faults would print their tracebacks."""
    before = structlog.get_config()
    structlog.configure(processors=[_drop])
    yield
    structlog.configure(**before)


def _drop(logger: object, name: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    raise structlog.DropEvent
