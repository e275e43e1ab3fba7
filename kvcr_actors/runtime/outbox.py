"""The way back to the engine: the loop delivers, the engine's thread polls or waits.

No wake-up is lost: the waiter announces itself first and looks for content second; `deliver` makes content visible
first and looks for a waiter second. A token that comes late is a spurious wake-up, and `wait` looks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint

C = TypeVar("C")


class Outbox(Generic[C]):
    """Completions in order of delivery; one thread (or, with `wait_async`, tasks of the loop) takes them."""

    __slots__ = ("_changed", "_doorbell", "_messages", "_waited_for")

    def __init__(self) -> None:
        self._messages: deque[C] = deque()
        self._doorbell: SimpleQueue[None] = SimpleQueue()
        self._waited_for = False
        self._changed: anyio.Event | None = None

    def __len__(self) -> int:
        return len(self._messages)

    def deliver(self, messages: Sequence[C]) -> None:
        """Append messages, and wake whoever waits; without a waiter it costs an append. On the loop."""
        if not messages:
            return
        self._messages.extend(messages)
        if self._waited_for:
            self._waited_for = False
            self._doorbell.put(None)
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def take(self) -> list[C]:
        """Everything delivered so far, in order; never waits. On the engine's thread."""
        messages = self._messages
        if not messages:
            return []
        return [messages.popleft() for _ in range(len(messages))]

    def wait(self, timeout_s: float) -> bool:
        """Block the engine's thread until something is there: True, or False after `timeout_s`.

        One thread at a time may wait, and never the loop's own.
        """
        deadline = monotonic() + timeout_s
        while not self._messages:
            self._waited_for = True
            remaining = deadline - monotonic()
            if self._messages or remaining <= 0:
                break
            try:
                self._doorbell.get(timeout=remaining)
            except Empty:
                break
        self._waited_for = False
        return bool(self._messages)

    async def wait_async(self) -> None:
        """Wait on the loop until something is there. The caller sets the deadline."""
        await checkpoint()
        while not self._messages:
            if self._changed is None:
                self._changed = anyio.Event()
            await self._changed.wait()
