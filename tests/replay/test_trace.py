from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from kvcr_actors.errors import TraceError
from kvcr_actors.replay import trace
from kvcr_actors.replay.trace import TraceRequest, find_real_trace, read_trace, shipped_trace

GOOD = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 7]}


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def test_requests_come_in_file_order_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", GOOD | {"timestamp": 9, "model": "x"}, GOOD | {"hash_ids": [1, 2]})
    assert read_trace(path) == [TraceRequest(9, 700, 3, (0, 7)), TraceRequest(0, 700, 3, (1, 2))]


def test_a_gzipped_trace_reads_like_a_plain_one(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "t.jsonl", GOOD, GOOD)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)


def test_blank_lines_are_skipped_but_counted_in_line_numbers(tmp_path: Path) -> None:
    assert len(read_trace(write_lines(tmp_path / "good.jsonl", GOOD, "", "  ", GOOD))) == 2
    with pytest.raises(TraceError, match="line 3: not JSON"):
        read_trace(write_lines(tmp_path / "bad.jsonl", GOOD, "", "no"))


def test_the_limit_counts_requests_and_leaves_later_lines_unread(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", GOOD, GOOD, "broken")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(TraceError, match="line 3"):
        read_trace(path, limit=3)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("9" * 5_000, "not JSON"),
        ("[1]", "a JSON list, not an object"),
        ("3", "a JSON int, not an object"),
        ({"timestamp": 0, "input_length": 1, "output_length": 1}, "the field 'hash_ids' is missing"),
        ({"hash_ids": [1], "input_length": 1, "output_length": 1}, "the field 'timestamp' is missing"),
        (GOOD | {"hash_ids": [3, -1]}, "hash_ids has -1"),
        (GOOD | {"hash_ids": [True]}, "hash_ids has true"),
        (GOOD | {"hash_ids": [1.0]}, "hash_ids has 1.0"),
        (GOOD | {"hash_ids": ["1"]}, 'hash_ids has "1"'),
        (GOOD | {"hash_ids": [1 << 63]}, "hash_ids has 9223372036854775808"),
        (GOOD | {"hash_ids": [4, 4]}, "names a block twice"),
        (GOOD | {"hash_ids": []}, "not a list of at least one block"),
        (GOOD | {"hash_ids": 5}, "not a list of at least one block"),
        (GOOD | {"hash_ids": {"a": list(range(99))}}, r"\.\.\. is not a list"),
        (GOOD | {"timestamp": -1}, "timestamp -1"),
        (GOOD | {"timestamp": float("nan")}, "timestamp NaN"),
        (GOOD | {"timestamp": False}, "timestamp false"),
        (GOOD | {"input_length": -5}, "input_length -5"),
        (GOOD | {"output_length": None}, "output_length null"),
        (GOOD | {"hash_ids": [0]}, "hash_ids has 1 ids, but input_length 700 takes 2 blocks of 512 tokens"),
        (GOOD | {"input_length": 512}, "hash_ids has 2 ids, but input_length 512 takes 1 blocks of 512 tokens"),
        (
            GOOD | {"input_length": 521, "hash_ids": list(range(33))},
            "hash_ids has 33 ids, but input_length 521 takes 2 blocks .*: --block-tokens 16 would fit",
        ),
        ('{"timestamp": 0, "input_length": ' + "9" * 5_000 + "}", r"not JSON \(a number of 5,000 digits\)"),
        ('{"timestamp": 1e999}', "the field 'input_length' is missing"),
        (GOOD | {"input_length": 10**300}, r"input_length 10{36}\.\.\. is not"),
        (
            GOOD | {"input_length": 1_025},
            "hash_ids has 2 ids, but input_length 1025 takes 3 blocks of 512 tokens; give an id for",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, line: object, complaint: str) -> None:
    path = write_lines(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(TraceError, match=complaint) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert "\n" not in str(caught.value)


def test_the_last_block_of_a_line_may_be_partial(tmp_path: Path) -> None:
    whole, partial = GOOD | {"input_length": 1_024}, GOOD | {"input_length": 513}
    assert [request.input_length for request in read_trace(write_lines(tmp_path / "t.jsonl", whole, partial))] == [
        1_024,
        513,
    ]


@pytest.mark.parametrize("name", ["conversation_trace.jsonl", "synthetic_trace.jsonl"])
def test_a_published_trace_is_taken_to_its_last_line(name: str) -> None:
    path = find_real_trace(name)
    if path is None:
        pytest.skip(f"{name} is not here; set KVCR_ACTORS_TRACES to the folder of the Mooncake traces")
    assert len(read_trace(path)) == len(path.read_text().splitlines())


def test_a_missing_file_a_folder_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such trace"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match="this is a folder"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(write_lines(tmp_path / "empty.jsonl"))
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(write_lines(tmp_path / "file") / "below.jsonl")


def test_damaged_gzip_data_is_named_with_the_line_it_stops_at(tmp_path: Path) -> None:
    packed = gzip.compress("".join(f"{json.dumps(GOOD | {'hash_ids': [n, n + 1]})}\n" for n in range(20_000)).encode())
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match=r"line \d{3,}: damaged gzip data"):
        read_trace(path)
    path.write_bytes(b"plain text")
    with pytest.raises(TraceError, match="line 1: damaged gzip data"):
        read_trace(path)
    path.write_bytes(packed[:100] + b"\xff" * 50 + packed[150:])
    with pytest.raises(TraceError, match="damaged gzip data"):
        read_trace(path)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.GZ", "t"])
def test_a_gzipped_trace_may_have_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert len(read_trace(path)) == 1


def test_a_mark_of_utf8_at_the_beginning_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(read_trace(path)) == 1


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n",
            "looks like CSV, as the traces",
        ),
        (b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n", "have no ids of blocks"),
        (json.dumps(GOOD).encode("utf-16"), "this is UTF-16 text; convert it with iconv"),
        (b"\xfe\xff" + json.dumps(GOOD).encode("utf-16-be"), "this is UTF-16 text"),
        (b"\x28\xb5\x2f\xfd1234", "this is zstd data; unpack it"),
        (b"PK\x03\x04", "this is a zip archive"),
        (b"{\xff}", "not UTF-8 text"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "t.jsonl"
    for content in (data, gzip.compress(data)):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=f"line 1: .*{complaint}"):
            read_trace(path)


def test_a_line_without_end_is_read_no_further_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "LINE_BYTES", 1 << 20)
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wb", 1) as packed:
        for _ in range(64):
            packed.write(b"1" * (1 << 20))
    tracemalloc.start()
    with pytest.raises(TraceError, match="line 1: longer than 1 MiB; write one JSON object a line"):
        read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_line_as_long_as_it_may_be_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(GOOD) + "\n"
    monkeypatch.setattr(trace, "LINE_BYTES", len(line))
    assert len(read_trace(write_lines(tmp_path / "t.jsonl", GOOD, GOOD))) == 2


def test_the_size_of_blocks_can_be_another(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", GOOD | {"input_length": 521, "hash_ids": list(range(33))})
    assert len(read_trace(path, block_tokens=16)[0].hash_ids) == 33


def test_the_shipped_trace_shares_prefixes_and_fits_the_default_tiers() -> None:
    requests = read_trace(shipped_trace())
    parents: dict[int, int | None] = {}
    for request in requests:
        parent = None
        for block in request.hash_ids:
            assert parents.setdefault(block, parent) == parent
            parent = block
    asked = sum(len(request.hash_ids) for request in requests)
    assert 200 <= len(requests) <= 1_000
    assert len(parents) < asked / 2
    assert max(len(request.hash_ids) for request in requests) < 100


def test_real_traces_are_looked_for_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCR_ACTORS_TRACES", str(tmp_path))
    assert find_real_trace("a.jsonl") is None
    path = write_lines(tmp_path / "a.jsonl", GOOD)
    assert find_real_trace("a.jsonl") == path
