"""The file of one page: a header that names it, then the bytes of its components, in the order of the pools.

Header, little-endian: magic, version, flags, pools; name (storage key), page key, parent; a length for each pool (0
for none); last the CRC-32 of everything else in the file. CRC-32 finds every flip of up to 32 neighbouring bits and
takes a fifth of the time of BLAKE2b; the folder is private, so there is no forger to keep out.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib
from collections.abc import Sequence

import attrs

from kvcr_actors.types import KEY_BYTES, PageKey

VERSION = 1
MAX_POOLS = 63
"""What a signed 64-bit pool mask can tell."""

MAX_BYTES = 1 << 30
"""The longest file that is taken for a page, whatever it says of itself."""
_CHUNK = 1 << 20

_MAGIC = b"kvcrpage"
_HAS_PARENT = 1
_NO_PARENT = bytes(KEY_BYTES)
_FIXED = struct.Struct(f"<8sHHI{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<I")


@attrs.frozen
class PageHeader:
    """What a page file says of itself; `lengths` has one entry a pool, 0 where nothing is held."""

    name: bytes
    key: PageKey
    parent: PageKey | None
    lengths: tuple[int, ...]

    @property
    def mask(self) -> int:
        """The bit set of the pools held."""
        return sum(1 << pool for pool, length in enumerate(self.lengths) if length)

    @property
    def file_bytes(self) -> int:
        """The length of the whole file."""
        return header_bytes(len(self.lengths)) + sum(self.lengths)


def header_bytes(pools: int) -> int:
    """The length of the header of a page over so many pools."""
    return _FIXED.size + 8 * pools + _CHECKSUM.size


def encode_header(header: PageHeader, bodies: Sequence[memoryview]) -> bytes:
    """The header's bytes, its checksum taken over them and the bodies."""
    flags = 0 if header.parent is None else _HAS_PARENT
    fixed = _FIXED.pack(
        _MAGIC, VERSION, flags, len(header.lengths), header.name, header.key, header.parent or _NO_PARENT
    )
    front = fixed + struct.pack(f"<{len(header.lengths)}Q", *header.lengths)
    return front + _CHECKSUM.pack(_checksum(front, bodies))


def is_sound(raw: bytes | bytearray, expected: PageHeader, bodies: Sequence[memoryview]) -> bool:
    """Whether a header as read, and the bodies, are those of the page expected, whole and unchanged.

    The parent is not compared: it is not part of what is served.
    """
    front, (checksum,) = memoryview(raw)[: -_CHECKSUM.size], _CHECKSUM.unpack(raw[-_CHECKSUM.size :])
    if _checksum(front, bodies) != checksum:
        return False
    found = _decode(raw)
    return found is not None and (found.name, found.key, found.lengths) == (
        expected.name,
        expected.key,
        expected.lengths,
    )


def read_whole(fd: int) -> PageHeader | None:
    """Read and check a file of which nothing is known; None if it is not a sound page. OSError if it is unreadable."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or not _FIXED.size <= status.st_size <= MAX_BYTES:
        return None
    pools = _FIXED.unpack(_exactly(fd, _FIXED.size, 0))[3]
    if pools > MAX_POOLS or header_bytes(pools) > status.st_size:
        return None
    raw = _exactly(fd, header_bytes(pools), 0)
    header = _decode(raw)
    if header is None or status.st_size != header.file_bytes:
        return None
    value = zlib.crc32(memoryview(raw)[: -_CHECKSUM.size])
    for at in range(len(raw), status.st_size, _CHUNK):
        value = zlib.crc32(_exactly(fd, min(_CHUNK, status.st_size - at), at), value)
    return header if (value,) == _CHECKSUM.unpack(raw[-_CHECKSUM.size :]) else None


def read_into(fd: int, buffers: Sequence[bytearray | memoryview]) -> bool:
    """Fill the buffers; False if the file is longer or shorter than they are together, OSError if it reads short."""
    length = sum(map(len, buffers))
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != length:
        return False
    read = os.readv(fd, buffers)
    if read < length:
        # A network file system may read less than there is: go on, and copy to where it belongs.
        rest = memoryview(_exactly(fd, length - read, read))
        start = 0
        for buffer in buffers:
            begin, end = max(start, read), start + len(buffer)
            if begin < end:
                buffer[begin - start :] = rest[begin - read : end - read]
            start = end
    return True


def _exactly(fd: int, length: int, at: int) -> bytes:
    """Read bytes that the file has; OSError (EAGAIN) if they do not come: that says nothing about the page."""
    found = bytearray()
    while len(found) < length:
        more = os.pread(fd, length - len(found), at + len(found))
        if not more:
            raise OSError(errno.EAGAIN, f"a short read: {len(found)} of {length} bytes came")
        found += more
    return bytes(found)


def _decode(raw: bytes | bytearray) -> PageHeader | None:
    magic, version, flags, pools, name, key, parent = _FIXED.unpack_from(raw)
    if magic != _MAGIC or version != VERSION or len(raw) != header_bytes(pools):
        return None
    lengths = struct.unpack_from(f"<{pools}Q", raw, _FIXED.size)
    return PageHeader(name, key, parent if flags & _HAS_PARENT else None, lengths)


def _checksum(front: bytes | memoryview, bodies: Sequence[memoryview]) -> int:
    value = zlib.crc32(front)
    for body in bodies:
        value = zlib.crc32(body, value)
    return value
