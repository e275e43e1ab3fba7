"""Prompts that hit after the tiers above were flushed, and anchors that stay."""

from __future__ import annotations

from itertools import product

import anyio
import pytest

from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.accounting import RequestAccount
from kvcr_actors.errors import ConfigError
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.virtual_time import run_virtual
from kvcr_actors.types import MissReason, StopPolicy
from tests.actors.cluster import on_all, single
from tests.actors.rig import virtual

A = chain("a", 6)


@virtual
async def test_scenario_17_a_prefix_that_a_prefetch_hangs_from_cannot_be_evicted_under_it() -> None:
    async with single(host_slots=8, read_s=1.0) as member:
        await member.store_away(1, A)
        await member.back_up(member.node(2, A[:2]))

        async def press() -> None:
            await anyio.sleep(0.5)
            ack = await member.back_up(member.node(3, chain("other", 4)))
            assert ack.failed, "what the prefetch hangs from and reads into is not given away"

        answer, _ = await on_all(member.prefetch("r", A), press())
        assert answer.pages == 6
        await member.restore("r", A)


@virtual
async def test_scenario_09_the_last_page_of_a_full_hit_is_left_to_the_engine_and_the_rest_is_used() -> None:
    async with single() as member:
        await member.store_away(1, A)
        answer = await member.prefetch("r", A[:5])  # an engine asks for n - 1 tokens: the last page is computed
        assert answer.pages == 5
        await member.restore("r", A[:5])


@virtual
async def test_scenario_48_a_prompt_hits_after_host_memory_is_flushed_in_each_policy() -> None:
    for policy in StopPolicy:
        async with single(prefetch_stop_policy=policy) as member:
            await member.back_up(member.node(1, A))
            await member.controller.wait_quiet(60)
            member.controller.clear_host()
            assert (await member.prefetch("r", A)).pages == 6
            await member.restore("r", A)


@virtual
async def test_scenario_48_a_prompt_that_does_not_hit_says_why_for_each_page() -> None:
    async with single(prefetch_threshold_pages=7) as member:
        await member.store_away(1, A)
        answer = await member.prefetch("r", A)
        assert isinstance(answer.account, RequestAccount)
        assert answer.account.reasons == {MissReason.BELOW_THRESHOLD: 6}


@virtual
async def test_scenario_49_a_host_smaller_than_the_device_makes_progress_under_load() -> None:
    async with single(host_slots=6, store=256) as member:
        paths = [chain(f"path {n}", 3) for n in range(20)]
        for n, keys in enumerate(paths):
            assert not (await member.back_up(member.node(n, keys))).failed
            await member.controller.wait_quiet(60)
        for n, keys in enumerate(paths):
            assert (await member.prefetch(f"r{n}", keys)).pages == 3
            await member.restore(f"r{n}", keys)


@virtual
async def test_scenario_50_a_cold_instance_hits_in_a_warm_store_and_a_fitting_request_is_admitted() -> None:
    for reserve in (0.0, 0.5, 0.9):
        async with single(host_slots=64, host_reserve_fraction=reserve) as member:
            await member.store_away(1, A)
            assert (await member.prefetch("r", A)).pages == 6
            await member.restore("r", A)


@virtual
async def test_scenario_50_a_configuration_admits_a_request_from_a_cold_host_or_refuses_to_start() -> None:
    started = refused = 0
    for slots, reserve, in_flight, threshold in product((6, 12), (0.0, 0.5, 0.9), (1, 4, 64), (1, 4, 6, 13)):
        settings = {
            "host_reserve_fraction": reserve,
            "prefetch_in_flight_pages": in_flight,
            "prefetch_threshold_pages": threshold,
        }
        try:
            async with single(host_slots=slots, **settings) as member:
                started += 1
                await member.store_away(1, keys := chain("cold", threshold))
                assert (await member.prefetch("r", keys)).pages == threshold, settings
                await member.restore("r", keys)
        except ConfigError:
            refused += 1
    assert started > 10
    assert refused > 10


def test_scenario_50_a_threshold_that_no_host_prefix_can_reach_is_refused_without_a_store_too() -> None:
    async def start() -> None:
        async with single(store=None, host_slots=4, prefetch_threshold_pages=5):
            pass

    with pytest.raises(ConfigError, match="prefetch_threshold_pages 5 is more than the 4 pages of the host"):
        run_virtual(start)


def test_scenario_56_an_unknown_configuration_key_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown configuration key 'prefetch_stop'"):
        ControllerConfig.from_mapping({"prefetch_stop": "best-effort"})
