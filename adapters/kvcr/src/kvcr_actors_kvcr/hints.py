"""Router hints as typed envelopes, parsed strictly at the edge. A malformed one is a reason, never an exception."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import attrs

PROTOCOL = "0.1"
FETCH_ACTION = "kv.fetch"
FETCH_VERSION = "1.0"
MOST_HASHES = 1 << 16
_U64 = 1 << 64
_PORT = re.compile(r"[0-9]{1,5}")
_WILDCARDS = frozenset({"", "*", "0.0.0.0", "::", "[::]"})  # noqa: S104 - refused, not bound


class HintRefusal(enum.StrEnum):
    """Why a hint gives no remote read; the set is closed."""

    MALFORMED = "malformed"
    NO_FETCH = "no_fetch"
    VERSION = "version"
    MOVE = "move"
    MOVE_UNSUPPORTED = "move_unsupported"
    """Moves are on, and the installed KVCR has none."""
    HOST = "host"
    PORT = "port"
    """The counterpart of this rank would have a port that does not exist."""
    PEERS_OFF = "peers_off"
    QUARANTINE_FULL = "quarantine_full"
    """Too much memory is not quiet."""
    COOLING = "cooling"
    """The source did not answer a short time ago."""


@attrs.frozen
class FetchHint:
    """The pages of one source: its control endpoint and the router numbers of its event hashes."""

    endpoint: str
    hashes: frozenset[int]
    move: bool = False

    def envelope(self, message_id: str) -> dict[str, Any]:
        """The only shape that the runner takes."""
        payload = {"source_control_endpoint": self.endpoint, "block_hashes": sorted(self.hashes), "mode": "copy"}
        action = {
            "action_id": message_id,
            "action_type": FETCH_ACTION,
            "action_version": FETCH_VERSION,
            "payload": payload,
        }
        return {"protocol_version": PROTOCOL, "message_id": message_id, "actions": [action]}


def parse_endpoint(text: object) -> tuple[str, int] | None:
    """Host and port of `tcp://host:port`; None for anything else, wildcards included: nobody can dial them."""
    if not isinstance(text, str) or not text.startswith("tcp://"):
        return None
    host, separator, port = text.removeprefix("tcp://").rpartition(":")
    if not separator or host in _WILDCARDS or not _PORT.fullmatch(port):
        return None
    if any(character.isspace() or character in "/@" for character in host) or not 0 < int(port) < 1 << 16:
        return None
    return host, int(port)


def parse_hint(
    hints: object, allowed_hosts: Collection[str], *, move_hints: bool, shard_offset: int = 0
) -> FetchHint | HintRefusal:
    """The first fetch action of an envelope, or why there is none. Unknown actions are ignored.

    A hint names the first shard of a source; `shard_offset` is how far from its port the counterpart of this rank is.
    """
    if not isinstance(hints, Mapping):
        return HintRefusal.MALFORMED
    envelope = cast("Mapping[object, object]", hints)
    if envelope.get("protocol_version") != PROTOCOL:
        return HintRefusal.VERSION
    actions = envelope.get("actions")
    if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
        return HintRefusal.MALFORMED
    for action in cast("Sequence[object]", actions):
        if not isinstance(action, Mapping):
            return HintRefusal.MALFORMED
        fields = cast("Mapping[object, object]", action)
        if fields.get("action_type") == FETCH_ACTION:
            if fields.get("action_version") != FETCH_VERSION:
                return HintRefusal.VERSION
            return _parse_fetch(fields.get("payload"), allowed_hosts, shard_offset, move_hints=move_hints)
    return HintRefusal.NO_FETCH


def _parse_fetch(
    payload: object, allowed_hosts: Collection[str], shard_offset: int, *, move_hints: bool
) -> FetchHint | HintRefusal:
    if not isinstance(payload, Mapping):
        return HintRefusal.MALFORMED
    fields = cast("Mapping[object, object]", payload)
    mode = fields.get("mode", "copy")
    move = mode == "move" or "no_retain" in fields
    if mode not in ("copy", "move"):
        return HintRefusal.MALFORMED
    if move and not move_hints:
        return HintRefusal.MOVE
    endpoint = parse_endpoint(fields.get("source_control_endpoint"))
    hashes = _parse_hashes(fields.get("block_hashes"))
    if endpoint is None or hashes is None:
        return HintRefusal.MALFORMED
    if endpoint[0] not in allowed_hosts:
        return HintRefusal.HOST
    if move:
        # KVCR 0.1.1 has no move: asking for a copy instead would leave a page twice that its owner thinks moved.
        return HintRefusal.MOVE_UNSUPPORTED
    counterpart = parse_endpoint(f"tcp://{endpoint[0]}:{endpoint[1] + shard_offset}")
    if counterpart is None:
        return HintRefusal.PORT
    host, port = counterpart
    return FetchHint(f"tcp://{host}:{port}", hashes)


def _parse_hashes(value: object) -> frozenset[int] | None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return None
    numbers = cast("Sequence[object]", value)
    if not 0 < len(numbers) <= MOST_HASHES:
        return None
    hashes = [number for number in numbers if type(number) is int and 0 <= number < _U64]
    return frozenset(hashes) if len(hashes) == len(numbers) else None
