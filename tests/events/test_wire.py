"""The wire form: golden payloads of each dialect, and what is refused on the way in."""

from __future__ import annotations

import json
from itertools import count

import attrs
import msgspec
import pytest

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored
from kvcr_actors.core.keys import PageKeyAdapter, RouterForm, RouterKey, chain_seed, page_keys
from kvcr_actors.errors import ConfigError, EventFormatError
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.stream import EventStream, StreamLimits
from kvcr_actors.events.wire import (
    DIALECTS,
    MAX_PAYLOAD_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    decode_sequence,
    encode_sequence,
    find_dialect,
    tier_of,
)
from kvcr_actors.types import PageContext, PageKey, Tier
from tests.events.golden_events import FILES, FOLDER, SIZE, TOKENS, document, payloads


@pytest.mark.parametrize("file", list(FILES))
def test_a_dialect_is_sent_as_it_was_agreed(file: str) -> None:
    assert document(*FILES[file]) == (FOLDER / file).read_text()


@pytest.mark.parametrize(("dialect", "form"), FILES.values())
def test_blocks_and_parents_are_called_what_the_engine_calls_them(dialect: str, form: RouterForm) -> None:
    keys = page_keys(TOKENS, SIZE, chain_seed(page_tokens=SIZE))
    names = [PageKeyAdapter(form).encode_to_router(key) for key in keys]
    if dialect == "sglang":
        names = [int.from_bytes(name.to_bytes(8, "big"), "big", signed=True) for name in names if isinstance(name, int)]
    events = [event for payload in payloads(dialect, form) for event in decode_batch(payload).events]
    stored = next(event for event in events if isinstance(event, BlockStored))
    removed = next(event for event in events if isinstance(event, BlockRemoved))
    assert (stored.block_hashes, stored.parent_block_hash) == (names, None)
    assert removed.block_hashes == names[:1:-1]
    below = next(event for event in events if isinstance(event, BlockStored) and event.parent_block_hash is not None)
    assert (below.parent_block_hash, below.block_hashes) == (names[1], names[2:])


@attrs.frozen
class _Names(PageKeyAdapter):
    """Calls every page the same."""

    name: RouterKey = 0

    def encode_to_router(self, key: PageKey) -> RouterKey:
        del key
        return self.name


