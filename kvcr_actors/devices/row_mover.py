"""Moves the rows of a part between the engine's planes and staging: one Triton launch, or torch operations."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from kvcr_actors.devices.copy_program import EncodedPart, TileShape
from kvcr_actors.errors import ConfigError
from kvcr_actors.types import CacheLayout

_TILE_BYTES = 16 << 10
"""What one program moves: 128 bytes a thread, enough loads in flight to fill the memory's latency."""
_LEAST_COLUMNS = 32


class RowMover(Protocol):
    """Moves rows on the current stream."""

    tile: TileShape

    def move(self, part: EncodedPart, plan: torch.Tensor, staging: torch.Tensor, *, to_staging: bool) -> None:
        """Gather a part into `staging` (uint8), or scatter it from there; `plan` is its index buffer (int64).

        Both are on the device of the planes.
        """
        ...


class PlaneTable:
    """The engine's page pools: `planes[pool][plane]` is a tensor whose first dimension is the page.

    A plane's page is contiguous and `plane_bytes` long, whatever its type; all planes of a pool have the same number
    of pages and the same distance from page to page. The tensors must outlive every copy. ConfigError names a misfit.
    """

    def __init__(self, layout: CacheLayout, planes: Sequence[Sequence[torch.Tensor]]) -> None:
        if len(planes) != len(layout.pools):
            raise ConfigError(f"planes: {len(planes)} lists for {len(layout.pools)} pools")
        self.layout = layout
        self.planes = [list(of_pool) for of_pool in planes]
        self.pages: list[int] = []
        self.strides: list[int] = []
        for spec, of_pool in zip(layout.pools, self.planes, strict=True):
            if len(of_pool) != spec.planes:
                raise ConfigError(f"pool {spec.name}: {len(of_pool)} planes given, its layout has {spec.planes}")
            for plane in of_pool:
                if plane.device != self.device:
                    raise ConfigError(f"pool {spec.name}: a plane is on {plane.device}, the first on {self.device}")
            shapes = {_plane_shape(spec.name, spec.plane_bytes, plane) for plane in of_pool}
            if len(shapes) != 1:
                raise ConfigError(f"pool {spec.name}: its planes differ in pages or strides: {sorted(shapes)}")
            pages, stride = shapes.pop()
            self.pages.append(pages)
            self.strides.append(stride)
        self.addresses = [np.array([plane.data_ptr() for plane in of_pool], np.int64) for of_pool in self.planes]

    @property
    def device(self) -> torch.device:
        """Where the planes are."""
        return self.planes[0][0].device

    def rows(self) -> list[list[torch.Tensor]]:
        """Every plane as uint8 [pages, plane_bytes], pool by pool."""
        return [
            [_as_rows(plane, spec.plane_bytes) for plane in of_pool]
            for spec, of_pool in zip(self.layout.pools, self.planes, strict=True)
        ]

    def alignment(self) -> int:
        """The largest power of two up to 16 that divides every plane's address, size and stride."""
        addresses = [address for of_pool in self.addresses for address in of_pool.tolist()]
        sizes = [spec.plane_bytes for spec in self.layout.pools]
        return math.gcd(16, *addresses, *sizes, *self.strides)

    def encode(self, word_bytes: int) -> torch.Tensor:
        """The kernel's table, int64 on the device."""
        table: list[int] = []
        first = len(self.planes) * 3
        for spec, of_pool, stride in zip(self.layout.pools, self.planes, self.strides, strict=True):
            table += (first, spec.plane_bytes // word_bytes, stride)
            first += len(of_pool)
        table += [address for of_pool in self.addresses for address in of_pool.tolist()]
        return torch.tensor(table, dtype=torch.int64, device=self.device)


class TritonMover:
    """One launch a part."""

    def __init__(self, table: PlaneTable) -> None:
        # Imported here, since Triton is not there without a GPU build of torch.
        from kvcr_actors.devices import gather_kernels

        alignment = table.alignment()
        word_bytes = 4 if alignment % 4 == 0 else 1
        sizes = [spec.plane_bytes // word_bytes for spec in table.layout.pools]
        tile_words = _TILE_BYTES // word_bytes
        columns = min(tile_words, max(_LEAST_COLUMNS, 1 << (min(sizes) - 1).bit_length()))
        self.tile = TileShape(tile_words // columns, columns, word_bytes)
        self._table = table.encode(word_bytes)
        even = all(size % columns == 0 for size in sizes)
        word = gather_kernels.WORDS[word_bytes]
        self._kernel = gather_kernels.RowKernel(len(sizes), self.tile.rows, columns, word, alignment, even)

    def move(self, part: EncodedPart, plan: torch.Tensor, staging: torch.Tensor, *, to_staging: bool) -> None:
        """Launch the kernel."""
        header = plan[part.header :]
        self._kernel.launch(self._table, header, plan, staging, part.programs, to_staging=to_staging)


class TorchMover:
    """One torch operation a plane; for machines without Triton. It moves bytes, whatever the pools' types."""

    def __init__(self, table: PlaneTable) -> None:
        self.tile = TileShape(1, _TILE_BYTES, 1)
        self._table = table
        self._rows = table.rows()

    def move(self, part: EncodedPart, plan: torch.Tensor, staging: torch.Tensor, *, to_staging: bool) -> None:
        """Move plane by plane."""
        for piece, at in zip(part.part.pieces, part.pages_at, strict=True):
            pages = plan[at : at + piece.pages]
            first, planes = piece.range
            begin = part.base + piece.offset
            staged = staging[begin : begin + piece.pages * piece.row_bytes].view(piece.pages, planes, -1)
            for number, rows in enumerate(self._rows[piece.pairs.pool][first : first + planes]):
                if to_staging:
                    staged[:, number].copy_(torch.index_select(rows, 0, pages))
                else:
                    rows.index_copy_(0, pages, staged[:, number])


def make_mover(table: PlaneTable) -> RowMover:
    """The Triton kernel where Triton is installed, else torch operations."""
    return TritonMover(table) if importlib.util.find_spec("triton") else TorchMover(table)


def _plane_shape(name: str, plane_bytes: int, plane: torch.Tensor) -> tuple[int, int]:
    pages = plane.shape[0]
    size = plane[0].numel() * plane.element_size() if pages else plane_bytes
    if pages == 0 or size != plane_bytes or not plane[0].is_contiguous():
        raise ConfigError(f"pool {name}: a plane of {list(plane.shape)} has no contiguous pages of {plane_bytes} bytes")
    return pages, plane.stride(0) * plane.element_size()


def _as_rows(plane: torch.Tensor, plane_bytes: int) -> torch.Tensor:
    """View a plane as uint8 [pages, plane_bytes]."""
    flat = plane.view(plane.shape[0], -1) if plane.dim() > 1 else plane.unsqueeze(1)
    return flat.view(torch.uint8).view(plane.shape[0], plane_bytes)
