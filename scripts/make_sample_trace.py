"""Make the small trace that ships in the package: conversations that share system prompts and documents.

Run `python scripts/make_sample_trace.py` in the repository; the same seed gives the same lines.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

import attrs

BLOCK_TOKENS = 512
OPEN_TALKS = 72
TARGET = Path(__file__).parents[1] / "kvcr_actors" / "data" / "sample_trace.jsonl.gz"


@attrs.define
class Conversation:
    """A talk that grows: every turn asks for all blocks so far, and its answer becomes blocks of the next turn."""

    blocks: list[int]
    turns_left: int
    next_ms: int


class Writer:
    """Hands out block ids, and makes conversations that begin with shared blocks."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._next_id = 0
        root = self._new_blocks(1)
        self._prompts = [root + self._new_blocks(3) for _ in range(4)]
        self._documents = [
            self.random.choice(self._prompts) + self._new_blocks(self.random.randint(8, 40)) for _ in range(120)
        ]

    def _new_blocks(self, count: int) -> list[int]:
        first = self._next_id
        self._next_id += count
        return list(range(first, first + count))

    def open(self, now_ms: int) -> Conversation:
        """Begin a conversation on a system prompt or on a document; a few of each are asked for most."""
        shared = self._documents if self.random.random() < 0.6 else self._prompts
        popular = min(int(self.random.expovariate(3 / len(shared))), len(shared) - 1)
        return Conversation(
            shared[popular] + self._new_blocks(self.random.randint(1, 6)), self.random.randint(1, 7), now_ms
        )

    def turn(self, talk: Conversation) -> dict[str, object]:
        """Write the talk's next request, then let it grow by the answer and the next question."""
        output = self.random.randint(20, 900)
        partial = self.random.randint(1, BLOCK_TOKENS)
        record = {
            "timestamp": talk.next_ms,
            "input_length": (len(talk.blocks) - 1) * BLOCK_TOKENS + partial,
            "output_length": output,
            "hash_ids": list(talk.blocks),
        }
        talk.blocks = talk.blocks[:-1] + self._new_blocks(1 + (partial + output) // BLOCK_TOKENS)
        talk.turns_left -= 1
        talk.next_ms += self.random.randint(4_000, 60_000)
        return record


def make_trace(requests: int, seed: int) -> Iterator[str]:
    """Yield the lines, by rising timestamp."""
    writer = Writer(seed)
    talks: list[Conversation] = []
    now_ms = 0
    for _ in range(requests):
        if len(talks) < OPEN_TALKS or writer.random.random() < 0.2:
            now_ms += writer.random.randint(0, 800)
            talks.append(writer.open(now_ms))
        talk = min(talks, key=lambda candidate: candidate.next_ms)
        now_ms = max(now_ms, talk.next_ms)
        talk.next_ms = now_ms
        yield json.dumps(writer.turn(talk))
        if not talk.turns_left:
            talks.remove(talk)


def main() -> None:
    """Write the trace; gzip's own time stamp is left out, so that the file depends on the arguments alone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=20250219)
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    text = "".join(f"{line}\n" for line in make_trace(arguments.requests, arguments.seed))
    arguments.output.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
