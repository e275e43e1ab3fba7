"""The words of `kvcr-actors events tail`: what each row of its table counts, in short there and in full in its help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MEANINGS: Final[Mapping[str, tuple[str, str]]] = {
    "batches": ("numbered messages applied", "An empty one, a heartbeat, counts too."),
    "events": ("what the batches told", "Blocks stored, blocks removed, everything cleared."),
    "gaps": ("times that batches were missing", "They are asked for, where --replay says who keeps them."),
    "lost": ("batches that never came", "No replay gave them."),
    "stale": (
        "came again, passed over",
        (
            "Their number was applied before. Some are usual after a replay; if it goes on, the publisher has begun "
            "again with lower numbers, and nothing of that is taken."
        ),
    ),
    "restarts": ("numbers that went back", "The publisher began again below its last number, or there are two."),
    "contradictions": (
        "removed, not there; nothing missed",
        "Removals of blocks that were not there, although no batch was missing: the publisher is wrong.",
    ),
    "malformed": ("messages that are unreadable", "What they told is lost."),
    "cut off": ("connections that had to end", "A frame was larger than 8 MiB, or no ZeroMQ; it connects again."),
    "repeated": ("stored, though there already", "Harmless: a block is told again when those before it are back."),
    "anomalies": (
        "removed, though not there",
        "All such removals; those that are no contradictions come of batches that were missed.",
    ),
    "in doubt": (
        "whether blocks may be wrong",
        (
            "Yes from the first batch that was missed, also before the reader joined, until the publisher begins "
            "anew: it clears everything, then tells every block that it holds."
        ),
    ),
    "next": ("the number of the next batch", "A lower one is stale, a higher one is a gap."),
    "silent": ("time since the last batch", "A publisher sends one a second at least."),
}
"""In short and in full; all but the last are keys of the last line of JSON, with an underscore for the blank."""

MEANINGS_LIST: Final = "\n".join(f"- **{name}**: {short}. {full}" for name, (short, full) in MEANINGS.items())
"""The same as Markdown."""
