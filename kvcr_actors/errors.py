"""Every exception that the package raises on purpose; each says who must act, and on what."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class KvcrActorsError(Exception):
    """The base of all errors of this package."""


class ConfigError(KvcrActorsError):
    """A configuration value, key or combination is refused. The caller changes the configuration."""


class InvalidNodeError(KvcrActorsError):
    """A node, request or order is malformed. The engine adapter that built it is at fault."""


class KeyFormatError(KvcrActorsError):
    """A key, or what it is made from, has the wrong form. Whoever passed it is at fault."""


class UnsupportedPlatformError(KvcrActorsError):
    """The package runs on Linux only, and this is another system."""


class NoHostMemoryError(KvcrActorsError):
    """The host tier cannot give the slots asked for, even by evicting all that may be evicted."""


class ClaimError(KvcrActorsError):
    """A claim was released twice, or is not known to the ledger. The holder is at fault."""


class InboxFullError(KvcrActorsError):
    """An inbox is at its limit. The sender decides what to shed; it never waits."""


class InboxClosedError(KvcrActorsError):
    """An actor takes no more messages because its runtime is stopping."""


class ActorEscalatedError(KvcrActorsError):
    """An actor failed more often than its restart budget allows; the controller stops."""


class ForeignExitError(KvcrActorsError):
    """Foreign code on the loop raised what is no `Exception` (such as SystemExit), which is chained; it ends the
    controller, whatever restarts are left. Whoever wrote that code is at fault.
    """


class ControllerClosedError(KvcrActorsError):
    """The controller (or store client) was closed, or failed; the cause is chained. Open a new one."""


class DeadlineError(KvcrActorsError):
    """A wait reached its deadline. The message names what was awaited."""


class ThreadDeadlineError(DeadlineError):
    """A port's close was late: its memory is quiet once these threads, and the tasks of its loop, have ended."""

    def __init__(self, message: str, threads: Sequence[threading.Thread]) -> None:
        super().__init__(message)
        self.threads = tuple(threads)


class DeviceError(KvcrActorsError):
    """A device refused or failed a submit."""


class StoreError(KvcrActorsError):
    """A store cannot be opened or failed as a whole (one page's failure is an outcome, not an error)."""


class CheckpointError(StoreError):
    """Not all of host memory came to the store, on this rank or another; what came stays there. Try again later."""


class StoreLockedError(StoreError):
    """Another process holds the store's folder."""


class StoreFormatError(StoreError):
    """The store's folder was written in a format that this version does not read."""


class TraceError(KvcrActorsError):
    """A trace cannot be read; the message names the file and the line."""


class ReplayError(KvcrActorsError):
    """A replay that had started did not come to its end; the cause is chained. Its input was accepted."""


class EventFormatError(KvcrActorsError):
    """A KV event message cannot be read. Its publisher is at fault."""


class EventEndpointError(ConfigError):
    """An event socket cannot be opened; the message names the endpoint and what to do."""
