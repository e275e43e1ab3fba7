"""Which layers of a restore travel together, and the gate through which an engine waits for one of them."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import attrs

from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.types import CacheLayout

E = TypeVar("E")

GROUP_BYTES = 8 << 20
"""A group takes longer to copy than to launch (about 60 us, 3 MiB); this leaves a margin."""
MAX_GROUPS = 8
"""The first group of eight is ready after an eighth of the copy; more groups cost launches and gain little."""

PlaneRange = tuple[int, int]
"""The first plane and the number of planes."""


@attrs.frozen
class LayerGroups:
    """`planes[group][pool]` is the range of planes that the group moves; group `g` ends before layer `ends[g]`."""

    planes: tuple[tuple[PlaneRange, ...], ...]
    ends: tuple[int, ...]

    def group_of(self, layer: int) -> int:
        """The group after which every plane that `layer` reads is there."""
        return min(bisect_right(self.ends, layer), len(self.ends) - 1)


def check_layers(layout: CacheLayout, layers: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Return, for each pool and plane, the layer that reads it first; without an answer layer 0 reads everything.

    ConfigError unless each pool names one layer a plane, in order: a group's planes are neighbours in host memory.
    """
    if layers is None:
        return tuple((0,) * pool.planes for pool in layout.pools)
    if len(layers) != len(layout.pools):
        raise ConfigError(f"layers: {len(layers)} lists for {len(layout.pools)} pools")
    for pool, of_planes in zip(layout.pools, layers, strict=True):
        if len(of_planes) != pool.planes or list(of_planes) != sorted(of_planes) or min(of_planes) < 0:
            raise ConfigError(f"layers of pool {pool.name}: give {pool.planes} layers in ascending order")
    return tuple(tuple(of_planes) for of_planes in layers)


def choose_groups(
    layout: CacheLayout, layers: Sequence[Sequence[int]], pages: Mapping[int, int], *, most: int = MAX_GROUPS
) -> LayerGroups:
    """Divide the layers into groups of about equal payload: one for each `GROUP_BYTES`, `most` at most.

    `pages` is how many pages of each pool are restored. The first group moves some of them.
    """
    layer_bytes = [0] * (1 + max(max(of_planes) for of_planes in layers))
    for pool, count in pages.items():
        plane_bytes = count * layout.pools[pool].plane_bytes
        for layer in layers[pool]:
            layer_bytes[layer] += plane_bytes
    total = sum(layer_bytes)
    count = max(1, min(most, total // GROUP_BYTES))
    ends: list[int] = []
    before = 0
    for layer, size in enumerate(layer_bytes):
        # A group ends where the next layer's bytes begin past the group's share.
        if layer and before * count >= (len(ends) + 1) * total and before < total:
            ends.append(layer)
        before += size
    ends.append(len(layer_bytes))
    starts = [0, *ends[:-1]]
    planes = tuple(
        tuple(_planes_between(of_planes, start, end) for of_planes in layers)
        for start, end in zip(starts, ends, strict=True)
    )
    return LayerGroups(planes, tuple(ends))


def _planes_between(of_planes: Sequence[int], start: int, end: int) -> PlaneRange:
    first = bisect_left(of_planes, start)
    return first, bisect_left(of_planes, end) - first


@attrs.define(eq=False)
class OpenRestore(Generic[E]):
    """A restore that an engine may have to wait for; `events[group]` exists once the group is launched."""

    groups: LayerGroups | None = None
    events: list[E] = attrs.field(factory=list[E])


class LayerGate(Generic[E]):
    """Knows the restores under way, from submit to completion; every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: list[OpenRestore[E]] = []

    def expect(self) -> OpenRestore[E]:
        """Open the gate's account of one restore; from now on `wait_layer` waits for it."""
        restore = OpenRestore[E]()
        with self._changed:
            self._open.append(restore)
        return restore

    def launched(self, restore: OpenRestore[E], groups: LayerGroups, events: list[E]) -> None:
        """Tell the events of a restore's groups, all of them launched."""
        with self._changed:
            restore.groups, restore.events = groups, events
            self._changed.notify_all()

    def close(self, restore: OpenRestore[E]) -> None:
        """Forget a restore that is over, or that was never launched."""
        with self._changed:
            if restore in self._open:
                self._open.remove(restore)
            self._changed.notify_all()

    def wait_layer(self, layer: int, wait: Callable[[E], None], deadline_s: float) -> None:
        """Call `wait` (a wait on the device) for each restore under way whose planes `layer` reads.

        A restore that was submitted but is not launched yet is awaited here; DeadlineError if that takes too long.
        """
        end = time.monotonic() + deadline_s
        with self._changed:
            for restore in tuple(self._open):
                while restore.groups is None and restore in self._open:
                    left = end - time.monotonic()
                    if left <= 0:
                        raise DeadlineError(f"layer {layer}: a restore was not launched within {deadline_s} s")
                    self._changed.wait(left)
                if restore.groups is not None:
                    wait(restore.events[restore.groups.group_of(layer)])
