"""Whether the hosts that a command line names can be used, asked before anything is opened."""

from __future__ import annotations

import errno
import socket

from kvcr_actors.errors import EventEndpointError
from kvcr_actors.events.endpoints import Endpoint

_ANY_ADDRESS = "*"
_LAST_PORT = (1 << 16) - 1


def check_can_dial(option: str, endpoint: Endpoint) -> None:
    """Refuse a port that is none and a host without an address; EventEndpointError names the option and what to do."""
    if endpoint.scheme == "tcp":
        if not 0 < endpoint.port <= _LAST_PORT:
            raise EventEndpointError(f"{option}: port {endpoint.port} does not exist; give one from 1 to {_LAST_PORT}")
        _addresses(option, endpoint.host)


def check_can_bind(option: str, endpoint: Endpoint) -> None:
    """Refuse a host that is neither an interface nor an address of this machine; takes no port."""
    if endpoint.scheme != "tcp" or endpoint.host in (_ANY_ADDRESS, *_interfaces()):
        return
    if not any(_is_here(address) for address in _addresses(option, endpoint.host)):
        raise EventEndpointError(
            f"{option}: host {endpoint.host!r} is no address of this machine, where the events are published; "
            f"give the port alone for loopback, an address of this machine, or {_ANY_ADDRESS} for all of them"
        )


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _addresses(option: str, host: str) -> list[str]:
    """The addresses of a host, of the family that ZeroMQ will look for: IPv6 for a literal in brackets only."""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise EventEndpointError(
            f"{option}: host {host!r} has no address ({error}); correct the name, or write the address itself"
        ) from error
    return [str(address[0]) for _, _, _, _, address in found]


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        # Anything else is for the publisher's own socket to say, with the port.
        return error.errno != errno.EADDRNOTAVAIL
    return True
