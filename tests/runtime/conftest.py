from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import anyio
import pytest
import structlog

from kvcr_actors.runtime.runtime import Runtime
from kvcr_actors.runtime.supervisor import ActorSpec

Running: TypeAlias = Callable[..., AbstractAsyncContextManager[Runtime]]


@pytest.fixture
def log() -> Any:
    """Structured records go to `log.entries`."""
    capture = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(None, processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(0))
    return _Log(logger, capture)


class _Log:
    def __init__(self, logger: Any, capture: Any) -> None:
        self.logger = logger
        self._capture = capture

    def events(self) -> list[str]:
        return [entry["event"] for entry in self._capture.entries]

    def one(self, event: str) -> dict[str, Any]:
        (entry,) = [entry for entry in self._capture.entries if entry["event"] == event]
        return entry


@pytest.fixture
def running(log: Any) -> Running:
    """Run actors inside the block; leaving it stops them in order and raises what the runtime raised."""

    @asynccontextmanager
    async def run(*specs: ActorSpec[Any]) -> AsyncIterator[Runtime]:
        runtime, stop = Runtime(specs, log.logger), anyio.Event()
        failure: list[BaseException] = []

        async def main(*, task_status: Any) -> None:
            try:
                await runtime.run(task_status.started, stop)
            except Exception as error:  # noqa: BLE001 - raised when the block is left
                failure.append(error)

        async with anyio.create_task_group() as tasks:
            await tasks.start(main)
            yield runtime
            stop.set()
        if failure:
            raise failure[0]

    return run
