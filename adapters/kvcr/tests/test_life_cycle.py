"""Start, refusal to start, the disk tier, the calmed progress thread, records, policies."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
import structlog
from prometheus_client import CollectorRegistry

from kvcr_actors import CacheLayout, ConfigError, Ownership, PoolSpec, StoreError, Tier
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.services import open_services
from kvcr_actors.testing.store_driver import LAYOUT, chain, driven
from kvcr_actors_kvcr import FetchHint, KvcrStoreCollector
from kvcr_actors_kvcr.calm import can_calm
from tests.pairs import side

pytestmark = pytest.mark.anyio
ONE_POOL = CacheLayout((PoolSpec("kv", 2, 2_048),))


async def test_a_control_port_that_is_taken_keeps_the_store_from_opening(make_store):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        store = make_store(4, control_port=taken.getsockname()[1])
        async with open_services() as services:
            with pytest.raises(StoreError, match="did not start"):
                await store.open(services, BytesHostMemory(LAYOUT, 4))
            with anyio.fail_after(1.0):
                await store.close(20.0)


async def test_a_store_that_is_not_required_and_cannot_start_says_so_and_serves_nothing(make_store):
    keys = chain("a", 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        store = make_store(4, control_port=taken.getsockname()[1], required=False)
        registry = CollectorRegistry()
        registry.register(KvcrStoreCollector(store))
        async with open_services() as services:
            await store.open(services, BytesHostMemory(LAYOUT, 4))
            assert "did not start" in store.traits.cannot_store
            assert store.describe()["cannot_store"] == store.traits.cannot_store
            assert registry.get_sample_value("kvcr_store_cannot_store") == 1
            store.begin_request("request", FetchHint("tcp://127.0.0.1:1", frozenset({1})).envelope("id"))
            assert await store.lookup(keys, "request").outcome() == (0, 0)
            store.end_request("request")
            with anyio.fail_after(1.0):
                await store.close(20.0)


async def test_a_layout_that_the_runner_cannot_take_is_no_error_where_the_store_is_not_required(make_store):
    many = CacheLayout(tuple(PoolSpec(f"pool{number}", 1, 8) for number in range(25)))
    async with open_services() as services:
        with pytest.raises(StoreError, match="25 pools; it takes 24"):
            await make_store(4).open(services, BytesHostMemory(many, 4))
        store = make_store(4, required=False)
        await store.open(services, BytesHostMemory(many, 4))
        assert "25 pools" in store.traits.cannot_store
        await store.close(1.0)


async def test_a_transport_list_without_tcp_is_refused_with_what_to_do(make_store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("UCX_TLS", "sm,self")
    async with open_services() as services:
        with pytest.raises(StoreError, match="add tcp"):
            await make_store(4).open(services, BytesHostMemory(LAYOUT, 4))


async def test_a_host_tier_that_cannot_hold_one_request_is_refused(make_store):
    async with open_services() as services:
        with pytest.raises(StoreError, match="the host tier has 4 slots, and a request may have 5 pages"):
            await make_store(4, request_pages=5).open(services, BytesHostMemory(LAYOUT, 4))


async def test_spans_that_do_not_divide_a_page_are_refused(make_store):
    async with open_services() as services:
        with pytest.raises(ConfigError, match="5 spans do not divide kv's 192 bytes"):
            await make_store(4, spans="kv:5").open(services, BytesHostMemory(LAYOUT, 4))
        with pytest.raises(ConfigError, match="names the pool 'draft'"):
            await make_store(4, spans="draft:2").open(services, BytesHostMemory(LAYOUT, 4))


@pytest.mark.parametrize("policy", ["nobody", "kvcr.policy.Nobody", "no.such.module", "os.path"])
async def test_a_policy_that_is_none_is_refused(policy: str, make_store):
    async with open_services() as services:
        with pytest.raises(ConfigError, match="option policy="):
            await make_store(4, policy=policy).open(services, BytesHostMemory(LAYOUT, 4))


async def test_a_policy_by_dotted_path_evicts_by_its_own_rule(make_store):
    async with driven(lambda: make_store(2, policy="tests.policies.NewestFirst")) as driver:
        first, second, third = (chain(name, 1) for name in "abc")
        for keys in (first, second, third):
            await driver.write(keys)
        assert driver.store.contents() == frozenset(first + third)


async def test_evicted_pages_come_back_from_the_disk_tier(tmp_path: Path):
    options = {"control_port": 0, "disk_path": str(tmp_path), "disk_blocks": 16}
    async with side(ONE_POOL, capacity=4, **options) as one:
        keys = chain("a", 8)
        for start in (0, 4):
            assert await one.write(keys[start : start + 4], [1] * 4) == "oooo"
        assert one.store.contents() == frozenset(keys)
        assert one.store.describe()["held_on_disk"] == 4
        inventory = one.services.inventory
        assert inventory.holding(Tier.STORE, Ownership.STORE).keys() == frozenset(keys[:4]), "the disk"
        assert inventory.holding(Tier.HOST, Ownership.STORE).keys() == frozenset(keys[4:]), "the DRAM"
        assert await one.read(keys[:4], [1] * 4) == "oooo"
        assert names_in(tmp_path) == [], "nothing stays behind, however the process ends"


async def test_a_page_that_the_disk_gives_back_wrong_is_a_miss(tmp_path: Path):
    options = {"control_port": 0, "disk_path": str(tmp_path), "disk_blocks": 16}
    async with side(ONE_POOL, capacity=4, **options) as one:
        keys = chain("a", 8)
        for start in (0, 4):
            await one.write(keys[start : start + 4], [1] * 4)
        wipe_disk(tmp_path)
        assert "o" not in await one.read(keys[:4], [1] * 4)
        assert one.store.contents().isdisjoint(keys[:4])


async def test_layouts_that_the_disk_tier_cannot_take_are_refused(tmp_path: Path, make_store):
    async with open_services() as services:
        with pytest.raises(StoreError, match="takes one pool of one span"):
            await make_store(4, disk_path=str(tmp_path), disk_blocks=4).open(services, BytesHostMemory(LAYOUT, 4))


async def test_an_idle_store_leaves_the_core_alone(make_store):
    assert can_calm(), "the installed NIXL is one that this version knows"
    async with driven(lambda: make_store(4)) as driver:
        await driver.write(chain("a", 1))
        before = time.process_time()
        await anyio.sleep(1.0)
        assert time.process_time() - before < 0.5, "a spinning progress thread would have taken the whole second"
        assert driver.store.describe()["progress_calm"] is True


async def test_each_transfer_is_one_record_of_one_form(make_store):
    with structlog.testing.capture_logs() as logs:
        async with driven(lambda: make_store(4, diagnostic_telemetry=True)) as driver:
            keys = chain("a", 2)
            await driver.write(keys)
            await driver.read(keys)
    records = [{k: v for k, v in line.items() if k != "seconds"} for line in logs if line["event"] == "kvcr.transfer"]
    size = 2 * LAYOUT.page_bytes
    common = {"event": "kvcr.transfer", "log_level": "info", "pages": 2, "succeeded": 2, "spans": 6, "bytes": size}
    assert records == [
        {**common, "direction": "deposit", "source": "host"},
        {**common, "direction": "fetch", "source": "pool"},
    ]


async def test_nothing_is_published_where_the_inventory_is_off(make_store):
    async with driven(lambda: make_store(4, publish_inventory=False)) as driver:
        await driver.write(chain("a", 2))
        assert (len(driver.store.contents()), driver.services.events) == (2, [])


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def wipe_disk(folder: Path) -> None:
    """What a deleted file of the disk tier reads as; it has no name, but the runner has it open."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            if str(link.readlink()).startswith(str(folder)):
                with link.open("r+b") as file:
                    file.write(bytes(os.fstat(file.fileno()).st_size))
                return
    raise AssertionError(f"the runner has no file of {folder} open")


@pytest.fixture(autouse=True)
def _quiet_logs():
    logging.getLogger("nixl").setLevel(logging.WARNING)
