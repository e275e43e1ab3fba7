"""Where event sockets bind: one port a data-parallel rank, checked for every rank before any is used."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import attrs

from kvcr_actors.errors import ConfigError

LOOPBACK = "127.0.0.1"
_PORTS = 1 << 16
_TCP = re.compile(r"tcp://(?P<host>\[[^\[\]\s\0]+\]|[^:\[\]/\s\0]*):(?P<port>\d{1,5})")
_LOCAL = re.compile(r"ipc://(?P<path>[^\s\0]+)")


@attrs.frozen
class Endpoint:
    """A base address; `at` gives each rank's. An `ipc://` path, made absolute, gets a suffix instead of a port."""

    scheme: str
    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str, what: str) -> Endpoint:
        """Read `tcp://HOST:PORT`, `PORT` (on loopback) or `ipc://PATH`; ConfigError names `what`."""
        if text.isdecimal():
            text = f"tcp://{LOOPBACK}:{text}"
        if (local := _LOCAL.fullmatch(text)) is not None:
            path = local["path"]
            return cls("ipc", path if path.startswith("@") else str(Path(path).resolve()))
        match = _TCP.fullmatch(text)
        if match is None:
            raise ConfigError(f"{what}: {text[:80]!r} is no endpoint; write a port, or tcp://HOST:PORT")
        return cls("tcp", match["host"] or LOOPBACK, int(match["port"]))

    def at(self, rank: int) -> str:
        """Give a rank's address."""
        if self.scheme == "tcp":
            return f"tcp://{self.host}:{self.port + rank}"
        return f"{self.scheme}://{self.host}" + (f"_dp{rank}" if rank else "")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.scheme != "tcp" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False  # a name, an interface or a wildcard

    def ports(self, ranks: int) -> range:
        """The ports of all ranks; none for a name."""
        return range(self.port, self.port + ranks) if self.scheme == "tcp" else range(0)


def check_endpoints(events: Endpoint, replay: Endpoint | None, ranks: int) -> None:
    """Refuse ports of any rank that do not exist, and a replay range that meets the events' range; ConfigError."""
    for what, endpoint in (("events", events), ("replay", replay)):
        if endpoint is None or endpoint.scheme != "tcp":
            continue
        if endpoint.port < 1 or endpoint.port + ranks > _PORTS:
            raise ConfigError(
                f"{what} port {endpoint.port}: {ranks} data-parallel ranks need {endpoint.port} to "
                f"{endpoint.port + ranks - 1}; choose a base port from 1 to {_PORTS - ranks}"
            )
    if replay is None:
        return
    names = {events.at(rank) for rank in range(ranks)} & {replay.at(rank) for rank in range(ranks)}
    if events == replay or (names and events.scheme != "tcp"):
        raise ConfigError(f"events and replay share {min(names)}; give each an endpoint of its own")
    shared = set(events.ports(ranks)) & set(replay.ports(ranks))
    if shared:
        raise ConfigError(
            f"events and replay both use port {min(shared)} over {ranks} ranks; keep the base ports {ranks} apart"
        )
