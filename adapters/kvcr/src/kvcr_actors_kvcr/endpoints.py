"""Control endpoints by rank: a base port and offsets, checked for the whole group before anything is advertised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvcr_actors import ConfigError
from kvcr_actors_kvcr.hints import parse_endpoint
from kvcr_actors_kvcr.options import KvcrOptions

_MOST = 65_535


def group_ports(base: int, offsets: Sequence[int]) -> tuple[int, ...]:
    """The control port of each rank of a group; ConfigError if any of them, not only this rank's, does not exist."""
    ports = tuple(base + offset for offset in offsets)
    for rank, (port, offset) in enumerate(zip(ports, offsets, strict=True)):
        if not 0 < port <= _MOST:
            raise ConfigError(
                f"store kvcr: control port {base}{offset:+d} = {port} of rank {rank} does not exist; "
                f"choose a base port so that all of {min(ports)} to {max(ports)} lie in 1 to {_MOST}"
            )
    if len(set(ports)) != len(ports):
        raise ConfigError(f"store kvcr: two ranks would have the same control port: {ports}; give each its own offset")
    return ports


def endpoint(host: str, port: int) -> str:
    """The endpoint that peers dial; ConfigError for a host that nobody can dial."""
    address = f"tcp://{host}:{port}"
    if parse_endpoint(address) is None:
        raise ConfigError(f"store kvcr: peers cannot dial {address!r}; give advertise_host a name or an address")
    return address


def own_endpoint(options: KvcrOptions) -> str | None:
    """What a rank advertises, once every port of its group is checked; None without a control port."""
    if not options.control_port:
        return None
    ports = group_ports(options.control_port, options.offsets)
    own = options.control_port + options.control_offset
    if own not in ports:
        raise ConfigError(f"store kvcr: control_offset {options.control_offset} is not in group_offsets {ports}")
    if options.group_offsets and own - options.shard_offset not in ports:
        raise ConfigError(
            f"store kvcr: shard_offset {options.shard_offset} leads from port {own} out of the group's ports {ports}"
        )
    return endpoint(options.advertise_host or options.bind_host, own)


def router_metadata(endpoints: Mapping[int, str], worker_type: str) -> dict[str, str]:
    """What a worker advertises to a router, endpoints by data-parallel rank; `router_hint` comes last, on purpose."""
    for rank, address in endpoints.items():
        if parse_endpoint(address) is None:
            raise ConfigError(f"store kvcr: data-parallel rank {rank}: peers cannot dial {address!r}")
    by_rank = {str(rank): endpoints[rank] for rank in sorted(endpoints)}
    return {
        "router_hint_source_control_endpoints": json.dumps(by_rank, separators=(",", ":")),
        "router_hint_worker_type": worker_type,
        "router_hint": "true",
    }
