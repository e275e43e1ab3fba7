"""The file of one page: a header that names it, then the bytes of its components, in the order of the pools.

Header, little-endian: magic, version, flags, pools; name (storage key), page key, parent; a length for each pool (0
for none); last the CRC-32 of everything else in the file. CRC-32 finds every flip of up to 32 neighbouring bits and
takes a fifth of the time of BLAKE2b; the folder is private, so there is no forger to keep out.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence

import attrs

from kvcr_actors.types import KEY_BYTES, PageKey

VERSION = 1
MAX_POOLS = 63
"""What a signed 64-bit pool mask can tell."""

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
    fixed = os.pread(fd, _FIXED.size, 0)
    if len(fixed) != _FIXED.size:
        return None
    pools = _FIXED.unpack(fixed)[3]
    if pools > MAX_POOLS:
        return None
    raw = os.pread(fd, header_bytes(pools), 0)
    header = _decode(raw) if len(raw) == header_bytes(pools) else None
    if header is None or os.fstat(fd).st_size != header.file_bytes:
        return None
    body = memoryview(os.pread(fd, header.file_bytes - len(raw), len(raw)))
    return header if is_sound(raw, header, [body]) else None


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
