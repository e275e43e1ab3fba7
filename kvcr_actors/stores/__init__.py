"""Parts for stores of one's own: the thread behind a blocking client, an embedded backend's face, checks, events.

What a store must do stands in `kvcr_actors.ports`; `docs/write_a_store.md` shows one whole.
"""

from kvcr_actors.runtime.owner_thread import OwnerThread, close_threads
from kvcr_actors.stores.alignments import Alignments
from kvcr_actors.stores.backend import PageBackend, removed_events, stored_events
from kvcr_actors.stores.options import boolean, check_known
from kvcr_actors.stores.threaded import ThreadedStore, all_failed

__all__ = [
    "Alignments",
    "OwnerThread",
    "PageBackend",
    "ThreadedStore",
    "all_failed",
    "boolean",
    "check_known",
    "close_threads",
    "removed_events",
    "stored_events",
]
