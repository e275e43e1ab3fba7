"""Memory has one owner: a device and its host pools belong to one running controller of the process.

Two owners would each hand out all slots, and copy over each other's pages without a word. An owner whose copies did
not end in time keeps the memory until the threads that copy have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcr_actors.errors import ConfigError

_lock = threading.Lock()
_leases: dict[int, MemoryLease] = {}
"""By the identity of what is owned; a lease keeps it alive, so that no other object gets its identity."""


class MemoryLease:
    """What one controller owns from its start to the end of its close. Made by `take_memory`."""

    def __init__(self, parts: Sequence[object]) -> None:
        self._parts = tuple(parts)
        self._running: Sequence[threading.Thread] | None = None
        """Threads that may still touch the memory after the close; None while the controller runs."""
        self._words = "still runs; close that controller first"

    def give_back(self) -> None:
        """Let another controller have the memory."""
        with _lock:
            self.forget()

    def give_back_after(self, late: str, threads: Sequence[threading.Thread] | None) -> None:
        """The same once these threads have ended; with None, never. `late` names what did not end in time."""
        self._words = f"was closed while copies still ran ({late}); wait until they have ended"
        if threads is None:
            self._words += ", which nobody can tell"
        self._running = threads

    def forget(self) -> None:
        """Take it from the list of what is owned. Called with the lock held."""
        for part in self._parts:
            _leases.pop(id(part), None)

    @property
    def is_over(self) -> bool:
        """Whether nothing of an owner that has closed runs any more."""
        return self._running is not None and not any(thread.is_alive() for thread in self._running)

    @property
    def words(self) -> str:
        """What the owner does."""
        return self._words


def take_memory(*parts: object) -> MemoryLease:
    """Own memory (a device, its host pools), or ConfigError that names the part that another controller owns."""
    lease = MemoryLease(parts)
    with _lock:
        for part in parts:
            if (other := _owner(part)) is not None:
                raise ConfigError(
                    f"{type(part).__name__}: the memory belongs to a controller that {other.words}, or give this one "
                    "a device and host pools of its own"
                )
        _leases.update((id(part), lease) for part in parts)
    return lease


def check_free(part: object, action: str) -> None:
    """ConfigError if a controller owns memory that `action` would take away from it."""
    with _lock:
        if (owner := _owner(part)) is not None:
            raise ConfigError(f"{type(part).__name__}: {action} is refused: its controller {owner.words}")


def _owner(part: object) -> MemoryLease | None:
    lease = _leases.get(id(part))
    if lease is not None and lease.is_over:
        lease.forget()
        return None
    return lease
