"""Resets that meet a store on its way in, and what is refused at the door of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import anyio
import pytest

from kvcr_actors import CacheController, ConfigError, InvalidNodeError, open_controller
from kvcr_actors.controller import HostKind
from kvcr_actors.core.keys import Namespace, layout_name
from kvcr_actors.messages import PrefetchReady
from kvcr_actors.stores.backend import PageBackend
from kvcr_actors.stores.disk import disk_backend
from kvcr_actors.stores.memory import memory_backend
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import PageKey, Tier
from tests.actors.rig import LAYOUT, TRAITS, chain, virtual
from tests.actors.test_reset import ResetRig
from tests.doors import Ports

pytestmark = pytest.mark.anyio

A = chain("a", 4)
NAMESPACE = Namespace("test-model", "1", "uint8", layout_name(LAYOUT), LAYOUT.page_bytes)
NO_STORES = ("/a/path", 5, object(), FaultyStore)


class ComingStore(FaultyStore):
    """A store whose open takes a while, and which holds pages of an earlier life."""

    def __init__(self, faults: FaultPlan | None = None, backend: PageBackend | None = None) -> None:
        super().__init__(backend or memory_backend(64), faults, traits=TRAITS, name="coming")

    async def open(self, services: Any, host: Any) -> None:
        await super().open(services, host)
        await anyio.sleep(1.0)


@asynccontextmanager
async def filled(keys: Sequence[PageKey], faults: FaultPlan | None = None) -> AsyncGenerator[ComingStore]:
    """A store over a folder that a controller of the old weights wrote."""
    with TemporaryDirectory() as folder:
        store = ComingStore(backend=disk_backend(Path(folder), 64, NAMESPACE))
        async with ResetRig(store_pages=None).running() as rig:
            await rig.assembly.slot.attach(store)
            await rig.back_up(rig.node(keys))
            await rig.quiet()
            assert store.contents() == frozenset(keys)
        yield ComingStore(faults, disk_backend(Path(folder), 64, NAMESPACE))


async def assert_absent(rig: ResetRig, keys: Sequence[PageKey]) -> None:
    rig.give_prefetch("later", keys)
    ready = await rig.reply("later")
    assert isinstance(ready, PrefetchReady)
    assert ready.pages == 0, "pages of before the last reset were served"


@virtual
async def test_a_store_that_comes_by_one_reset_is_cleared_by_the_next() -> None:
    async with filled(A) as store, ResetRig().running() as rig:
        rig.give_reset("1", clear=False, store=store)
        await anyio.sleep(0.1)
        rig.give_reset("2", clear=True)
        first, second = await rig.finished("1"), await rig.finished("2")
        assert (first.error, second.error) == (None, None)
        assert second.store_pages == len(A)
        assert rig.assembly.store is store
        assert store.contents() == frozenset()
        await assert_absent(rig, A)


@virtual
async def test_of_two_resets_at_once_the_store_of_the_second_stays() -> None:
    last = ComingStore()
    async with filled(A) as store, ResetRig().running() as rig:
        rig.give_reset("1", clear=False, store=store)
        rig.give_reset("2", clear=False, store=last)
        first, second = await rig.finished("1"), await rig.finished("2")
        assert first.error is not None
        assert "store coming was not attached: a reset began while it was on its way" in first.error
        assert second.error is None
        assert rig.assembly.store is last
        await assert_absent(rig, A)


@virtual
async def test_a_store_that_is_being_attached_serves_nothing_of_before_a_reset() -> None:
    async with filled(A) as store, ResetRig(store_pages=None).running() as rig:
        refused: list[str] = []

        async def attach() -> None:
            try:
                await rig.assembly.slot.attach(store)
            except Exception as error:  # noqa: BLE001 - looked at below
                refused.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(attach)
            await anyio.sleep(0.1)
            rig.give_reset("1", clear=False)
            await rig.finished("1")
        assert refused == ["a reset began while it was on its way, and did not say that it is to be cleared"]
        assert rig.assembly.store is None
        assert rig.index.keys(Tier.STORE) == frozenset()
        await assert_absent(rig, A)


@virtual
async def test_a_store_on_its_way_that_cannot_be_cleared_is_not_attached() -> None:
    async with filled(A, FaultPlan.always(Fault.FAIL, "clear")) as store, ResetRig().running() as rig:
        rig.give_reset("1", clear=False, store=store)
        await anyio.sleep(0.1)
        rig.give_reset("2", clear=True)
        first = await rig.finished("1")
        assert first.error is not None
        assert "it was not cleared: injected" in first.error
        await rig.finished("2")
        assert rig.assembly.store is None
        await assert_absent(rig, A)


@pytest.mark.parametrize("host", ["thread", "inline"])
def test_what_is_no_store_is_refused_at_the_door(host: HostKind) -> None:
    with CacheController(**Ports(store_pages=None).arguments, host=host) as cache:
        for wrong in cast("tuple[Any, ...]", NO_STORES):
            with pytest.raises(ConfigError, match="give a store"):
                cache.reset("r", store=wrong)
            with pytest.raises(ConfigError, match="give a store"):
                cache.attach_store(wrong)
        for wrong in cast("tuple[Any, ...]", ("no", 1, None)):
            with pytest.raises(ConfigError, match="not a bool"):
                cache.reset("r", clear=wrong)
        cache.wait_quiet(10.0)
        assert cache.take() == []


async def test_a_reset_that_is_refused_forgets_nothing() -> None:
    ports = Ports(store_pages=None)
    async with open_controller(**ports.arguments) as cache:
        await cache.backup([ports.node(A)])
        for wrong in cast("tuple[Any, ...]", ([1], {}, True, (1, [2]))):
            with pytest.raises(InvalidNodeError, match="label"):
                await cache.reset(wrong)
        for wrong in cast("tuple[Any, ...]", ("x", float("nan"), float("inf"))):
            with pytest.raises(ConfigError, match="timeout_s"):
                await cache.reset("r", timeout_s=wrong)
        for wrong in cast("tuple[Any, ...]", NO_STORES):
            with pytest.raises(ConfigError, match="give a store"):
                await cache.reset("r", store=wrong)
            with pytest.raises(ConfigError, match="give a store"):
                await cache.attach_store(wrong)
        await cache.wait_quiet()
        assert cache.host_contents() == frozenset(A)
