"""The runner has threads of its own, so every test runs on real clocks, on asyncio and on trio."""

from __future__ import annotations

from typing import Any

import pytest

from kvcr_actors import Namespace, layout_name
from kvcr_actors.testing.store_driver import LAYOUT
from kvcr_actors.testing.virtual_time import REAL, backend_options
from kvcr_actors_kvcr import KvcrOptions, KvcrStore

NAMESPACE = Namespace("test-model", "1", "float16", layout_name(LAYOUT), LAYOUT.page_bytes)


@pytest.fixture(params=REAL)
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return backend_options(request.param)


@pytest.fixture
def make_store():
    """Makes fresh stores of a capacity, with options."""

    def make(capacity: int, **options: Any) -> KvcrStore:
        return KvcrStore(KvcrOptions(**options), capacity, NAMESPACE)

    return make
