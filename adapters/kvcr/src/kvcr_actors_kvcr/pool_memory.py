"""The runner's own memory: private anonymous mappings, never unmapped while native code may still use them."""

from __future__ import annotations

import ctypes
import errno
import mmap

from kvcr_actors import StoreError

_MOVE = ctypes.memmove


def address_of(buffer: memoryview | mmap.mmap) -> int:
    """Where a writable buffer begins; the caller keeps the buffer alive."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class PoolMemory:
    """`size` bytes off (or on) transparent huge pages; page-aligned, zero at first, not seen by forked children."""

    def __init__(self, size: int, *, huge_pages: bool) -> None:
        try:
            # The default mapping is shared memory, which the advice below does not reach.
            self._mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StoreError(f"store kvcr: no memory for a pool of {size} bytes: {error}; give fewer blocks") from error
        self._mapping.madvise(mmap.MADV_DONTFORK)
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        except OSError as error:
            # EINVAL: a kernel without transparent huge pages, where "off" is given already.
            if error.errno != errno.EINVAL or huge_pages:
                raise StoreError(f"store kvcr: huge_pages={huge_pages}: refused by the kernel: {error}") from error
        self.size = size
        self.address = address_of(self._mapping)

    @property
    def is_mapped(self) -> bool:
        """Whether it was not closed."""
        return not self._mapping.closed

    def close(self) -> None:
        """Unmap; the caller knows that nothing native uses it."""
        self._mapping.close()


def copy_bytes(destination: int, source: int, size: int) -> None:
    """Copy between addresses without the GIL, so that the runner's progress thread keeps running."""
    _MOVE(destination, source, size)
