"""An event sink on ZeroMQ: the loop leaves events and goes on; a thread encodes, sends and replays them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

import anyio
import structlog

from kvcr_actors.core.inventory import InventoryEvent
from kvcr_actors.core.keys import KeyAdapter
from kvcr_actors.errors import ConfigError, DeadlineError, EventEndpointError
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import ContextSource
from kvcr_actors.events.intake import EventIntake
from kvcr_actors.events.sequence import SequenceCounter
from kvcr_actors.events.sockets import PublisherSockets
from kvcr_actors.events.stream import EventStream
from kvcr_actors.ports import RunningEventSink, Services

log = structlog.get_logger()

_TURN: Final = 64
"""Batches sent before replays have their turn."""
_NUMBERS: Final = _TURN + 1
"""Sequence numbers that a turn may need, a heartbeat included."""
_START_S: Final = 10.0
_JOIN_S: Final = 5.0
_RETRY_S: Final = 1.0


class ZmqEventSink(RunningEventSink):
    """Publishes to routers (see `EventsConfig`). `publish` costs an append and, if the thread sleeps, a wake-up.

    `contexts` knows the pages' tokens; a page that it does not know is not told. `keys` names pages as the engine's own
    events do, by default by their first 64 bits; ConfigError if the dialect's readers do not take that form.
    Events are lost to no one for good:
    what overflows is coalesced, then dropped oldest first, counted and repaired by a snapshot.
    """

    def __init__(self, config: EventsConfig, contexts: ContextSource, keys: KeyAdapter[Any] | None = None) -> None:
        self.config = config
        self._numbers = SequenceCounter(config.sequence_path)
        self._stream = EventStream(
            config.wire,
            contexts,
            self._numbers.take,
            rank=config.data_parallel_rank,
            limits=config.limits,
            keys=keys,
        )
        self._intake = EventIntake(self._stream.backlog)
        # A SimpleQueue, because a put keeps the GIL: a native wake-up could cost the loop milliseconds to get it back.
        self._doorbell: SimpleQueue[None] = SimpleQueue()
        self._awake = False
        self._thread: _PublisherThread | None = None
        self._failure: Exception | None = None
        self._failures = 0
        self._stopping = False
        self._given_up = False
        self._last_sent = 0.0
        self._warned = False

    @property
    def silent_s(self) -> float:
        """Seconds since the last batch; heartbeats keep it low. 0 where this rank does not publish."""
        return time.monotonic() - self._last_sent if self._thread is not None else 0.0

    async def open(self, services: Services) -> None:
        """Bind the sockets and start the thread; EventEndpointError or ConfigError says why it cannot."""
        if not self.config.is_active:
            return
        if self._stopping:
            raise EventEndpointError(f"events endpoint {self.config.endpoint}: its sink was closed; make another")
        if self.config.is_exposed:
            log.warning("events.exposed", endpoint=self.config.endpoint, carries="prompt tokens")
        self._last_sent = time.monotonic()
        thread = self._thread = _PublisherThread(self._work, services)
        with anyio.move_on_after(_START_S):
            await thread.started.wait()
        if self._failure is not None:
            await self.close(_START_S)
            raise self._failure
        if not thread.started.is_set():
            self._given_up = True
            raise EventEndpointError(f"events endpoint {self.config.endpoint} did not open within {_START_S:g} s")
        services.spawn(self._watch, "kv-events watch")

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        """Leave events for the thread, in order."""
        if self._thread is None:
            return
        self._intake.leave(events)
        if not self._awake:
            self._wake_up()

    async def close(self, deadline_s: float) -> None:
        """Send what was left, then end the thread; DeadlineError if it takes longer, and the rest is lost."""
        thread = self._thread
        if thread is None:
            return
        self._stopping = True
        self._wake_up()
        with anyio.move_on_after(deadline_s):
            await thread.ended.wait()
            thread.join()
            self._thread = None
            return
        self._given_up = True
        raise DeadlineError(
            f"events endpoint {self.config.endpoint}: {len(self._stream.backlog)} changes were not sent in "
            f"{deadline_s:g} s"
        )

    def describe(self) -> dict[str, Any]:
        """Counters for people; they outlast `close`."""
        endpoint = self.config.events.at(self.config.data_parallel_rank)
        if not self.config.is_active:
            return {"endpoint": endpoint, "active": False}
        return {
            "endpoint": endpoint,
            "active": self._thread is not None and self._failure is None,
            "dialect": self.config.dialect,
            "next": self._numbers.next,
            "silent_s": round(self.silent_s, 3),
            "failures": self._failures,
            **self._stream.describe(),
        }

    async def _watch(self) -> None:
        """Tell once of a silence, and once of its end."""
        while True:
            await anyio.sleep(self.config.heartbeat_s)
            silent = self.silent_s > self.config.silent_after_s
            if silent and not self._warned:
                log.warning("events.silent", endpoint=self.config.endpoint, seconds=round(self.silent_s, 1))
            elif self._warned and not silent:
                log.warning("events.heard_again", endpoint=self.config.endpoint)
            self._warned = silent

    def _wake_up(self) -> None:
        self._awake = True
        self._doorbell.put(None)

    def _wait(self, timeout_s: float) -> None:
        with suppress(Empty):
            self._doorbell.get(timeout=timeout_s)

    def _work(self, started: Callable[[], None]) -> None:
        """Publish to the end. What fails before the start is for `open` to raise; later, all begins anew."""
        has_started = False
        while True:
            try:
                with closing(PublisherSockets(self.config)) as sockets:
                    if not has_started:
                        self._reserve_first()
                        has_started = True
                        started()
                    self._run(sockets)
            except Exception as error:  # noqa: BLE001 - a context source is foreign code, and sockets may fail
                self._failures += 1
                log.error("events.publisher_failed", endpoint=self.config.endpoint, error=repr(error))
                if not has_started or self._stopping:
                    self._failure = error
                    return
                self._begin_anew()
            else:
                return

    def _begin_anew(self) -> None:
        """After a pause, in which rings of the bell say nothing new but the end."""
        with self._intake.lock:
            self._stream.begin_anew()
        until = time.monotonic() + _RETRY_S
        while not self._stopping and (left_s := until - time.monotonic()) > 0:
            self._wait(left_s)

    def _run(self, sockets: PublisherSockets) -> None:
        while not self._given_up:
            stopping = self._stopping
            self._wait(0)
            self._awake = False  # after the ring is taken, and before what it told of is: what is left then rings again
            has_numbers = self._reserve()
            has_more = has_numbers and self._send_some(sockets)
            if stopping and has_numbers and not has_more:
                return
            sockets.serve_readers(self._stream)
            if not has_numbers:
                self._wait(_RETRY_S)
            elif not has_more:
                idle_s = time.monotonic() - self._last_sent
                if idle_s >= self.config.heartbeat_s:
                    self._send(sockets, heartbeat=True)
                    idle_s = 0.0
                self._wait(min(self.config.heartbeat_s - idle_s, sockets.next_look_s))

    def _send_some(self, sockets: PublisherSockets) -> bool:
        """Send a turn's batches; whether more wait."""
        return all(self._send(sockets, heartbeat=False) for _ in range(_TURN))

    def _reserve_first(self) -> None:
        try:
            self._numbers.reserve(_NUMBERS)
        except OSError as error:
            raise ConfigError(
                f"sequence file {self.config.sequence_path} cannot be written ({error}); correct it, or name another"
            ) from error

    def _reserve(self) -> bool:
        """Have a turn's numbers; without the lock, since a file may take its time."""
        try:
            self._numbers.reserve(_NUMBERS)
        except OSError as error:
            # A number could be given out twice, so the stream waits for the file.
            log.error("events.sequence_file", path=str(self.config.sequence_path), error=str(error))
            return False
        return True

    def _send(self, sockets: PublisherSockets, *, heartbeat: bool) -> bool:
        """Send one batch, if there is one."""
        with self._intake.lock:
            self._intake.ingest()
            if heartbeat:
                message = self._stream.heartbeat(time.time())
            else:
                message = self._stream.next_message(time.monotonic(), time.time())
        if message is None:
            return False
        sockets.send(message)
        self._last_sent = time.monotonic()
        return True


class _PublisherThread:
    """A daemon thread that tells the loop when its work has started and when it has ended."""

    def __init__(self, work: Callable[[Callable[[], None]], None], services: Services) -> None:
        self.started = anyio.Event()
        self.ended = anyio.Event()
        self._work = work
        self._services = services
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the microseconds that are left after `ended`."""
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._work(lambda: self._services.post(self.started.set))
        finally:
            self._services.post(self.started.set)
            self._services.post(self.ended.set)
