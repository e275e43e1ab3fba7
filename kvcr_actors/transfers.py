"""One native operation, with two ends: its outcome is known, and its memory is quiet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

import anyio
from anyio.lowlevel import checkpoint

T = TypeVar("T")


class Operation(Generic[T]):
    """The handle of a copy, a read or a write that runs elsewhere.

    `settle` gives the outcome that waiters see. `quiet` is the later or equal moment from which native code no
    longer touches the operation's memory: a claim ends then, not before. A waiter that is cancelled changes neither.
    All methods belong to the loop's thread; other threads go through `Services.post`.
    """

    __slots__ = ("_is_quiet", "_is_settled", "_outcome", "_quiet", "_settled", "_when_quiet", "_when_settled")

    def __init__(self) -> None:
        self._is_settled = False
        self._is_quiet = False
        self._outcome: T | None = None
        # Made by the first waiter: most operations end without one, or are over when they are made.
        self._settled: anyio.Event | None = None
        self._quiet: anyio.Event | None = None
        self._when_settled: list[Callable[[T], None]] = []
        self._when_quiet: list[Callable[[], None]] = []

    @classmethod
    def finished(cls, outcome: T) -> Operation[T]:
        """Make an operation that is over already."""
        operation = cls()
        operation._outcome = outcome
        operation._is_settled = operation._is_quiet = True
        return operation

    def settle(self, outcome: T, *, quiet: bool = True) -> None:
        """Give the outcome, once; a later one is ignored, but may make the operation quiet."""
        if not self._is_settled:
            self._outcome = outcome
            self._is_settled = True
            if self._settled is not None:
                self._settled.set()
            calls, self._when_settled = self._when_settled, []
            for call in calls:
                call(outcome)
        if quiet:
            self.become_quiet()

    def become_quiet(self) -> None:
        """Tell that native code no longer touches the memory; the outcome must be known."""
        if not self._is_settled:
            raise RuntimeError("settle the operation before it becomes quiet")
        self._is_quiet = True
        if self._quiet is not None:
            self._quiet.set()
        calls, self._when_quiet = self._when_quiet, []
        for call in calls:
            call()

    def when_settled(self, call: Callable[[T], None]) -> None:
        """Run `call` with the outcome in the turn that brings it, at once if it is known. It must not raise.

        A waiter resumes a turn later, when the next operation's events may have been heard.
        """
        if self._is_settled:
            call(cast("T", self._outcome))
        else:
            self._when_settled.append(call)

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Run `call` once the memory is quiet, at once if it is. It must not raise."""
        if self._is_quiet:
            call()
        else:
            self._when_quiet.append(call)

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is known."""
        return self._is_settled

    def settled_outcome(self) -> T | None:
        """The outcome, without waiting; None while it is not known."""
        return self._outcome

    @property
    def is_quiet(self) -> bool:
        """Whether the memory may be reused."""
        return self._is_quiet

    async def outcome(self) -> T:
        """Wait for the outcome. The caller sets the deadline."""
        if self._is_settled:
            await checkpoint()
        else:
            if self._settled is None:
                self._settled = anyio.Event()
            await self._settled.wait()
        return cast("T", self._outcome)

    async def quiet(self) -> None:
        """Wait until the memory may be reused. The caller sets the deadline."""
        if self._is_quiet:
            await checkpoint()
        else:
            if self._quiet is None:
                self._quiet = anyio.Event()
            await self._quiet.wait()
