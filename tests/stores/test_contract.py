"""The store contract over every store of the package."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcr_actors.ports import Store
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.contract import BOUNDED_LRU, EVERY_STORE, Check
from kvcr_actors.testing.stores import FaultyStore

pytestmark = pytest.mark.anyio
each_check = pytest.mark.parametrize("check", EVERY_STORE + BOUNDED_LRU, ids=lambda check: check.__name__)


@pytest.mark.real_clock
@each_check
async def test_scenario_57_embedded_stores_keep_the_contract(check: Check, make_store: Callable[[int], Store]) -> None:
    await check(make_store)


@each_check
async def test_scenario_57_the_store_without_threads_keeps_the_contract(check: Check) -> None:
    await check(lambda capacity: FaultyStore(memory_backend(capacity)))
