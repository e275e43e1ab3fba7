"""What publishers send, in a form that neither a terminal nor a reader of JSON can be harmed by."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

_DEPTH: Final = 32


def printable(text: str) -> str:
    """Give a text without what a terminal would act on: control characters are spelled out."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def plain(value: object, depth: int = _DEPTH) -> Any:
    """Give a value that came as msgpack as JSON has it: no number that is none, text as keys, bytes in base64."""
    if not depth:
        return "..."
    match value:
        case float():
            return value if math.isfinite(value) else None
        case bytes():
            return base64.b64encode(value).decode()
        case msgspec.msgpack.Ext():
            return {"ext": value.code, "data": base64.b64encode(value.data).decode()}
        case list() | tuple():
            return [plain(item, depth - 1) for item in cast("list[object]", value)]
        case Mapping():
            pairs = cast("Mapping[object, object]", value).items()
            return {
                key if isinstance(key, str) else str(key): plain(item, depth - 1)
                for key, item in pairs
                if not isinstance(item, msgspec.UnsetType)
            }
        case str() | int() | None:
            return value
        case _:  # such as a time stamp
            return str(value)
