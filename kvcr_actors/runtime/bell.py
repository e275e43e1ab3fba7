"""The way onto the loop from other threads: a bell that wakes it, and calls that run there in order.

Both loops wake with a socket write, which drops the GIL: a hot thread that rings one natively may wait milliseconds to
get it back. A ring therefore puts a token into a `SimpleQueue` (which keeps the GIL), and a relay thread writes. Who
posts a call has no step to delay, and wakes the loop directly: that saves its completions one sleeping thread.

No ring is lost: who rings makes its content visible first and reads `_armed` second; the loop clears `_armed` first and
looks for content second. Whichever comes later sees the other. The same holds for `_later` and the relay.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import get_ident
from typing import Protocol, TypeAlias

import attrs
from anyio.lowlevel import current_token

from kvcr_actors.runtime.foreign import contained

_JOIN_S = 5.0

Wake: TypeAlias = Callable[[Callable[[], None]], object]
"""Run a call on the loop soon. RuntimeError once the loop is gone."""


@attrs.frozen
class LoopAccess:
    """How to reach the running loop: `wake` from any thread, `wake_here` from its own, at less cost."""

    token: object
    wake: Wake
    wake_here: Wake

    @classmethod
    def of_running_loop(cls) -> LoopAccess:
        """Access to the asyncio or trio loop that runs this code; anyio's NoEventLoopError if there is none."""
        token = current_token().native_token
        if isinstance(token, asyncio.AbstractEventLoop):
            return cls(token, token.call_soon_threadsafe, token.call_soon)
        from trio.lowlevel import TrioToken  # an asyncio program need not load trio

        if not isinstance(token, TrioToken):
            raise TypeError(f"loop {token!r}: only asyncio and trio are supported")
        return cls(token, token.run_sync_soon, token.run_sync_soon)


class Notified(Protocol):
    """What a bell tells on every ring, on the loop."""

    def notify(self) -> None:
        """Wake whoever waits for content, if there is any."""
        ...


# Tokens of the doorbell; plain values, since an enum's member costs a call on Python 3.11.
_END, _RING, _LATER = range(3)

GRACE_S = 1e-3
"""An engine launches its next step right behind the flush, in calls that give up the GIL; meanwhile the loop sleeps."""


class LoopBell:
    """One wake-up for a whole runtime, made on the loop that it wakes.

    `on_error` takes the exception of a posted call and must not raise. Without `relay` there is no thread, and a ring
    from another thread writes to the loop itself: for a loop that its engine pumps.
    """

    __slots__ = (
        "_access",
        "_armed",
        "_calls",
        "_closed",
        "_doorbell",
        "_later",
        "_listeners",
        "_on_error",
        "_relay",
        "_thread",
    )

    def __init__(self, on_error: Callable[[Exception], None], *, relay: bool = True, name: str = "kvcr-bell") -> None:
        self._access = LoopAccess.of_running_loop()
        self._thread = get_ident()
        self._on_error = on_error
        self._armed = False
        self._later = False
        self._closed = False
        self._calls: deque[Callable[[], None]] = deque()
        self._listeners: list[Notified] = []
        self._doorbell: SimpleQueue[int] = SimpleQueue()
        self._relay: threading.Thread | None = None
        if relay:
            self._relay = threading.Thread(target=self._carry, name=name, daemon=True)
            self._relay.start()

    def attach(self, listener: Notified) -> None:
        """Notify `listener` on every ring from now on. On the loop."""
        self._listeners.append(listener)

    def ring(self) -> None:
        """Wake the loop, from any thread; almost free while an earlier ring is on its way. Dropped once closed."""
        if self._armed:
            return
        if self._relay is not None and get_ident() != self._thread:
            self._armed = True
            self._doorbell.put(_RING)
        else:
            self._ring_directly()

    def ring_later(self) -> None:
        """The same after a grace of `GRACE_S`, for what can wait so long, so that the loop lets the caller go on."""
        if self._armed or self._later:
            return
        if self._relay is not None and get_ident() != self._thread:
            self._later = True
            self._doorbell.put(_LATER)
        else:
            self._ring_directly()

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop soon, in order of posting, from any thread. Dropped once closed."""
        if not self._closed:
            self._calls.append(call)
            if not self._armed:
                self._ring_directly()

    def close(self) -> None:
        """Run what was posted, then drop all that follows and end the relay thread. On the loop."""
        if self._closed:
            return
        self._closed = True
        self._armed = True
        self._run_calls()
        if self._relay is not None:
            self._doorbell.put(_END)
            self._relay.join(_JOIN_S)

    def _ring_directly(self) -> None:
        self._armed = True
        self._wake(self._access.wake_here if get_ident() == self._thread else self._access.wake)

    def _carry(self) -> None:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            # Where all cores are busy this thread must not push aside the one that wakes it. A sandbox may forbid it.
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while token := self._doorbell.get():
            if token == _LATER:
                time.sleep(GRACE_S)
                self._later = False
                if self._armed:
                    continue
                self._armed = True
            if not self._wake(self._access.wake):
                break

    def _wake(self, wake: Wake) -> bool:
        try:
            wake(self._on_ring)
        except RuntimeError:  # the loop is gone, and with it everybody who could care
            self._closed = True
            return False
        return True

    def _on_ring(self) -> None:
        if self._closed:
            return
        self._armed = False
        for listener in self._listeners:
            listener.notify()
        self._run_calls()

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):  # what they post rings again: a turn of the loop in between
            call = self._calls.popleft()
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - the handler has it; raised here it would end the loop
                self._on_error(contained(error))
