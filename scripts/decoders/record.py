"""Record every batch that a replay of the shipped trace publishes.

usage: record.py DIALECT FILE
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path

import msgspec

from kvcr_actors.events.reader import EventReader
from kvcr_actors.events.wire import decode_batch
from kvcr_actors.replay.options import ReplayOptions
from kvcr_actors.replay.session import run_replay
from kvcr_actors.replay.trace import read_trace, shipped_trace


def main(dialect: str, file: str) -> int:
    payloads: list[bytes] = []
    done = threading.Event()

    def listen(endpoint: str) -> None:
        with EventReader(endpoint) as reader:
            while (message := reader.read(0.5)) is not None or not done.is_set():
                if message is not None:
                    payloads.append(message[1])

    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        listener = threading.Thread(target=listen, args=(endpoint,))
        listener.start()
        options = ReplayOptions(device_blocks=128, host_blocks=256, store_blocks=600, events=endpoint, dialect=dialect)
        report = run_replay(options, read_trace(shipped_trace()), lambda finished: None)
        done.set()
        listener.join()
    batches = [
        {"payload": payload.hex(), "events": msgspec.to_builtins(decode_batch(payload).events)} for payload in payloads
    ]
    Path(file).write_text(json.dumps({"dialect": dialect, "batches": batches}))
    return 0 if report.healthy and payloads else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
