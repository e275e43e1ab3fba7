"""An actor for tests: it records what happens to its messages, and does with each batch what the test says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.supervisor import ActorSpec, RestartPolicy

DEFAULT_RESTART = RestartPolicy()


class Diary:
    """What happened, in order, over all incarnations and actors that share it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.handled: list[Any] = []
        self.abandoned: list[tuple[Any, Exception]] = []
        self.made = 0

    def write(self, line: str) -> None:
        self.lines.append(line)


class Worker:
    """Handles a batch with `act`; drains with `end`."""

    def __init__(
        self,
        name: str,
        diary: Diary,
        act: Callable[[Worker, Sequence[Any]], Awaitable[None]],
        end: Callable[[Worker], Awaitable[None]],
        children: Tasks,
    ) -> None:
        self.name = name
        self.busy = 0
        self.children = children
        self.diary = diary
        self._act = act
        self._end = end

    async def handle(self, batch: Sequence[Any]) -> None:
        await self._act(self, batch)
        self.diary.handled.extend(batch)

    def abandon(self, batch: Sequence[Any], error: Exception) -> None:
        self.diary.write(f"{self.name} abandons {len(batch)}")
        self.diary.abandoned.extend((message, error) for message in batch)

    async def drain(self) -> None:
        self.diary.write(f"{self.name} drains")
        await self._end(self)
        self.diary.write(f"{self.name} drained")

    def describe(self) -> dict[str, Any]:
        return {"handled": len(self.diary.handled)}


async def do_nothing(*_: object) -> None:
    pass


def worker_spec(
    name: str,
    diary: Diary,
    *,
    act: Callable[[Worker, Sequence[Any]], Awaitable[None]] = do_nothing,
    end: Callable[[Worker], Awaitable[None]] = do_nothing,
    restart: RestartPolicy = DEFAULT_RESTART,
    drain_budget_s: float = 10.0,
    limit: int = 100,
) -> ActorSpec[Any]:
    def make(children: Tasks) -> Worker:
        diary.made += 1
        diary.write(f"{name} made")
        return Worker(name, diary, act, end, children)

    return ActorSpec(name, make, Inbox(name, limit), restart, drain_budget_s)
