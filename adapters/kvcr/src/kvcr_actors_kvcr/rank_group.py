"""The ranks of an engine: where each of them listens, what it holds a shard of, and which one speaks for the others.

The ranks of one data-parallel rank hold one copy of the pages together, each its shard. Routers know data-parallel
ranks only: the first shard tells the inventory and is what hints name; every other rank asks its own counterpart,
which lies as far from the first as it does itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs

from kvcr_actors import ConfigError
from kvcr_actors_kvcr.endpoints import endpoint, group_ports


def _check_size(_group: object, field: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise ConfigError(f"rank group: {field.name}={value}; give 1 or more")


def _axis() -> int:
    return attrs.field(default=1, validator=_check_size)


@attrs.frozen(kw_only=True)
class RankGroup:
    """The axes of an engine, the outermost first. ConfigError for an axis without ranks, or a stride of 0.

    `stride` lies between the control ports of neighbouring ranks; a negative one counts down.
    """

    data: int = _axis()
    pipeline: int = _axis()
    context: int = _axis()
    tensor: int = _axis()
    stride: int = 1

    def __attrs_post_init__(self) -> None:
        if not self.stride:
            raise ConfigError("rank group: stride=0; each rank needs a control port of its own")

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the pages together."""
        return self.pipeline * self.context * self.tensor

    @property
    def offsets(self) -> tuple[int, ...]:
        """Each rank's distance from the base port, data rank by data rank."""
        return tuple(self.stride * number for number in range(self.data * self.shards))

    def rank(self, *, data: int = 0, pipeline: int = 0, context: int = 0, tensor: int = 0) -> Rank:
        """One rank; ConfigError if there is none at that place."""
        return Rank(self, data, pipeline, context, tensor)

    def sources(self, base_port: int, hosts: str | Sequence[str]) -> dict[int, str]:
        """What hints name, by data-parallel rank: the endpoint of its first shard. `hosts` is one, or one each.

        Every port of the group is checked, and that peers can dial every host; ConfigError names the first that fails.
        """
        ports = group_ports(base_port, self.offsets)
        names = [hosts] * self.data if isinstance(hosts, str) else list(hosts)
        if len(names) != self.data:
            raise ConfigError(f"rank group: {len(names)} hosts for {self.data} data-parallel ranks; give one for each")
        return {data: endpoint(name, ports[data * self.shards]) for data, name in enumerate(names)}


@attrs.frozen
class Rank:
    """One rank's place in its group."""

    group: RankGroup
    data: int
    pipeline: int
    context: int
    tensor: int

    def __attrs_post_init__(self) -> None:
        for kind, index, size in (("data", self.data, self.group.data), *self._shard_axes()):
            if not 0 <= index < size:
                raise ConfigError(f"{kind} rank {index} of {size} does not exist")

    @property
    def shard(self) -> int:
        """Its place among the shards of its data-parallel rank; the first speaks for all of them."""
        return (self.pipeline * self.group.context + self.context) * self.group.tensor + self.tensor

    @property
    def number(self) -> int:
        """Its place in the group."""
        return self.data * self.group.shards + self.shard

    def control_options(self, base_port: int) -> dict[str, Any]:
        """The options of `KvcrOptions` that say where this rank listens, and where its counterparts do."""
        return {
            "control_port": base_port,
            "control_offset": self.group.stride * self.number,
            "group_offsets": ",".join(map(str, self.group.offsets)),
            "shard_offset": self.group.stride * self.shard,
        }

    def namespace_ranks(self, replicated: Collection[str] = ()) -> tuple[tuple[str, int, int], ...]:
        """`Namespace.ranks`: the axes along which this rank's pages are a shard; `replicated` names those that copy."""
        return tuple(axis for axis in self._shard_axes() if axis[2] > 1 and axis[0] not in replicated)

    def event_ranks(self) -> dict[str, int]:
        """The fields of `EventsConfig`: one publisher a data-parallel rank, on its first shard."""
        return {
            "data_parallel_rank": self.data,
            "data_parallel_size": self.group.data,
            "tensor_rank": self.shard,
        }

    def _shard_axes(self) -> tuple[tuple[str, int, int], ...]:
        group = self.group
        return (
            ("pipeline", self.pipeline, group.pipeline),
            ("context", self.context, group.context),
            ("tensor", self.tensor, group.tensor),
        )
