"""Clients of one bound socket: accepted, read and written without ever waiting, each at a bounded cost."""

from __future__ import annotations

import select
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Final

import structlog

from kvcr_actors.errors import EventEndpointError
from kvcr_actors.events.listening import Listener, end_connection
from kvcr_actors.events.zmtp import Buffers, ClientError, ClientStream, Role

log = structlog.get_logger()

CLIENTS: Final = 256
"""Connections at a time; one more takes the place of the oldest that has not introduced itself, or is refused."""
_HANDSHAKE_S: Final = 5.0
_PATIENCE_S: Final = 1.0
"""How long a client is expected to go on at any moment: to say all that it wants, or to read what waits for it."""
_READ_BYTES: Final = 512
"""Taken of one client in a turn: what a client sends in a flood waits in its own system's buffers."""
_EVENTS: Final = 16
_ACCEPTS: Final = 16
_WRITE_PARTS: Final = 64
_LINGER_LOOK_S: Final = 0.02
_DRAIN_READS: Final = 64


class Client:
    """One connection. `prefixes` and whatever else its owner notes of it are the owner's."""

    def __init__(self, connection: socket.socket, role: Role, queue: int) -> None:
        self.stream = ClientStream(role)
        self.prefixes: Counter[bytes] = Counter()
        self.is_open = True
        self.since = time.monotonic()
        """When it came, then when its handshake ended."""
        self.wrote_at = self.since
        """When it last took something."""
        self.is_awaited = True
        """Whether the system tells when more can be written."""
        self.connection = connection
        self._limit = 2 * queue
        self._out: deque[bytes | memoryview] = deque()

    @property
    def has_room(self) -> bool:
        """Whether one more message may wait for it."""
        return len(self._out) <= self._limit - 2

    @property
    def has_output(self) -> bool:
        """Whether something waits for it."""
        return bool(self._out)

    def put(self, message: Buffers) -> None:
        """Have a message wait for it. Its bytes are shared with other clients."""
        self._out.extend(message)

    def read(self) -> Iterator[tuple[bytes, ...]]:
        """Give the messages of the next bytes; OSError or ClientError ends it."""
        try:
            data = self.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        was_ready = self.stream.is_ready
        yield from self.stream.feed(data)
        if self.stream.is_ready and not was_ready:
            self.since = time.monotonic()
        self.answer()

    def answer(self) -> None:
        """Have what the protocol owes it wait for it; a client that asks for more than it reads gets no answer."""
        if self.has_room:
            self._out.extend(self.stream.answers)
        self.stream.answers.clear()

    def write(self) -> None:
        """Send what waits, as far as the system takes it; OSError ends it."""
        out = self._out
        while out:
            try:
                sent = self.connection.sendmsg(list(islice(out, _WRITE_PARTS)), (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self.wrote_at = time.monotonic()
            while out and len(out[0]) <= sent:
                sent -= len(out.popleft())
            if sent:
                out[0] = memoryview(out[0])[sent:]


class Server:
    """A bound socket and its clients, for one thread. EventEndpointError from the constructor names the endpoint."""

    def __init__(self, role: Role, address: str, what: str, queue: int) -> None:
        self._role = role
        self._what = what
        self._queue = queue
        self._listener = Listener(address, what)
        try:
            self._epoll = select.epoll()
            self._epoll.register(self._listener.socket, select.EPOLLIN)
        except BaseException as error:
            self._listener.close()
            if isinstance(error, OSError):
                words = f"{what} endpoint {address}: {error.strerror}; allow the process more open files"
                raise EventEndpointError(words) from error
            raise
        self._clients: dict[int, Client] = {}
        self._refused = 0

    @property
    def clients(self) -> Iterator[Client]:
        """Those that are connected, oldest first; any of them may be sent to meanwhile."""
        return iter(list(self._clients.values()))

    @property
    def is_busy(self) -> bool:
        """Whether a client is expected to go on at any moment: it joins, or reads what waits for it.

        One that floods, or takes nothing, is not: it would keep the thread awake for ever.
        """
        since = time.monotonic() - _PATIENCE_S
        return any(
            not client.stream.is_ready or client.since > since or (client.has_output and client.wrote_at > since)
            for client in self._clients.values()
        )

    def turn(self) -> Iterator[tuple[Client, tuple[bytes, ...]]]:
        """Accept, write and read some; give the messages that came. Clients take turns, whatever one of them sends."""
        for handle, _ in self._epoll.poll(0, _EVENTS):
            client = self._clients.get(handle)
            if client is None:
                self._accept()
                continue
            try:
                for message in client.read():
                    yield client, message
            except (OSError, ClientError) as error:
                self.drop(client, error)
            self.flush(client)
        now = time.monotonic()
        for client in self.clients:
            if not client.stream.is_ready and now - client.since > _HANDSHAKE_S:
                self.drop(client, ClientError("no handshake"))

    def send(self, client: Client, message: Buffers) -> bool:
        """Send a message, or have it wait; False, and nothing is done, if as many wait as may, or it is gone."""
        if not client.is_open or not client.has_room:
            return False
        client.put(message)
        self.flush(client)
        return True

    def flush(self, client: Client) -> None:
        """Write what waits for a client, and be told when more can be written."""
        if not client.is_open:
            return
        try:
            client.write()
        except OSError as error:
            self.drop(client, error)
            return
        if client.has_output is not client.is_awaited:
            client.is_awaited = client.has_output
            self._epoll.modify(client.connection, select.EPOLLIN | (select.EPOLLOUT if client.is_awaited else 0))

    def drop(self, client: Client, error: OSError | ClientError | None = None) -> None:
        """End a connection; a client at fault is told of in the log."""
        if isinstance(error, ClientError):
            self._complain(str(error))
        if client.is_open:
            client.is_open = False
            del self._clients[client.connection.fileno()]
            self._epoll.unregister(client.connection)
            end_connection(client.connection)

    def close(self, linger_s: float) -> None:
        """Take no more clients, and end all: what waits for them has some time to leave."""
        until = time.monotonic() + linger_s
        self._epoll.unregister(self._listener.socket)
        self._listener.close()
        while (left_s := until - time.monotonic()) > 0 and any(client.has_output for client in self._clients.values()):
            self._epoll.poll(min(left_s, _LINGER_LOOK_S))
            for client in self.clients:
                self.flush(client)
        for client in self.clients:
            _end_writing(client.connection)
            self.drop(client)
        self._epoll.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, _ = self._listener.socket.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no more descriptors, or the client is gone already
                self._complain(str(error))
                return
            self._make_room()
            if len(self._clients) >= CLIENTS:
                end_connection(connection)
                self._complain(f"{CLIENTS} clients are connected, which is the most")
                continue
            self._welcome(connection)

    def _make_room(self) -> None:
        if len(self._clients) >= CLIENTS:
            stranger = next((client for client in self._clients.values() if not client.stream.is_ready), None)
            if stranger is not None:
                self.drop(stranger, ClientError("no handshake, and others came"))

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(0)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client = Client(connection, self._role, self._queue)
        client.answer()
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLOUT)
        self._clients[connection.fileno()] = client

    def _complain(self, error: str) -> None:
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # the first, the second, the fourth ...
            log.warning("events.client_refused", socket=self._what, count=self._refused, error=error)


def _end_writing(connection: socket.socket) -> None:
    """What was read last must not be cut off: to close with bytes unread would reset the connection."""
    try:
        connection.shutdown(socket.SHUT_WR)
        for _ in range(_DRAIN_READS):
            if not connection.recv(4096):
                return
    except OSError:
        return