@pytest.mark.parametrize(
    ("dialect", "name", "words"),
    [
        ("sglang", b"k" * 32, "dialect sglang: its readers take no block hash such as b'k"),
        ("dynamo", b"k" * 32, "dialect dynamo: .* give the first or last 64 bits of the page key$"),
        ("vllm", "k" * 64, "dialect vllm: .* or the whole key as bytes"),
        ("vllm", 1 << 64, "dialect vllm: router keys must have 64 bits"),
    ],
)
def test_a_form_that_the_readers_do_not_take_is_refused_at_once(dialect: str, name: RouterKey, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EventStream(DIALECTS[dialect], ContextTable(), count().__next__, keys=_Names(name=name))


def test_long_names_are_cut_into_messages_within_the_limit() -> None:
    table, keys = ContextTable(), page_keys(range(4_000), 1, chain_seed())
    table.note(keys, PageContext(range(4_000), 1))
    limits = StreamLimits(payload_bytes=2_048)
    for form in (RouterForm.LAST_64, RouterForm.WHOLE):
        stream = EventStream(DIALECTS["vllm"], table, count().__next__, limits=limits, keys=PageKeyAdapter(form))
        stream.push([BlocksStored(Tier.HOST, keys, (None, *keys[:-1])), BlocksRemoved(Tier.HOST, keys[::-1])])
        told = 0
        while (message := stream.next_message(0.0, 0.0)) is not None:
            assert len(message[1]) <= limits.payload_bytes
            for event in decode_batch(message[1]).events:
                if isinstance(event, BlockStored | BlockRemoved):
                    told += len(event.block_hashes)
        assert told == 8_000


@pytest.mark.parametrize(("dialect", "signed"), [("vllm", False), ("sglang", True), ("dynamo", False)])
def test_hashes_have_64_bits_in_the_dialects_own_sign(dialect: str, signed: bool) -> None:
    hashes = [
        block
        for payload in payloads(dialect)
        for event in decode_batch(payload).events
        if isinstance(event, BlockStored)
        for block in event.block_hashes
        if isinstance(block, int)
    ]
    assert any(block >= 1 << 63 for block in hashes) is not signed
    assert any(block < 0 for block in hashes) is signed
    assert all(-(1 << 63) <= block < 1 << 64 for block in hashes)


def test_only_dynamo_has_words_for_a_stores_own_blocks() -> None:
    owned = {name: sum(b"ownership" in payload for payload in payloads(name)) for name in DIALECTS}
    assert owned == {"dynamo": 3, "vllm": 0, "sglang": 0}  # a clear, a store and a removal


def test_every_field_that_readers_insist_on_is_written() -> None:
    for dialect in DIALECTS:
        for payload in payloads(dialect):
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    assert {"lora_id", "lora_name", "medium", "parent_block_hash"} <= set(event)


def test_foreign_streams_are_read_too() -> None:
    """Byte hashes and multimodal extra keys of vLLM, absent optional fields of SGLang, fields that are yet unknown."""
    event = {"type": "BlockStored", "block_hashes": [b"\x01" * 32], "parent_block_hash": None, "token_ids": [1]}
    event |= {"block_size": 1, "extra_keys": [["mm", 3], None], "group_idx": 2, "from_the_future": {"a": 1}}
    batch = decode_batch(msgspec.msgpack.encode([1.5, [event, {"type": "AllBlocksCleared"}]]))
    assert len(batch.events) == 2
    assert isinstance(batch.events[0], BlockStored)
    assert tier_of(batch.events[0].medium) is Tier.DEVICE


def test_vllms_arrays_and_maps_are_read_as_what_they_mean() -> None:
    pack = msgspec.msgpack.encode
    arrays = [
        ["AllBlocksCleared"],
        ["BlockStored", [2], 1, [7] * 4, 4, None, "CPU", None],
        ["BlockRemoved", [2], "CPU"],
    ]
    maps = [
        {"type": "AllBlocksCleared"},
        {"type": "BlockStored", "block_hashes": [2], "parent_block_hash": 1, "token_ids": [7] * 4, "block_size": 4}
        | {"lora_id": None, "medium": "CPU", "lora_name": None},
        {"type": "BlockRemoved", "block_hashes": [2], "medium": "CPU"},
    ]
    forms = [
        pack([1.0, maps, 3]),
        pack([1.0, arrays, 3]),
        pack({"ts": 1.0, "events": maps, "data_parallel_rank": 3}),
    ]
    plain, *others = [decode_batch(form) for form in forms]
    assert len(plain.events) == 3
    assert others == [plain, plain]
    older = decode_batch(
        pack([1.0, [["BlockStored", [2], 1, [7] * 4, 4, None, "GPU", None, None, 1], ["BlockRemoved", [2]]]])
    )
    assert [event.group_idx for event in older.events if not isinstance(event, AllBlocksCleared)] == [1, None]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.0, [["BlockMoved"]]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", 1]]]),
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": ["text"]}]]),
        b"\x92\xca\0\0\0\0\x91\x82\xa4type\xabBlockStored\xaaextra_keys" + 5_000 * b"\x91" + b"\xc0",
        bytes(MAX_PAYLOAD_BYTES + 1),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventFormatError):
        decode_batch(payload)


def test_a_medium_that_is_not_known_is_refused() -> None:
    with pytest.raises(EventFormatError, match="TAPE"):
        tier_of("TAPE")


def test_sequences_have_eight_bytes() -> None:
    assert decode_sequence(encode_sequence(1 << 40)) == 1 << 40
    with pytest.raises(EventFormatError, match="7 bytes"):
        decode_sequence(bytes(7))


def test_a_dialect_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'klingon' is not known; use vllm, sglang, dynamo"):
        find_dialect("klingon")


def test_the_golden_files_name_no_dialect_that_is_gone() -> None:
    assert {json.loads(path.read_text())["dialect"] for path in FOLDER.iterdir()} == set(DIALECTS)
