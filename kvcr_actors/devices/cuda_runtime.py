"""The calls of CUDA that a device makes, behind one small interface; every refusal is a DeviceError with its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch

from kvcr_actors.errors import DeviceError

S = TypeVar("S")
E = TypeVar("E")


class CopyRuntime(Protocol[S, E]):
    """Streams `S`, events `E` and asynchronous copies between addresses. Calls return before their work is done."""

    device: torch.device

    def bind_thread(self) -> None:
        """Make this thread's calls go to the device."""
        ...

    def selected(self) -> AbstractContextManager[object]:
        """Have the calls of a block go to the device, on a thread that belongs to somebody else."""
        ...

    def stream(self) -> S:
        """Make a stream."""
        ...

    def current_stream(self) -> S:
        """The stream that the calling thread's engine code runs on."""
        ...

    def as_event(self, fence: object) -> E:
        """An engine's event as it is, or an event recorded now on its stream; DeviceError for anything else."""
        ...

    def record(self, stream: S, *, blocking: bool = False) -> E:
        """Record an event; `blocking` lets a thread sleep in `synchronize`."""
        ...

    def wait(self, stream: S, event: E) -> None:
        """Make later work of a stream wait on the device."""
        ...

    def synchronize(self, event: E) -> None:
        """Block this thread, without the GIL and without spinning, until a blocking event is over."""
        ...

    def drain(self, stream: S) -> None:
        """Block this thread until a stream has done all that it was given; for when no event can be had."""
        ...

    def launch(self, stream: S, call: Callable[[], None]) -> None:
        """Run `call` with the stream current: it launches kernels."""
        ...

    def upload(self, stream: S, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a pinned tensor to the device."""
        ...

    def copy(self, stream: S, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy ranges, in any order."""
        ...

    def copy_pitched(
        self, stream: S, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Copy `rows` rows of `width` bytes, each a pitch after the last."""
        ...


class CudaRuntime:
    """CUDA through torch's streams and events and cuda-bindings' copies; also registers host memory (`Registrar`).

    cuda-bindings comes with torch's CUDA wheels. From its version 13 on, a batch of copies is one call.
    """

    def __init__(self, device: torch.device | int = 0) -> None:
        self.device = torch.device("cuda", device) if isinstance(device, int) else device
        self._api = _bindings()
        self._success = self._api.cudaError_t.cudaSuccess
        self._kind = self._api.cudaMemcpyKind.cudaMemcpyDefault
        self._attributes = [self._stream_ordered()] if _has_batches() else []

    def bind_thread(self) -> None:
        """Make this thread's calls go to the device."""
        torch.cuda.set_device(self.device)

    def selected(self) -> AbstractContextManager[object]:
        """Have the calls of a block go to the device; the thread's own is put back behind it."""
        return torch.cuda.device(self.device)

    def stream(self) -> torch.cuda.Stream:
        """Make a stream of its own, of the lowest priority. Torch's streams are few and shared: one of the engine's
        could be the same. It is never destroyed: torch's allocator may hold freed memory under its handle.
        """
        with self.selected():
            error, handle = self._api.cudaStreamCreateWithFlags(self._api.cudaStreamNonBlocking)
        self._check("cudaStreamCreateWithFlags", (error,))
        return torch.cuda.ExternalStream(int(handle), device=self.device)

    def current_stream(self) -> torch.cuda.Stream:
        """The calling thread's current torch stream."""
        return torch.cuda.current_stream(self.device)

    def as_event(self, fence: object) -> torch.cuda.Event:
        """Take a torch event, or record one on a torch stream."""
        if isinstance(fence, torch.cuda.Event):
            return fence
        if isinstance(fence, torch.cuda.Stream):
            return self.record(fence)
        raise DeviceError(f"give a torch.cuda.Event, a torch.cuda.Stream or None, not {type(fence).__name__}")

    def record(self, stream: torch.cuda.Stream, *, blocking: bool = False) -> torch.cuda.Event:
        """Record an event; a blocking one sleeps in the driver."""
        event = torch.cuda.Event(blocking=blocking)
        event.record(stream)
        return event

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Make later work of a stream wait on the device."""
        stream.wait_event(event)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Sleep until a blocking event is over."""
        event.synchronize()

    def drain(self, stream: torch.cuda.Stream) -> None:
        """Block until the stream is idle."""
        stream.synchronize()

    def launch(self, stream: torch.cuda.Stream, call: Callable[[], None]) -> None:
        """Run `call` with the stream current; the thread may be the engine's, so its own stream is put back."""
        with torch.cuda.stream(stream):
            call()

    def upload(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a pinned tensor to the device."""
        size = source.numel() * source.element_size()
        self._check(
            "cudaMemcpyAsync",
            self._api.cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), size, self._kind, stream.cuda_stream),
        )

    def copy(
        self, stream: torch.cuda.Stream, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Copy ranges by one call where the driver has it."""
        handle, count = stream.cuda_stream, len(sizes)
        if self._attributes and count > 1:
            outcome = self._api.cudaMemcpyBatchAsync(targets, sources, sizes, count, self._attributes, [0], 1, handle)
            self._check("cudaMemcpyBatchAsync", outcome)
            return
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self._check("cudaMemcpyAsync", self._api.cudaMemcpyAsync(target, source, size, self._kind, handle))

    def copy_pitched(
        self,
        stream: torch.cuda.Stream,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
    ) -> None:
        """Copy rows by one call."""
        outcome = self._api.cudaMemcpy2DAsync(
            target, target_pitch, source, source_pitch, width, rows, self._kind, stream.cuda_stream
        )
        self._check("cudaMemcpy2DAsync", outcome)

    def register(self, address: int, size: int) -> None:
        """Page-lock host memory for every device of the process."""
        with self.selected():
            outcome = self._api.cudaHostRegister(address, size, self._api.cudaHostRegisterPortable)
            self._check("cudaHostRegister", outcome)

    def unregister(self, address: int) -> None:
        """Undo a registration; no copy may use the memory any more."""
        self._check("cudaHostUnregister", self._api.cudaHostUnregister(address))

    def _stream_ordered(self) -> Any:
        attributes = self._api.cudaMemcpyAttributes()
        attributes.srcAccessOrder = self._api.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        attributes.flags = self._api.cudaMemcpyFlags.cudaMemcpyFlagPreferOverlapWithCompute
        return attributes

    def _check(self, what: str, outcome: Sequence[Any]) -> None:
        error = outcome[0]
        if error != self._success:
            self._api.cudaGetLastError()  # else the engine's next launch would find this error and blame itself
            raise DeviceError(f"{what}: {error.name}")


def _bindings() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise DeviceError("cuda-bindings is not installed; it comes with torch's CUDA wheels") from error


def _has_batches() -> bool:
    version: str = importlib.import_module("cuda.bindings").__version__
    return int(version.split(".")[0]) >= 13
