"""What the store does when the runner itself fails: every operation ends, memory is kept until it is known quiet."""

from __future__ import annotations

from time import monotonic

import anyio
import pytest

from kvcr_actors import DeadlineError, StoreError
from kvcr_actors.ports import PageBatch, PageOutcome
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.services import open_services
from kvcr_actors.testing.store_driver import LAYOUT, chain, driven, letters
from kvcr_actors_kvcr import runner as runner_module

pytestmark = pytest.mark.anyio

KEYS = chain("a", 4)
KINDS = (ValueError, SystemExit, KeyboardInterrupt)
"""What a library may raise, rightly or not."""
BATCH = PageBatch(KEYS, (tuple(range(4)), (-1,) * 4, (-1,) * 4), (None, *KEYS[:-1]))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_of_the_runner_that_raises_fails_its_operation_alone(
    make_store, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
):
    async with driven(lambda: make_store(8)) as driver:
        kvcr = driver.store._runner.kvcr

        def refuse(*_: object) -> None:
            raise kind("planted")

        with monkeypatch.context() as patch:
            patch.setattr(kvcr, "deposit", refuse)
            assert letters(await driver.write(KEYS)) == "ffff"
        assert letters(await driver.write(KEYS)) == "oooo"
        assert await driver.read(KEYS) == "oooo"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_runner_that_fails_ends_every_operation_and_serves_nothing(
    make_store, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
):
    async with open_services() as services:
        store = make_store(8)
        await store.open(services, BytesHostMemory(LAYOUT, 8))

        def fail() -> None:
            raise kind("planted")

        monkeypatch.setattr(store._runner.kvcr, "poll_completed", fail)
        with anyio.fail_after(20):
            assert set((await store.write(BATCH).outcome()).pages) == {PageOutcome.FAILED}
            assert set((await store.write(BATCH).outcome()).pages) == {PageOutcome.FAILED}
        assert await store.lookup(KEYS, "request").outcome() == (0,) * 4
        # It fails after the close, too: nobody knows whether its memory is quiet.
        with pytest.raises(DeadlineError, match=r"stay mapped.*planted") as raised:
            await store.close(5.0)
        assert isinstance(raised.value.__cause__, StoreError)


async def test_memory_of_a_runner_that_does_not_close_is_kept_and_its_operations_are_not_quiet(
    make_store, monkeypatch: pytest.MonkeyPatch
):
    kept = len(runner_module.LEFT_MAPPED)
    async with open_services() as services:
        store = make_store(8)
        await store.open(services, BytesHostMemory(LAYOUT, 8))
        kvcr = store._runner.kvcr
        real = kvcr.close

        def refuse() -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(kvcr, "close", refuse)
        monkeypatch.setattr(kvcr, "poll_completed", list)  # completions do not come any more
        write = store.write(BATCH)
        with anyio.fail_after(20), pytest.raises(DeadlineError, match="not quiet after its close"):
            await store.close(0.5)
        assert set((await write.outcome()).pages) == {PageOutcome.FAILED}
        assert not write.is_quiet
        assert len(runner_module.LEFT_MAPPED) == kept + 1
        real()


async def test_a_local_copy_that_overruns_its_deadline_retires_the_store(make_store, monkeypatch: pytest.MonkeyPatch):
    # The runner reports such a copy as failed while it may still write: neither its slots nor its pool can be trusted.
    store = make_store(8, operation_timeout_ms=100, abandon_timeout_ms=200, remote_wait_ms=100, close_wait_ms=1_000)
    async with open_services() as services:
        await store.open(services, BytesHostMemory(LAYOUT, 8))
        progress = store._runner.kvcr._core._progress
        poll, until = progress.poll_transfer, monotonic() + 0.3

        def overrun(transfer_id: int, **options: bool) -> tuple[bool, object] | None:
            ended = poll(transfer_id, **options) if monotonic() > until else None
            return None if ended is None else (False, None)

        monkeypatch.setattr(progress, "poll_transfer", overrun)
        write = store.write(BATCH)
        with anyio.fail_after(20):
            assert set((await write.outcome()).pages) == {PageOutcome.FAILED}
        monkeypatch.undo()
        assert not write.is_quiet, "its slots stay claimed"
        assert store.describe()["unquiet_bytes"] == 4 * LAYOUT.pools[0].page_bytes
        assert set((await store.write(BATCH).outcome()).pages) == {PageOutcome.FAILED}
        assert await store.lookup(KEYS, "request").outcome() == (0,) * 4
        with anyio.fail_after(20):
            await store.close(5.0)
        assert write.is_quiet, "a runner that closed is quiet"
