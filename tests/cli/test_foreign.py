"""What a publisher sends harms neither a terminal nor a reader of JSON."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from rich.console import Console

from kvcr_actors.cli.events_command import _print_json, _table
from kvcr_actors.cli.foreign import plain, printable
from kvcr_actors.events.reader import EventReader

HASHES = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
HOSTILE = [
    {"ownership": "[/x]"},
    {"ownership": "\x1b]0;pwned\x07\x1b[31mRED\x1b[2J\u202e"},
    {"extra_keys": [msgspec.msgpack.Ext(5, b"x")]},
    {"extra_keys": [{(1, 2): 3, b"k": b"\xff", 4: 5}]},
    {"extra_keys": [math.nan, math.inf, msgspec.msgpack.Ext(-1, bytes(4))]},
]


@pytest.mark.parametrize("fields", HOSTILE)
def test_a_batch_is_a_line_of_json_and_a_row_of_plain_text(
    fields: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    payload = msgspec.msgpack.encode([math.nan, [HASHES | fields]])
    _print_json((7, payload))
    line = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads(line, parse_constant=refuse)
    assert (read["timestamp"], read["events"][0]["type"], read["events"][0]["block_hashes"]) == (
        None,
        "BlockStored",
        [1],
    )
    assert "error" not in read
    with EventReader("ipc:///no/such/folder/x") as reader:
        reader.follower.receive(7, payload)
        console = Console(force_terminal=True, width=120)
        with console.capture() as captured:
            console.print(_table(reader))
    shown = captured.get()
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown
    assert "\u202e" not in shown
    assert f"blocks, device ({printable(str(fields['ownership']))})" in shown if "ownership" in fields else True


def test_values_of_any_kind_become_plain_ones() -> None:
    deep: object = None
    for _ in range(500):
        deep = [deep]
    assert json.dumps(plain(deep)).count("[") == 32
    assert plain({"a": msgspec.UNSET, (1,): b"\x01", None: (True, 1.5)}) == {"(1,)": "AQ==", "None": [True, 1.5]}
    assert plain(msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.msgpack.Ext(9, b"\x01")))) == {
        "ext": 9,
        "data": "AQ==",
    }
