"""Decode recorded payloads with an engine's own decoder; run by an interpreter that has the engine.

usage: decode.py (vllm | sglang) FILE...: exit status 1 if an event cannot be decoded, or says something else.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

MODULES = {"vllm": "vllm.distributed.kv_events", "sglang": "sglang.srt.disaggregation.kv_events"}


def compare(decoded: Any, expected: dict[str, Any], ignored: set[str]) -> None:
    kind = expected.pop("type")
    if type(decoded).__name__ != kind:
        raise ValueError(f"a {kind} was decoded as {type(decoded).__name__}")
    fields = {field.name for field in msgspec.structs.fields(decoded)}
    plain = msgspec.json.decode(msgspec.json.encode(msgspec.structs.asdict(decoded)))
    for name, value in expected.items():
        if name not in fields:
            ignored.add(f"{kind}.{name}")
        elif plain[name] != value:
            raise ValueError(f"{kind}.{name} is {plain[name]!r}, not {value!r}")


def main(engine: str, files: list[str]) -> int:
    decoder = msgspec.msgpack.Decoder(importlib.import_module(MODULES[engine]).KVEventBatch)
    ignored: set[str] = set()
    batches = events = 0
    for file in files:
        document = json.loads(Path(file).read_text())
        for recorded in document["batches"]:
            batch = decoder.decode(bytes.fromhex(recorded["payload"]))
            if len(batch.events) != len(recorded["events"]):
                raise ValueError(f"{len(batch.events)} events instead of {len(recorded['events'])}")
            for decoded, expected in zip(batch.events, recorded["events"], strict=True):
                compare(decoded, expected, ignored)
                events += 1
            batches += 1
    unread = ", ".join(sorted(ignored)) or "none"
    print(f"{engine}: {batches} batches, {events} events decoded; fields that it does not read: {unread}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
