"""What an engine orders of a mover, and what it hears."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import attrs
import numpy as np

from kvcr_actors.core.copy_plan import Direction
from kvcr_actors.errors import InvalidNodeError

OrderId: TypeAlias = Hashable

PageLists: TypeAlias = Sequence[Any]
"""For each pool a list of page ids or slots: a sequence of ints, a numpy array, or a torch tensor, also on a GPU."""

_LARGEST = (1 << 63) - 1


@attrs.frozen
class MoveOrder:
    """One copy: for each pool of the layout, `pages[pool][i]` on the device and `slots[pool][i]` in host memory.

    `NO_SLOT` on either side is no pair. Lists on the CPU are copied here, so that what the engine does to them
    afterwards changes nothing. A tensor on a GPU is read when the fences of its flush allow it, and must stay as it is
    until the ack. The pages of an order belong to it from the flush to the ack. InvalidNodeError for a malformed one.
    """

    order_id: OrderId
    direction: Direction
    pages: PageLists
    slots: PageLists

    def __attrs_post_init__(self) -> None:
        what = f"order {self.order_id!r}"
        try:
            hash(self.order_id)
        except TypeError:
            raise InvalidNodeError(f"{what}: its id must be hashable") from None
        if not isinstance(self.direction, Direction):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidNodeError(f"{what}: direction {self.direction!r}; give Direction.TO_HOST or TO_DEVICE")
        if len(self.pages) != len(self.slots):
            raise InvalidNodeError(f"{what}: {len(self.pages)} page lists and {len(self.slots)} slot lists")
        pages = tuple(_own(f"{what}: pages of pool {pool}", one) for pool, one in enumerate(self.pages))
        slots = tuple(_own(f"{what}: slots of pool {pool}", one) for pool, one in enumerate(self.slots))
        for pool, (one, other) in enumerate(zip(pages, slots, strict=True)):
            if len(one) != len(other):
                raise InvalidNodeError(f"{what}: pool {pool} lists {len(one)} pages and {len(other)} slots")
        object.__setattr__(self, "pages", pages)
        object.__setattr__(self, "slots", slots)


@attrs.frozen
class MoveFailure:
    """An order whose bytes did not all come: for each pool that failed, by its name, the reason."""

    order_id: OrderId
    pools: Mapping[str, str]


@attrs.frozen
class MoveAck:
    """All of one step's copies in one direction are over, and their memory is quiet: pages and slots may be reused.

    Every order of them is in `done` or in `failed`. `bytes` came; `slices` is what the staging ring made of the submit.
    """

    step: int
    direction: Direction
    done: tuple[OrderId, ...]
    failed: tuple[MoveFailure, ...] = ()
    bytes: int = 0
    slices: int = 1


@attrs.frozen
class MoverFailed:
    """The last word: nothing more is moved. `running` are the steps whose memory was not quiet by then."""

    error: str
    running: tuple[int, ...] = ()


Moved: TypeAlias = MoveAck | MoverFailed


def _own(what: str, ids: Any) -> Any:
    """Take a list of ids over as values: a numpy array of int64, a tuple of ints, or a tensor on a device as it is."""
    if isinstance(ids, np.ndarray):
        return _column(what, cast("np.ndarray[Any, Any]", ids))
    if isinstance(ids, range):
        return np.arange(ids.start, ids.stop, ids.step, dtype=np.int64)
    if isinstance(ids, Sequence):
        values = tuple(cast("Sequence[Any]", ids))
        if set(map(type, values)) - {int}:
            wrong = next(value for value in values if type(value) is not int)
            raise InvalidNodeError(f"{what}: {wrong!r} is not an int")
        if values and not -_LARGEST <= min(values) <= max(values) <= _LARGEST:
            raise InvalidNodeError(f"{what}: {max(values, key=abs)} does not fit 64 bits")
        return values
    return _tensor(what, ids)


def _tensor(what: str, ids: Any) -> Any:
    import torch  # whoever has a tensor has loaded it already; nobody else gets this far with a right order

    if not isinstance(ids, torch.Tensor):
        raise InvalidNodeError(f"{what}: {type(ids).__name__}; give ints, a numpy array or a tensor")
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise InvalidNodeError(f"{what}: a tensor of {list(ids.shape)} {ids.dtype}; give integers in one dimension")
    return ids if ids.device.type != "cpu" else _column(what, cast("np.ndarray[Any, Any]", ids.numpy()))


def _column(what: str, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidNodeError(f"{what}: an array of {list(ids.shape)} {ids.dtype}; give integers in one dimension")
    if ids.dtype == np.uint64 and len(ids) and int(ids.max()) > _LARGEST:
        raise InvalidNodeError(f"{what}: {ids.max()} does not fit 64 bits")
    return ids.astype(np.int64)  # a copy in each case
