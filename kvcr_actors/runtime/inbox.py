"""An actor's inbox: many writers on any thread, one reader on the loop, which takes everything at once."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from kvcr_actors.errors import ConfigError, InboxClosedError, InboxFullError

M = TypeVar("M")


class Inbox(Generic[M]):
    """A bounded queue of messages without a lock on its way in.

    `limit` counts messages; writers that race may exceed it by one each. A message whose `post` returned is taken by
    the reader, even when the inbox closes at that moment; one whose `post` raised never is.
    """

    __slots__ = ("_closed", "_closing", "_messages", "_waiting", "limit", "name")

    def __init__(self, name: str, limit: int) -> None:
        if limit < 1:
            raise ConfigError(f"inbox {name}: its limit must be 1 or more, not {limit}")
        self.name = name
        self.limit = limit
        self._messages: deque[M] = deque()
        self._waiting: anyio.Event | None = None
        self._closed = False
        self._closing = threading.Lock()

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_closed(self) -> bool:
        """Whether posts are refused."""
        return self._closed

    def post(self, message: M) -> None:
        """Append from any thread, without a wake-up: ring the bell afterwards, once for all that was posted.

        InboxFullError at the limit, InboxClosedError after `close`; the message is then still the caller's.
        """
        if self._closed:
            raise InboxClosedError(f"inbox {self.name}: its actor is stopping")
        if len(self._messages) >= self.limit:
            raise InboxFullError(f"inbox {self.name}: {self.limit} messages wait already")
        self._messages.append(message)
        if self._closed and self._retract(message):
            raise InboxClosedError(f"inbox {self.name}: its actor is stopping")

    def tell(self, message: M) -> None:
        """Post from the loop, and wake the reader."""
        self.post(message)
        self.notify()

    def notify(self) -> None:
        """Wake the reader if there is something for it. On the loop."""
        if self._waiting is not None and (self._messages or self._closed):
            self._waiting.set()

    async def take(self) -> list[M]:
        """Wait for messages and take all of them, in order; an empty list once closed and drained.

        A cancelled `take` took nothing.
        """
        if self._messages or self._closed:
            await checkpoint()
        while not self._messages and not self._closed:
            self._waiting = anyio.Event()
            try:
                await self._waiting.wait()
            finally:
                self._waiting = None
        return self.take_now()

    def take_now(self) -> list[M]:
        """Take what is there, without waiting. On the loop."""
        if not self._closed:
            return self._pop_all()
        with self._closing:
            return self._pop_all()

    def close(self) -> None:
        """Refuse posts from now on; what is queued can still be taken. On the loop."""
        self._closed = True
        self.notify()

    def _pop_all(self) -> list[M]:
        # One by one: a copy and a clear would lose what another thread appends in between.
        messages = self._messages
        return [messages.popleft() for _ in range(len(messages))]

    def _retract(self, message: M) -> bool:
        # The inbox closed while `message` was appended: it is either still here, or the reader has it.
        with self._closing:
            found = False
            for other in self._pop_all():
                if other is message and not found:
                    found = True
                else:
                    self._messages.append(other)
            return found
