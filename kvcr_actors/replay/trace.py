"""Request traces in the Mooncake format: one JSON object a line, plain or gzipped."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

import attrs

from kvcr_actors.errors import TraceError

BLOCK_TOKENS: Final = 512
"""Tokens of a block in the published traces."""

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_ID_LIMIT = 1 << 63


@attrs.frozen
class TraceRequest:
    """One request. `hash_ids` names its blocks root to tail; equal ids mean equal prefixes up to there.

    `timestamp` is in milliseconds and only orders requests; lengths are in tokens. The blocks, of 512 tokens each,
    cover `input_length`; the last may be partial.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Read the requests of a `.jsonl` or `.jsonl.gz` file in file order, at most `limit` of them.

    Blank lines and fields beyond the four are ignored; lines beyond the limit are not read. TraceError names the file,
    the line and what to do.
    """
    requests: list[TraceRequest] = []
    for number, line in _lines(path):
        if limit is not None and len(requests) >= limit:
            break
        if not line.isspace():
            requests.append(_parse(line, f"{path}, line {number}"))
    if not requests:
        raise TraceError(f"{path}: the trace has no requests; write one JSON object a line")
    return requests


def shipped_trace() -> Path:
    """Where the small trace lies that comes with the package."""
    return Path(__file__).parent.parent / "data" / "sample_trace.jsonl.gz"


def find_real_trace(name: str) -> Path | None:
    """Find a published trace, such as `conversation_trace.jsonl`, for tests and benchmarks; None if it is not there.

    The folder is KVCR_ACTORS_TRACES, else `../shared/data/mooncake` beside the repository.
    """
    repository = Path(__file__).parents[2]
    folder = os.environ.get("KVCR_ACTORS_TRACES")
    path = (Path(folder) if folder else repository.parent / "shared" / "data" / "mooncake") / name
    return path if path.is_file() else None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with path.open("rb") as raw, _unpacked(path, raw) as file:
            for number, line in enumerate(file, start=1):
                yield number, line.decode()
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace; check the path, or name none to replay the shipped trace") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: this is a folder; name a .jsonl or .jsonl.gz file in it") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}, line {number + 1}: damaged gzip data ({error}); fetch the file again") from error
    except UnicodeDecodeError:
        raise TraceError(f"{path}, line {number}: not UTF-8 text; a gzipped trace must end in .gz") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from error


def _unpacked(path: Path, raw: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    return gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw


def _parse(line: str, where: str) -> TraceRequest:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: not JSON ({error}); write one object a line") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: a JSON {type(record).__name__}, not an object; write one object a line")
    values = cast("dict[str, Any]", record)
    for field in _FIELDS:
        if field not in values:
            raise TraceError(f"{where}: the field {field!r} is missing; each line needs {', '.join(_FIELDS)}")
    request = TraceRequest(
        _checked_timestamp(values["timestamp"], where),
        _checked_length(values["input_length"], "input_length", where),
        _checked_length(values["output_length"], "output_length", where),
        _checked_ids(values["hash_ids"], where),
    )
    _check_cover(request, where)
    return request


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _ID_LIMIT


def _checked_timestamp(value: object, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= cast("float", value) < math.inf:
        raise TraceError(f"{where}: timestamp {_shown(value)} is not a number of milliseconds, 0 or more; correct it")
    return cast("float", value)


def _checked_length(value: object, field: str, where: str) -> int:
    if not _is_count(value):
        raise TraceError(f"{where}: {field} {_shown(value)} is not a whole number of tokens, 0 or more; correct it")
    return value


def _checked_ids(value: object, where: str) -> tuple[int, ...]:
    ids = _as_list(value)
    if not ids:
        raise TraceError(f"{where}: hash_ids {_shown(value)} is not a list of at least one block id; correct it")
    counts = tuple(block for block in ids if _is_count(block))
    if len(counts) != len(ids):
        wrong = next(block for block in ids if not _is_count(block))
        raise TraceError(f"{where}: hash_ids has {_shown(wrong)}, not a whole number of 0 to 2**63 - 1; correct it")
    if len(set(counts)) != len(counts):
        raise TraceError(f"{where}: hash_ids names a block twice; each id stands for a whole prefix, so none recurs")
    return counts


def _check_cover(request: TraceRequest, where: str) -> None:
    covered = len(request.hash_ids) * BLOCK_TOKENS
    if covered < request.input_length:
        needed = -(-request.input_length // BLOCK_TOKENS)
        raise TraceError(
            f"{where}: hash_ids has {len(request.hash_ids)} of the {needed} blocks that input_length "
            f"{request.input_length} takes; give an id for every {BLOCK_TOKENS} tokens, and one for what is left over"
        )


def _as_list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
