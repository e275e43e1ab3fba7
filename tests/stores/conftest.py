from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcr_actors.ports import Store
from kvcr_actors.stores.disk import disk_backend
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.stores.threaded import ThreadedStore
from tests.stores.pages import NAMESPACE


@pytest.fixture(params=["memory", "disk"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Store]:
    """Makes fresh stores of a capacity, each disk store in a folder of its own."""
    made = 0

    def make(capacity: int) -> Store:
        nonlocal made
        made += 1
        if request.param == "memory":
            return ThreadedStore("memory", memory_backend(capacity))
        return ThreadedStore("disk", disk_backend(tmp_path / f"store-{made}", capacity, NAMESPACE))

    return make
