"""Pinned host pools: one anonymous mapping a pool, seen as tensors and as bytes without a copy."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import platform
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from kvcr_actors.devices.host_limits import explain_shortage, memory_limits
from kvcr_actors.devices.host_transfers import HostRun
from kvcr_actors.errors import ConfigError, DeviceError, NoHostMemoryError
from kvcr_actors.host_buffers import POISON_BYTE
from kvcr_actors.ports import HostMemory
from kvcr_actors.runtime.memory_lease import check_free
from kvcr_actors.types import CacheLayout

_TOUCH_CHUNK = 256 << 20
_MPOL_BIND = 2
_MBIND_CALL = {"x86_64": 237, "aarch64": 235}


class Registrar(Protocol):
    """Makes host memory known to a copy engine (for CUDA: page-locks and maps it)."""

    def register(self, address: int, size: int) -> None:
        """Register a range; DeviceError if the driver refuses it."""
        ...

    def unregister(self, address: int) -> None:
        """Undo the registration that began at `address`."""
        ...


class CopyMemory(HostMemory, Protocol):
    """Host memory that a device copies to and from: where the planes of each slot lie, as tensors and as addresses."""

    @property
    def is_registered(self) -> bool:
        """Whether a copy engine knows the memory."""
        ...

    def slots_of(self, pool: int) -> int:
        """Slots of one pool."""
        ...

    def views(self, pool: int) -> Sequence[torch.Tensor]:
        """The pool's runs, as uint8 [slots, planes, plane_bytes], which together hold its planes in their order."""
        ...

    def runs(self, pool: int) -> Sequence[HostRun]:
        """The same runs as addresses."""
        ...


class HostPools:
    """The host tier's memory: for each pool of the layout, `slots` slots of one page, page-first.

    Memory is taken, bound to `numa_node`, touched by `touch_threads` threads and registered chunk by chunk (at most
    `register_chunk_bytes` rounded to whole slots) when the object is made; if a step fails, what was done is undone.
    NoHostMemoryError names the limit that is too small. Transparent huge pages are off unless `huge_pages`.
    `free_bytes` replaces what the host and the container say is free. A child made by fork does not see the memory.
    """

    def __init__(
        self,
        layout: CacheLayout,
        slots: int,
        *,
        huge_pages: bool = False,
        numa_node: int | None = None,
        touch_threads: int | None = None,
        registrar: Registrar | None = None,
        register_chunk_bytes: int = 16 << 30,
        free_bytes: int | None = None,
    ) -> None:
        if slots < 0:
            raise ConfigError(f"slots: {slots}; give 1 or more, or 0 for a controller without a host tier")
        if register_chunk_bytes < mmap.PAGESIZE:
            raise ConfigError(f"register_chunk_bytes: {register_chunk_bytes} is less than a memory page")
        if touch_threads is not None and touch_threads < 1:
            raise ConfigError(f"touch_threads: {touch_threads}; give 1 or more, or None for one a core, 8 at most")
        self.layout = layout
        self.slots = slots
        _check_room(slots * layout.page_bytes, free_bytes)
        mappings = [_map(max(1, slots) * pool.page_bytes, huge_pages=huge_pages) for pool in layout.pools]
        self._tensors = [
            torch.frombuffer(mapping, dtype=torch.uint8)[: slots * pool.page_bytes].view(slots, pool.page_bytes)
            for mapping, pool in zip(mappings, layout.pools, strict=True)
        ]
        self._buffers = [
            memoryview(mapping)[: slots * pool.page_bytes] for mapping, pool in zip(mappings, layout.pools, strict=True)
        ]
        if numa_node is not None:
            for tensor, mapping in zip(self._tensors, mappings, strict=True):
                _bind(tensor.data_ptr(), len(mapping), numa_node)
        _touch(self._tensors, min(8, len(os.sched_getaffinity(0))) if touch_threads is None else touch_threads)
        self._chunk_slots = [_chunk_slots(register_chunk_bytes, pool.page_bytes) for pool in layout.pools]
        self._registered: list[int] = []
        if registrar is not None:
            # Memory that is freed while registered would make the driver refuse the next mapping at its address.
            self._unregister = weakref.finalize(self, _unregister_all, registrar, self._registered)
            self._unregister.atexit = False
            self._register(registrar)

    def tensor(self, pool: int) -> torch.Tensor:
        """The pool as uint8 [slots, page_bytes]; writes are seen by `buffer` and by the copy engine."""
        return self._tensors[pool]

    def buffer(self, pool: int) -> memoryview:
        """The pool's bytes, flat and writable."""
        return self._buffers[pool]

    def slots_of(self, pool: int) -> int:
        """Slots of one pool: as many as of each other."""
        del pool
        return self.slots

    def views(self, pool: int) -> Sequence[torch.Tensor]:
        """The pool as one run, uint8 [slots, planes, plane_bytes]."""
        spec = self.layout.pools[pool]
        return (self._tensors[pool].view(self.slots, spec.planes, spec.plane_bytes),)

    def runs(self, pool: int) -> Sequence[HostRun]:
        """The pool as one run of whole pages."""
        spec = self.layout.pools[pool]
        return (HostRun(0, spec.planes, self.address(pool), spec.page_bytes, self._chunk_slots[pool]),)

    def address(self, pool: int) -> int:
        """Where the pool's slot 0 begins."""
        return self._tensors[pool].data_ptr()

    def chunk_slots(self, pool: int) -> int:
        """Slots a registered chunk holds: one copy must not cross a multiple of it."""
        return self._chunk_slots[pool]

    @property
    def is_registered(self) -> bool:
        """Whether a copy engine knows the memory; of no slots it need not."""
        return bool(self._registered) or self.slots == 0

    def poison(self, pool: int, slots: Sequence[int]) -> None:
        """Overwrite slots with `POISON_BYTE`."""
        if slots:
            self._tensors[pool].index_fill_(0, torch.tensor(slots, dtype=torch.int64), POISON_BYTE)

    def close(self) -> None:
        """Unregister the memory. It is freed when the last tensor or view of it goes.

        ConfigError while a controller has it, or copies of one may still run: nothing is changed then.
        DeviceError after the last chunk, if the driver refused one: that stays registered until the process ends.
        """
        check_free(self, "close()")
        if self._registered:
            self._unregister()

    def _register(self, registrar: Registrar) -> None:
        for pool, spec in enumerate(self.layout.pools):
            base, end = self.address(pool), self.slots * spec.page_bytes
            chunk = self._chunk_slots[pool] * spec.page_bytes
            for start in range(0, end, chunk):
                size = min(chunk, end - start)
                try:
                    registrar.register(base + start, size)
                except DeviceError as error:
                    what = f"host pool {spec.name}: {size} bytes at {start} not registered: {error}"
                    try:
                        self.close()
                    except DeviceError as second:
                        what += f"; {second}"
                    raise DeviceError(what) from error
                self._registered.append(base + start)


