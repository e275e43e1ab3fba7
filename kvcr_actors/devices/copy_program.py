"""From a plan to what is launched: parts that fit the staging ring, and the index buffer that the kernel reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from kvcr_actors.devices.host_transfers import HostPairs
from kvcr_actors.devices.layer_groups import PlaneRange
from kvcr_actors.devices.pairs import Indices
from kvcr_actors.errors import DeviceError
from kvcr_actors.types import CacheLayout

HEADER_FIELDS = 6
"""A pool's entry in a part's header: first program, pages, index offset, staging offset, first plane, planes."""
_PIECE_ALIGNMENT = 16


@attrs.frozen
class TileShape:
    """What one program of the kernel moves: `rows` rows of up to `columns` words of a plane, `word_bytes` each."""

    rows: int
    columns: int
    word_bytes: int

    def programs(self, pages: int, planes: int, plane_bytes: int) -> int:
        """Programs for `pages` pages of `planes` planes."""
        chunks = -(-plane_bytes // (self.columns * self.word_bytes))
        return -(-pages * planes * chunks // self.rows)


@attrs.frozen
class Piece:
    """One pool's share of a part: pairs `[start, end)` and the planes of `range`, at `offset` in the part's staging.

    Staging is page-first: a page's planes of the range one after the other, `row_bytes` in all.
    """

    pairs: HostPairs
    start: int
    end: int
    range: PlaneRange
    row_bytes: int
    offset: int

    @property
    def pages(self) -> int:
        """Pairs of the piece."""
        return self.end - self.start


@attrs.frozen
class Part:
    """What one kernel launch and one batch of host copies move.

    `direct` pieces are copied between host and planes without staging, and are in no header.
    """

    group: int
    pieces: tuple[Piece, ...]
    size: int
    """Staging bytes."""
    direct: tuple[Piece, ...] = ()


@attrs.frozen
class EncodedPart:
    """A part whose header and device pages stand in an index buffer, and whose staging begins at byte `base`."""

    part: Part
    base: int
    header: int
    """Where its header begins in the index buffer, in words."""
    pages_at: tuple[int, ...]
    """Where each piece's device pages begin, in words."""
    programs: int


def cut_parts(
    layout: CacheLayout,
    copies: Sequence[HostPairs],
    groups: Sequence[Sequence[PlaneRange]],
    limit: int,
    direct: Collection[int] = (),
) -> list[Part]:
    """Cut a plan into parts of at most `limit` staging bytes, group by group, pool by pool, page by page.

    Pools in `direct` take no staging and go with the last part of their group. DeviceError if one page is larger than
    the limit.
    """
    parts: list[Part] = []
    for group, ranges in enumerate(groups):
        pieces: list[Piece] = []
        unstaged: list[Piece] = []
        size = 0
        for copy in copies:
            planes, count = ranges[copy.pool], copy.count
            row_bytes = planes[1] * layout.pools[copy.pool].plane_bytes
            if copy.pool in direct and row_bytes:
                unstaged.append(Piece(copy, 0, count, planes, row_bytes, 0))
            if copy.pool in direct or row_bytes == 0:
                continue
            if row_bytes > limit:
                raise DeviceError(f"pool {layout.pools[copy.pool].name}: a page's {row_bytes} bytes exceed {limit}")
            start = 0
            while start < count:
                offset = _aligned(size)
                room = (limit - offset) // row_bytes
                if room <= 0:
                    parts.append(Part(group, tuple(pieces), size))
                    pieces, size = [], 0
                    continue
                end = min(count, start + room)
                pieces.append(Piece(copy, start, end, planes, row_bytes, offset))
                size = offset + (end - start) * row_bytes
                start = end
        if pieces or unstaged:
            parts.append(Part(group, tuple(pieces), size, tuple(unstaged)))
    return parts


def index_words(layout: CacheLayout, parts: Sequence[Part], copies: Sequence[HostPairs]) -> int:
    """Length of a plan's index buffer in int64 words."""
    return len(parts) * len(layout.pools) * HEADER_FIELDS + sum(copy.count for copy in copies)


def encode(
    layout: CacheLayout,
    parts: Sequence[Part],
    bases: Sequence[int],
    copies: Sequence[HostPairs],
    tile: TileShape,
    into: Indices,
) -> list[EncodedPart]:
    """Write every part's header and then the device pages of every pool.

    `bases` are where the parts begin in the staging ring. A pool that a part leaves out has an empty entry.
    """
    width = len(layout.pools) * HEADER_FIELDS
    at = len(parts) * width
    index_of: dict[int, int] = {}
    for copy in copies:
        index_of[copy.pool] = at
        into[at : at + copy.count] = copy.pairs.device_pages
        at += copy.count
    encoded: list[EncodedPart] = []
    for number, (part, base) in enumerate(zip(parts, bases, strict=True)):
        pieces = {piece.pairs.pool: piece for piece in part.pieces}
        header: list[int] = []
        programs = 0
        for pool, spec in enumerate(layout.pools):
            piece = pieces.get(pool)
            if piece is None:
                header += (programs, 0, 0, 0, 0, 1)
                continue
            plane, planes = piece.range
            header += (programs, piece.pages, index_of[pool] + piece.start, base + piece.offset, plane, planes)
            programs += tile.programs(piece.pages, planes, spec.plane_bytes)
        into[number * width : (number + 1) * width] = header
        pages_at = tuple(index_of[piece.pairs.pool] + piece.start for piece in part.pieces)
        encoded.append(EncodedPart(part, base, number * width, pages_at, programs))
    return encoded


def _aligned(size: int) -> int:
    return -(-size // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT
