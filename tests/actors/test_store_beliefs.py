"""What host pages believe of the store: it may evict a page in the very turn in which it answered for it."""

from __future__ import annotations

from typing import Any

import pytest

from kvcr_actors.core.inventory import BlocksRemoved
from kvcr_actors.ports import BatchOutcome, PageBatch
from kvcr_actors.transfers import Operation
from kvcr_actors.types import PageKey
from tests.actors.rig import Rig, chain

pytestmark = pytest.mark.anyio


def evict_after(rig: Rig, call: str, keys: tuple[PageKey, ...]) -> None:
    """Have the store evict pages right after its next read or write of them, before any task resumes."""
    store = rig.store
    assert store is not None
    real = getattr(store, call)

    def evict() -> None:
        assert store is not None
        store._backend.discard(keys)
        assert store._services is not None
        events = store._backend.take_events()
        assert any(isinstance(event, BlocksRemoved) for event in events)
        store._services.publish(events)

    def then_evict(batch: PageBatch, *more: Any) -> Operation[BatchOutcome]:
        operation: Operation[BatchOutcome] = real(batch, *more)
        if set(keys) <= set(batch.keys):
            setattr(store, call, real)
            operation.when_quiet(evict)
        return operation

    setattr(store, call, then_evict)


async def test_pages_that_the_store_evicts_right_after_their_read_are_written_again_before_their_child() -> None:
    rig = Rig()
    keys = chain("a", 3)
    async with rig.running():
        await rig.stored(keys[:2])
        evict_after(rig, "read", keys[:2])
        assert (await rig.prefetched("r", keys[:2])).pages == 2
        rig.give_cancel("r")
        await rig.quiet()
        rig.check()
        await rig.back_up(rig.node(keys[2:], keys[1]))
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.contents() == set(keys)
    rig.check()


async def test_pages_that_the_store_evicts_right_after_their_write_are_written_again_before_their_child() -> None:
    rig = Rig()
    keys = chain("a", 3)
    async with rig.running():
        evict_after(rig, "write", keys[:2])
        await rig.back_up(rig.node(keys[:2]))
        await rig.quiet()
        rig.check()
        assert rig.stats.deposit.deposited == 2
        assert not rig.stats.deposit.skipped
        await rig.back_up(rig.node(keys[2:], keys[1]))
        await rig.quiet()
        assert rig.store is not None
        assert rig.store.contents() == set(keys)
    rig.check()
