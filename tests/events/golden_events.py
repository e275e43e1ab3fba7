"""Every kind of event that a dialect can send, as the payloads that are kept in `golden/`.

`python -m tests.events.golden_events` writes them anew; a change there is a change of the wire form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import msgspec

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent, Ownership, TierCleared
from kvcr_actors.core.keys import PageKeyAdapter, RouterForm, chain_seed, page_keys
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.stream import EventStream
from kvcr_actors.events.wire import DIALECTS, decode_batch
from kvcr_actors.types import PageContext, PageKey, Tier

FOLDER = Path(__file__).with_name("golden")
SIZE = 4
TOKENS = [1, 2, 3, 4, 151_643, 70_000, 65_535, 65_536, 2**31, 2**32 - 1, 0, 127, 128, 255, 256, 9]
TIMESTAMP = 1_764_400_000.25
FILES = {
    **{f"{name}.json": (name, RouterForm.FIRST_64) for name in DIALECTS},
    "vllm-whole.json": ("vllm", RouterForm.WHOLE),
    "vllm-last_64.json": ("vllm", RouterForm.LAST_64),
    "sglang-last_64.json": ("sglang", RouterForm.LAST_64),
}
"""Each dialect, and the forms of its readers' hashes beside the first 64 bits."""


def _prompt(table: ContextTable, *, salt: str | None = None, adapter: str | None = None) -> tuple[PageKey, ...]:
    keys = page_keys(TOKENS, SIZE, chain_seed(page_tokens=SIZE, salt=salt, adapter=adapter))
    table.note(keys, PageContext(TOKENS, SIZE, adapter, salt))
    return keys


def _stored(tier: Tier, keys: Sequence[PageKey], first: int, owner: Ownership = Ownership.ENGINE) -> InventoryEvent:
    return BlocksStored(tier, tuple(keys[first:]), (None, *keys)[first : len(keys)], owner)


def payloads(dialect: str, form: RouterForm = RouterForm.FIRST_64) -> list[bytes]:
    """One batch an event, in an order that makes sense."""
    table = ContextTable()
    plain, salted, adapted = _prompt(table), _prompt(table, salt="tenant"), _prompt(table, adapter="style")
    both = _prompt(table, salt="tenant", adapter="style")
    keys = PageKeyAdapter(form)
    stream = EventStream(DIALECTS[dialect], table, count(1 << 40).__next__, rank=3, keys=keys)
    events: list[InventoryEvent] = [_stored(tier, plain, 0) for tier in Tier]
    events += [_stored(Tier.DEVICE, keys, 0) for keys in (salted, adapted, both)]
    events += [BlocksRemoved(tier, plain[2:]) for tier in Tier]
    events += [_stored(Tier.HOST, plain, 2), TierCleared(Tier.DEVICE)]
    events += [_stored(Tier.HOST, plain, 0, Ownership.STORE), BlocksRemoved(Tier.HOST, plain[3:], Ownership.STORE)]
    found: list[bytes] = []
    for event in (None, *events):
        stream.push([] if event is None else [event])
        while (message := stream.next_message(0.0, TIMESTAMP)) is not None:
            found.append(message[1])
    return [*found, stream.heartbeat(TIMESTAMP)[1]]


def document(dialect: str, form: RouterForm = RouterForm.FIRST_64) -> str:
    """The payloads in hexadecimal, each with the events that must be read from it."""
    batches = [
        {"payload": payload.hex(), "events": msgspec.to_builtins(decode_batch(payload).events)}
        for payload in payloads(dialect, form)
    ]
    return json.dumps({"dialect": dialect, "timestamp": TIMESTAMP, "rank": 3, "batches": batches}, indent=1) + "\n"


if __name__ == "__main__":
    for file, (name, hashes) in FILES.items():
        (FOLDER / file).write_text(document(name, hashes))
