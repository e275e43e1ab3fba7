"""Ranks compare what they were started with, through the shared store, before they work together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from time import monotonic

from kvcr_actors.errors import ConfigError, DeadlineError
from kvcr_actors.ranks._gloo import CollectiveError, SharedStore

_SETTINGS = "kvcr-actors/settings"


def tell_terms(store: SharedStore, rank: int, settings: Mapping[str, str]) -> bool:
    """Tell this rank's settings; whether it told some before, so that it starts again."""
    store.put(f"{_SETTINGS}/{rank}", json.dumps(dict(settings)))
    return store.add(f"kvcr-actors/starts/{rank}", 1) > 1


def compare_terms(
    store: SharedStore,
    rank: int,
    size: int,
    settings: Mapping[str, str],
    deadline_s: float,
    sleep: Callable[[], bool],
) -> None:
    """Wait for every rank's settings; ConfigError names the first that differs, DeadlineError a rank that tells none.

    `sleep` waits a little; False gives up.
    """
    end = monotonic() + deadline_s
    for other in range(size):
        while (text := store.get(f"{_SETTINGS}/{other}")) is None:
            if monotonic() > end:
                raise DeadlineError(f"rank {rank} of {size} waited {deadline_s:g} s for rank {other} to start")
            if not sleep():
                raise CollectiveError("given up")
        theirs: dict[str, str] = json.loads(text)
        for field in sorted(settings.keys() | theirs.keys()):
            if settings.get(field) != theirs.get(field):
                raise ConfigError(
                    f"ranks disagree on {field}: {settings.get(field)} on rank {rank}, "
                    f"{theirs.get(field)} on rank {other}; give every rank the same"
                )
