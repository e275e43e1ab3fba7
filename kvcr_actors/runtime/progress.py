"""How far the loop has come with a numbered sequence that another thread hands over."""

from __future__ import annotations

import threading
from time import monotonic

import anyio
from anyio.lowlevel import checkpoint

from kvcr_actors.errors import ControllerClosedError, DeadlineError


class Progress:
    """The last number that the loop is done with; whoever is done with one is done with all before it.

    Nobody waits in vain: `end` says that no further number will be reached. `what` names the sequence in errors.
    """

    __slots__ = ("_changed", "_event", "_is_over", "_reached", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._event: anyio.Event | None = None
        self._reached = 0
        self._is_over = False

    def settles(self, number: int) -> bool:
        """Whether a number was reached, or can be no more."""
        return self._reached >= number or self._is_over

    def reach(self, number: int) -> None:
        """Tell that everything up to a number is done; one that was reached before changes nothing. On the loop."""
        self._tell(max(number, self._reached), is_over=self._is_over)

    def end(self) -> None:
        """Tell that nothing more will be done. On the loop."""
        self._tell(self._reached, is_over=True)

    def wait(self, number: int, timeout_s: float) -> None:
        """Block a thread (never the loop's) until a number is reached, or raise as `check` does."""
        deadline = monotonic() + timeout_s
        with self._changed:
            while not self.settles(number) and (left := deadline - monotonic()) > 0:
                self._changed.wait(left)
        self.check(number, timeout_s)

    async def wait_async(self, number: int, timeout_s: float) -> None:
        """Wait on the loop until a number is reached, or raise as `check` does."""
        await checkpoint()
        with anyio.move_on_after(timeout_s):
            while not self.settles(number):
                if self._event is None:
                    self._event = anyio.Event()
                await self._event.wait()
        self.check(number, timeout_s)

    def check(self, number: int, timeout_s: float) -> None:
        """Raise what kept a number from being reached: ControllerClosedError, or DeadlineError after `timeout_s`."""
        if self._reached >= number:
            return
        standing = f"{self._what}: {self._reached} of {number} are done"
        if self._is_over:
            raise ControllerClosedError(f"{standing}, and the controller has ended")
        raise DeadlineError(f"{standing} after {timeout_s:g} s")

    def _tell(self, reached: int, *, is_over: bool) -> None:
        with self._changed:
            self._reached, self._is_over = reached, is_over
            self._changed.notify_all()
        if self._event is not None:
            self._event.set()
            self._event = None
