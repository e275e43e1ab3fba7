"""The store that `docs/write_a_store.md` shows keeps the promises of the port: it is run as it stands there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from kvcr_actors.ports import Store
from kvcr_actors.store_client import StoreClient
from kvcr_actors.testing.contract import EVERY_STORE, Check
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.store_driver import LAYOUT, chain, letters
from tests.pages import code_of_page
from tests.store_client.held_store import batch_of, fill, is_filled

CODE = code_of_page(Path("docs/write_a_store.md"))
make_store = cast("Callable[[int], Store]", CODE["DictStore"])


@pytest.mark.anyio
@pytest.mark.real_clock
@pytest.mark.parametrize("check", EVERY_STORE, ids=lambda check: check.__name__)
async def test_the_store_of_the_page_keeps_the_contract(check: Check) -> None:
    await check(make_store)


def test_the_page_advises_the_test_that_runs_here() -> None:
    (mark,) = [mark for mark in CODE["test_contract"].pytestmark if mark.name == "parametrize"]
    assert mark.args[1] is EVERY_STORE


def test_it_serves_alone() -> None:
    host = BytesHostMemory(LAYOUT, 128)
    batch = batch_of(chain("a", 100))
    fill(host, batch)
    with StoreClient(make_store(200), host) as client:
        assert letters(client.write(batch).pages) == "o" * 100
        elsewhere = batch_of(chain("a", 50), 60)
        assert letters(client.read(elsewhere).pages) == "o" * 50
        assert is_filled(host, elsewhere)
