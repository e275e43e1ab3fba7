"""Async tests run on three loops: asyncio and trio on virtual time, and asyncio on the real clock.

Tests with threads carry `@pytest.mark.real_clock` and run on both loops with real clocks. Synchronous tests that start
a loop on a thread of their own take the fixture `real_backend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from hypothesis import settings

from kvcr_actors.testing.virtual_time import REAL, BackendName, backend_options

ALL_CLOCKS: tuple[BackendName, ...] = ("asyncio-virtual", "asyncio", "trio-virtual")


# A busy machine must not fail a test: none asserts wall time.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_clock: the test uses threads, which a virtual clock does not see")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "anyio_backend" in metafunc.fixturenames:
        real = metafunc.definition.get_closest_marker("real_clock") is not None
        metafunc.parametrize("anyio_backend", REAL if real else ALL_CLOCKS, indirect=True)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command configures logging for its process, onto a captured stream; each test gives back what it found."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The loop of an async test, built anew for each: a mock clock is used up by one run."""
    return backend_options(request.param)


@pytest.fixture(params=REAL)
def real_backend(request: pytest.FixtureRequest) -> str:
    """The name of a loop that a host runs on a thread."""
    return request.param
