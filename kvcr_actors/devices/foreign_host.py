"""Host pools over memory that an engine mapped, and registered, itself: page-first, layer-first or in between.

Nothing here is allocated, registered or freed. A pool is a list of runs: tensors whose first dimension is the slot,
each with one or more of a page's planes. One run with all planes is page-first memory, one run a plane is layer-first.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from kvcr_actors.devices.host_memory import POISON_BYTE
from kvcr_actors.devices.host_transfers import HostRun
from kvcr_actors.devices.pairs import Indices
from kvcr_actors.errors import ConfigError
from kvcr_actors.types import CacheLayout, PoolSpec


@attrs.frozen(eq=False)
class _Pool:
    slots: int
    views: tuple[torch.Tensor, ...]
    runs: tuple[HostRun, ...]
    flat: memoryview | None
    """Its bytes, if it is page-first without gaps."""


class ForeignHostPools:
    """The `HostMemory` of an engine: `runs[pool]` are CPU tensors [slots of the pool, ...], its planes in order.

    A slot's bytes in a run must be contiguous and whole planes. Each pool has as many slots as its tensors. `borders`
    are the addresses at which the engine's registrations with the driver begin and end: no single copy crosses one, as
    the driver demands. `registered` says that a GPU's driver knows the memory. The tensors must outlive every copy.
    ConfigError names a misfit.
    """

    def __init__(
        self,
        layout: CacheLayout,
        runs: Sequence[Sequence[torch.Tensor]],
        *,
        borders: Sequence[int] = (),
        registered: bool = False,
    ) -> None:
        if len(runs) != len(layout.pools):
            raise ConfigError(f"runs: {len(runs)} lists for {len(layout.pools)} pools")
        self.layout = layout
        self.is_registered = registered
        sorted_borders = np.array(sorted(borders), np.int64) if borders else None
        self._pools = [_pool(spec, given, sorted_borders) for spec, given in zip(layout.pools, runs, strict=True)]

    @property
    def slots(self) -> int:
        """Slots that every pool has."""
        return min(pool.slots for pool in self._pools)

    def slots_of(self, pool: int) -> int:
        """Slots of one pool."""
        return self._pools[pool].slots

    def views(self, pool: int) -> Sequence[torch.Tensor]:
        """The pool's runs, as uint8 [slots, planes, plane_bytes]."""
        return self._pools[pool].views

    def runs(self, pool: int) -> Sequence[HostRun]:
        """The pool's runs as addresses."""
        return self._pools[pool].runs

    def buffer(self, pool: int) -> memoryview:
        """The pool's bytes, flat; ConfigError for memory that is not page-first, which no store can use."""
        flat = self._pools[pool].flat
        if flat is None:
            name = self.layout.pools[pool].name
            raise ConfigError(f"host pool {name}: its pages are not contiguous; a store needs page-first memory")
        return flat

    def poison(self, pool: int, slots: Sequence[int]) -> None:
        """Overwrite slots with `POISON_BYTE`."""
        index = torch.tensor(slots, dtype=torch.int64)
        for view in self._pools[pool].views:
            view.index_fill_(0, index, POISON_BYTE)


def _pool(spec: PoolSpec, given: Sequence[torch.Tensor], borders: Indices | None) -> _Pool:
    counts = {tensor.shape[0] for tensor in given}
    if len(counts) != 1:
        raise ConfigError(f"host pool {spec.name}: its runs have {sorted(counts)} slots; give each the same number")
    views: list[torch.Tensor] = []
    runs: list[HostRun] = []
    first = 0
    for tensor in given:
        view = _view(spec, tensor)
        runs.append(HostRun(first, view.shape[1], view.data_ptr(), view.stride(0), borders=borders))
        views.append(view)
        first += view.shape[1]
    if first != spec.planes:
        raise ConfigError(f"host pool {spec.name}: its runs hold {first} planes, its layout has {spec.planes}")
    flat = None
    if len(views) == 1 and views[0].is_contiguous():
        flat = views[0].view(-1).numpy().data
    return _Pool(counts.pop(), tuple(views), tuple(runs), flat)


def _view(spec: PoolSpec, tensor: torch.Tensor) -> torch.Tensor:
    """View one run as uint8 [slots, planes, plane_bytes]."""
    if tensor.device.type != "cpu":
        raise ConfigError(f"host pool {spec.name}: a run is on {tensor.device}; host memory is on the CPU")
    slots = tensor.shape[0]
    size = tensor[0].numel() * tensor.element_size() if slots else 0
    if size == 0 or size % spec.plane_bytes or not tensor[0].is_contiguous():
        raise ConfigError(
            f"host pool {spec.name}: a run of {list(tensor.shape)} has no contiguous slots of whole planes "
            f"({spec.plane_bytes} bytes each)"
        )
    flat = tensor.view(slots, -1) if tensor.dim() > 1 else tensor.unsqueeze(1)
    return flat.view(torch.uint8).view(slots, size // spec.plane_bytes, spec.plane_bytes)
