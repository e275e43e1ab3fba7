"""Where a publisher listens: TCP, or a Unix socket that replaces a dead one and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvcr_actors.errors import EventEndpointError

_BACKLOG: Final = 128
_BIND_S: Final = 0.5
_BIND_LOOK_S: Final = 0.02
_SIOCGIFADDR: Final = 0x8915
_IN_USE: Final = (errno.EADDRINUSE, errno.EWOULDBLOCK)


class Listener:
    """A bound socket that does not block. Made in up to half a second, in which an address may become free.

    EventEndpointError names the endpoint and what to do; then nothing was changed.
    """

    def __init__(self, address: str, what: str) -> None:
        self._path: Path | None = None
        self._inode = 0
        until = time.monotonic() + _BIND_S
        while True:
            try:
                self.socket = self._listen(address)
            except OSError as error:
                if error.errno in _IN_USE and time.monotonic() < until:
                    time.sleep(_BIND_LOOK_S)
                    continue
                reason = error.strerror or str(error)
                raise EventEndpointError(f"{what} endpoint {address}: {reason}; free it, or choose another") from error
            return

    def close(self) -> None:
        """Listen no more; a Unix socket's path goes, if it is still this one's."""
        end_connection(self.socket)
        if self._path is not None:
            with suppress(OSError):
                if self._path.lstat().st_ino == self._inode:
                    self._path.unlink()

    def _listen(self, address: str) -> socket.socket:
        scheme, _, name = address.partition("://")
        if scheme == "tcp":
            return _bound(*_tcp_address(name))
        if name.startswith("@"):
            return _bound(socket.AF_UNIX, f"\0{name[1:]}")
        path = Path(name)
        with _folder_held(path.parent):
            _remove_dead(path)
            listener = _bound(socket.AF_UNIX, name)
            self._path, self._inode = path, path.lstat().st_ino
        return listener


def end_connection(connection: socket.socket) -> None:
    """Close a socket for both sides, also where a forked child has it too: closed alone, it would live on there."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _bound(family: int, address: str | tuple[str, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.settimeout(0)
    except BaseException:
        listener.close()
        raise
    return listener


def _tcp_address(name: str) -> tuple[int, tuple[str, int]]:
    host, _, port = name.rpartition(":")
    if host.startswith("["):
        return socket.AF_INET6, (host.strip("[]"), int(port))
    if host in [interface for _, interface in socket.if_nameindex()]:
        host = _interface_address(host)
    return socket.AF_INET, ("" if host == "*" else host, int(port))


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s240x", name.encode()))
    return socket.inet_ntoa(answer[20:24])


@contextmanager
def _folder_held(folder: Path) -> Generator[None]:
    """Keep other publishers from looking and binding in between; EWOULDBLOCK if one is at it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _remove_dead(path: Path) -> None:
    """Remove a socket that nobody serves; OSError for one that is served, and for whatever is no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is something that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass  # so many wait there that one more would, too
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
