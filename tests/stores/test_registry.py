"""Stores by name, and the checks of their options before anything is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.stores.registry import open_store, store_names
from tests.stores.pages import NAMESPACE


def test_the_embedded_stores_are_installed_by_name(tmp_path: Path) -> None:
    assert {"memory", "disk"} <= set(store_names())
    assert open_store("memory", {}, 8, None, NAMESPACE).name == "memory"
    assert open_store("disk", {"fsync": "true"}, 8, tmp_path / "store", NAMESPACE).name == "disk"


@pytest.mark.parametrize(
    ("name", "options", "capacity", "has_path", "words"),
    [
        ("lmdb", {}, 8, False, "unknown store 'lmdb'; installed: .*disk.*memory"),
        ("memory", {"fsync": "true"}, 8, False, "memory: unknown option 'fsync'; it takes none"),
        ("memory", {}, 8, True, "memory: it keeps nothing in a folder"),
        ("memory", {}, 0, False, "capacity_pages 0"),
        ("disk", {"sync": "true"}, 8, True, "disk: unknown option 'sync'; it takes fsync"),
        ("disk", {"fsync": "yes"}, 8, True, "disk: option fsync='yes'; write fsync=true or fsync=false"),
        ("disk", {"fsync": "True"}, 8, True, "disk: option fsync='True'"),
        ("disk", {}, 8, False, "disk: it needs a folder"),
        ("disk", {}, 0, True, "capacity_pages 0"),
    ],
)
def test_what_is_refused_is_named_and_nothing_is_made(
    tmp_path: Path, name: str, options: dict[str, str], capacity: int, has_path: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_store(name, options, capacity, tmp_path / "store" if has_path else None, NAMESPACE)
    assert list(tmp_path.iterdir()) == []
