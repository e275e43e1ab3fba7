"""Request traces in the Mooncake format: one JSON object a line, plain or gzipped."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeGuard, cast

import attrs

from kvcr_actors.errors import TraceError

BLOCK_TOKENS: Final = 512
"""Tokens of a block in the published traces."""
LINE_BYTES: Final = 8 << 20
"""The longest line: room for 400,000 block ids."""

_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_ID_LIMIT = 1 << 63
_DIGITS = 400
"""No number has more: what is longer takes time that grows with its square."""
_BLOCK_SIZES = tuple(1 << bits for bits in range(17))
_GZIP = b"\x1f\x8b"
_UTF8_MARK = b"\xef\xbb\xbf"
_OTHER_FORMATS: Final = {
    b"\xff\xfe": "UTF-16 text; convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it with iconv -f UTF-16 -t UTF-8",
    b"\x28\xb5\x2f\xfd": "zstd data; unpack it with zstd -d",
    b"\xfd7zXZ": "xz data; unpack it with xz -d",
    b"BZh": "bzip2 data; unpack it with bzip2 -d",
    b"PK\x03\x04": "a zip archive; unpack it with unzip",
    b"PAR1": "a Parquet file; write its rows as one JSON object a line",
}
_CSV = re.compile(r"\s*\w[^{}\[\]\"]*,[^{}\[\]\"]*")


@attrs.frozen
class TraceRequest:
    """One request. `hash_ids` names its blocks root to tail; equal ids mean equal prefixes up to there.

    `timestamp` is in milliseconds and only orders requests; lengths are in tokens. The blocks, all of one size, cover
    `input_length`; the last may be partial.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None, block_tokens: int = BLOCK_TOKENS) -> list[TraceRequest]:
    """Read the requests of a file of JSON lines, plain or gzipped, in file order, at most `limit` of them.

    Blank lines and fields beyond the four are ignored; lines beyond the limit are not read. TraceError names the file,
    the line and what to do, also where ids and lengths are not those of blocks of `block_tokens` tokens.
    """
    requests: list[TraceRequest] = []
    for number, line in _lines(path):
        if limit is not None and len(requests) >= limit:
            break
        if not line.isspace():
            requests.append(_parse(line, f"{path}, line {number}", block_tokens))
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
            while line := file.readline(LINE_BYTES + 1):
                number += 1
                yield number, _text(line, number, f"{path}, line {number}")
    except FileNotFoundError:
        raise TraceError(f"{path}: no such trace; check the path, or name none to replay the shipped trace") from None
    except IsADirectoryError:
        raise TraceError(f"{path}: this is a folder; name a .jsonl or .jsonl.gz file in it") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}, line {number + 1}: damaged gzip data ({error}); fetch the file again") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from error


def _unpacked(path: Path, raw: io.BufferedReader) -> io.BufferedReader | gzip.GzipFile:
    """Unpack what is gzipped, by its name or by its first bytes."""
    is_packed = path.suffix.lower() == ".gz" or raw.peek(len(_GZIP)).startswith(_GZIP)
    return gzip.GzipFile(fileobj=raw) if is_packed else raw


def _text(line: bytes, number: int, where: str) -> str:
    if len(line) > LINE_BYTES:
        raise TraceError(f"{where}: longer than {LINE_BYTES >> 20} MiB; write one JSON object a line")
    if number == 1:
        line = line.removeprefix(_UTF8_MARK)
        for mark, words in _OTHER_FORMATS.items():
            if line.startswith(mark):
                raise TraceError(f"{where}: this is {words}")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise TraceError(f"{where}: not UTF-8 text; write one JSON object a line, in UTF-8") from None


def _parse(line: str, where: str, block_tokens: int) -> TraceRequest:
    try:
        record: Any = json.loads(line, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        if _CSV.fullmatch(line):
            raise TraceError(
                f"{where}: this looks like CSV, as the traces of Azure and BurstGPT are; they have no ids of blocks, "
                f"without which nobody knows what prompts share. A trace here has a JSON object a line with "
                f"{', '.join(_FIELDS)}"
            ) from None
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
    _check_cover(request, where, block_tokens)
    return request


def _whole_number(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


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


def _check_cover(request: TraceRequest, where: str, block_tokens: int) -> None:
    """Each block is whole but for the last; a prompt of no tokens may have one."""
    ids, tokens = len(request.hash_ids), request.input_length
    needed = max(1, -(-tokens // block_tokens))
    if ids == needed:
        return
    sizes = [size for size in _BLOCK_SIZES if size != block_tokens and max(1, -(-tokens // size)) == ids]
    other = f", or name their size: --block-tokens {sizes[-1]} would fit" if sizes else ""
    raise TraceError(
        f"{where}: hash_ids has {ids} ids, but input_length {tokens} takes {needed} blocks of {block_tokens} tokens; "
        f"give an id for every {block_tokens} tokens, and one for what is left over{other}"
    )


def _as_list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
