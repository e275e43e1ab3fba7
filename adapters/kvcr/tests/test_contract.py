"""The store contract, over the real runner."""

from __future__ import annotations

from functools import partial

import pytest

from kvcr_actors.testing.contract import BOUNDED_LRU, EVERY_STORE, Check

pytestmark = pytest.mark.anyio

each_check = pytest.mark.parametrize("check", EVERY_STORE + BOUNDED_LRU, ids=lambda check: check.__name__)


@each_check
async def test_the_runner_keeps_the_contract(check: Check, make_store) -> None:
    await check(make_store)


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"verify_transfer_bytes": True},
        {"combine_page_reads": False, "combine_page_writes": False},
        {"spans": "kv:2,swa:4"},
        {"huge_pages": True, "calm_progress_thread": False},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("check", EVERY_STORE, ids=lambda check: check.__name__)
async def test_its_options_keep_the_contract_too(check: Check, options, make_store) -> None:
    await check(partial(make_store, **options))
