"""A copy runtime without a GPU: streams are queues, run late and in any order that their events allow."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kvcr_actors.errors import DeviceError


class Event:
    def __init__(self) -> None:
        self.is_over = False


class Stream:
    def __init__(self, haste: int) -> None:
        self.commands: deque[Callable[[], None] | Event] = deque()
        self.haste = haste


class _Wait(Event):
    """A stream's wait for another event."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event


class ScheduledRuntime:
    """Runs commands only when somebody waits, each time one of the streams that may go on, drawn from `seed`.

    A missing wait between two streams shows as wrong bytes under some seed. Copies that touch an address in
    `refused` are refused, as a driver does with memory that it does not know.
    """

    def __init__(self, seed: int) -> None:
        self.device = torch.device("cpu")
        self._rng = random.Random(seed)
        self.engine = Stream(self._haste())
        self.calls: Counter[str] = Counter()
        self.refused: list[tuple[int, int]] = []
        self.registered: dict[int, int] = {}
        self.lost = False
        self._streams = [self.engine]
        self._changed = threading.Condition()

    def selected(self) -> AbstractContextManager[object]:
        return nullcontext()

    def bind_thread(self) -> None:
        self.calls["bind_thread"] += 1

    def stream(self) -> Stream:
        with self._changed:
            self._streams.append(Stream(self._haste()))
            return self._streams[-1]

    def current_stream(self) -> Stream:
        return self.engine

    def as_event(self, fence: object) -> Event:
        if isinstance(fence, Event):
            return fence
        if isinstance(fence, Stream):
            return self.record(fence)
        raise DeviceError(f"not {fence!r}")

    def record(self, stream: Stream, *, blocking: bool = False) -> Event:
        event = Event()
        self._add(stream, event)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._add(stream, _Wait(event))

    def synchronize(self, event: Event) -> None:
        with self._changed:
            while not event.is_over:
                if self.lost:
                    raise DeviceError("lost")
                if not self._step() and not self._changed.wait(10):
                    raise DeviceError("deadlock: no stream can go on")

    def drain(self, stream: Stream) -> None:
        with self._changed:
            while stream.commands:
                if self.lost:
                    raise DeviceError("lost")
                if not self._step() and not self._changed.wait(10):
                    raise DeviceError("deadlock: no stream can go on")

    def launch(self, stream: Stream, call: Callable[[], None]) -> None:
        self.calls["launch"] += 1
        self._add(stream, call)

    def upload(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self.calls["upload"] += 1
        self._add(stream, lambda: target.copy_(source))

    def copy(self, stream: Stream, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        self.calls["copy"] += 1
        moves = list(zip(targets, sources, sizes, strict=True))
        for target, source, size in moves:
            self._check(target, size)
            self._check(source, size)
        self._rng.shuffle(moves)
        for move in moves:
            self._add(stream, lambda move=move: _move(*move))

    def copy_pitched(
        self, stream: Stream, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        self.calls["copy_pitched"] += 1
        self._check(target, target_pitch * (rows - 1) + width)
        self._check(source, source_pitch * (rows - 1) + width)
        for row in range(rows):
            move = (target + row * target_pitch, source + row * source_pitch, width)
            self._add(stream, lambda move=move: _move(*move))

    def register(self, address: int, size: int) -> None:
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def engine_runs(self, call: Callable[[], None]) -> None:
        """Queue a kernel of the engine's."""
        self._add(self.engine, call)

    def gate(self) -> tuple[Event, Callable[[], None]]:
        """An event that the test sets, by a call from any thread."""
        event = Event()

        def set_event() -> None:
            with self._changed:
                event.is_over = True
                self._changed.notify_all()

        return event, set_event

    def finish(self) -> None:
        """Run everything that is queued."""
        with self._changed:
            while self._step():
                pass

    def _add(self, stream: Stream, command: Callable[[], None] | Event) -> None:
        with self._changed:
            stream.commands.append(command)
            self._changed.notify_all()

    def _haste(self) -> int:
        """Some streams are slow: a chain of many commands may then overtake a single one."""
        return self._rng.choice([1, 40])

    def _step(self) -> bool:
        ready = [stream for stream in self._streams if stream.commands and _may_run(stream.commands[0])]
        if not ready:
            return False
        command = self._rng.choices(ready, [stream.haste for stream in ready])[0].commands.popleft()
        if isinstance(command, Event):
            command.is_over = True
        else:
            command()
        return True

    def _check(self, address: int, size: int) -> None:
        # Like CUDA, it refuses a copy across two registrations.
        for start, length in self.registered.items():
            if start <= address < start + length < address + size:
                raise DeviceError("copy: cudaErrorInvalidValue")
        for start, end in self.refused:
            if address < end and start < address + size:
                raise DeviceError("copy: cudaErrorInvalidValue")


def _may_run(command: Callable[[], None] | Event) -> bool:
    return command.event.is_over if isinstance(command, _Wait) else True


def _move(target: int, source: int, size: int) -> None:
    ctypes.memmove(target, source, size)