def _unregister_all(registrar: Registrar, registered: list[int]) -> None:
    refused: DeviceError | None = None
    while registered:
        try:
            registrar.unregister(registered.pop())
        except DeviceError as error:
            refused = error
    if refused is not None:
        raise DeviceError(f"a chunk stays registered: {refused}") from refused


def _check_room(needed: int, free_bytes: int | None) -> None:
    shortage = explain_shortage(needed, memory_limits()) if free_bytes is None else None
    if free_bytes is not None and needed > free_bytes:
        shortage = f"{needed} bytes asked for, but free_bytes allows {free_bytes}; ask for fewer slots"
    if shortage is not None:
        raise NoHostMemoryError(f"host pools: {shortage}")


def _map(size: int, *, huge_pages: bool) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NoHostMemoryError(
            f"host pools: the kernel does not map {size} bytes: {error.strerror}; ask for fewer slots, "
            "or raise RLIMIT_AS (ulimit -v) or vm.overcommit_memory"
        ) from error
    # A fork would make the pages copy-on-write, and a running copy would then miss the parent's memory.
    mapping.madvise(mmap.MADV_DONTFORK)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
    except OSError as error:
        # EINVAL: a kernel without transparent huge pages, where "off" is given already.
        if error.errno != errno.EINVAL or huge_pages:
            raise ConfigError(f"huge_pages={huge_pages}: refused by the kernel: {error}") from error
    return mapping


def _bind(address: int, size: int, node: int) -> None:
    known = sorted(int(path.name[4:]) for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    if node not in known:
        raise ConfigError(f"numa_node: {node}; this host has {known}")
    call = _MBIND_CALL.get(platform.machine())
    if call is None:
        raise ConfigError(f"numa_node: binding is not supported on {platform.machine()}; leave it unset")
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_ulong(size),
        _MPOL_BIND,
        mask,
        ctypes.c_ulong(len(mask) * 64 + 1),
        0,
    )
    if libc.syscall(call, *arguments) != 0:
        raise ConfigError(
            f"numa_node: {node}: mbind failed: {os.strerror(ctypes.get_errno())}; leave it unset, or let the "
            "container use that node (cpuset) and mbind (CAP_SYS_NICE)"
        )


def _touch(tensors: Sequence[torch.Tensor], threads: int) -> None:
    """Write one byte of every memory page, so that the pages exist before the first copy."""
    step = _TOUCH_CHUNK // mmap.PAGESIZE
    calls: list[Callable[[], torch.Tensor]] = []
    for tensor in tensors:
        firsts = tensor.flatten()[:: mmap.PAGESIZE]
        calls += [firsts[start : start + step].zero_ for start in range(0, len(firsts), step)]
    if threads == 1 or len(calls) <= 1:
        for call in calls:
            call()
        return
    with ThreadPoolExecutor(threads, "kvcr-first-touch") as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def _chunk_slots(chunk_bytes: int, page_bytes: int) -> int:
    # A chunk must hold whole slots and whole memory pages: two registrations may share neither.
    unit = math.lcm(page_bytes, mmap.PAGESIZE)
    return max(1, chunk_bytes // unit) * unit // page_bytes
