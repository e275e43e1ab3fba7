"""The testing kit's ranks end operations as the real ones do, under virtual time."""

from __future__ import annotations

import anyio
import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.ports import RankTerms
from kvcr_actors.ranks.single import SingleRank
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.ranks import RankHub
from kvcr_actors.testing.services import RecordingServices, open_services

pytestmark = pytest.mark.anyio


async def opened(hub: RankHub, services: RecordingServices) -> None:
    for one in hub.ranks:
        await one.open(services, RankTerms(hub.deadline_s))


async def agree(hub: RankHub, name: str, *bits: int) -> list[int]:
    results = [-1] * len(bits)

    async def one(rank: int) -> None:
        results[rank] = await hub.ranks[rank].agree(("test", name), bits[rank])

    async with anyio.create_task_group() as tasks:
        for rank in range(len(bits)):
            tasks.start_soon(one, rank)
    return results


async def test_bits_are_intersected_in_one_round_for_all_that_is_open() -> None:
    hub = RankHub(3)
    async with open_services() as services, hub.running():
        await opened(hub, services)
        assert await agree(hub, "x", 0b111, 0b110, 0b011) == [0b010] * 3
        assert hub.rounds == 1
        assert len({verdict.round for verdict in hub.verdicts}) == 1


async def test_an_orphan_ends_at_its_deadline() -> None:
    hub = RankHub(2, deadline_s=0.05)
    async with open_services() as services, hub.running():
        await opened(hub, services)
        assert await hub.ranks[0].agree(("test", "orphan"), 1) == 0
        assert await agree(hub, "next", 1, 1) == [1, 1]


async def test_a_frozen_rank_makes_misses_on_the_others() -> None:
    hub = RankHub(2, deadline_s=0.05)
    async with open_services() as services, hub.running():
        await opened(hub, services)
        hub.ranks[1].frozen = True
        assert await hub.ranks[0].agree(("test", "x"), 1) == 0
        hub.ranks[1].frozen = False
        assert await agree(hub, "y", 1, 1) == [1, 1]


async def test_a_closed_rank_makes_misses_at_once_and_opens_again() -> None:
    hub = RankHub(2, deadline_s=1000.0)
    async with open_services() as services, hub.running():
        await opened(hub, services)
        await hub.ranks[1].close(1.0)
        assert await agree(hub, "x", 1, 1) == [0, 0]
        await hub.ranks[1].open(services, RankTerms(1000.0))
        assert await agree(hub, "y", 1, 1) == [1, 1]


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.STALL])
async def test_a_faulty_round_ends_everything_alike(fault: Fault) -> None:
    hub = RankHub(2, deadline_s=0.05, faults=FaultPlan({("round", 0): fault}))
    async with open_services() as services, hub.running():
        await opened(hub, services)
        assert await agree(hub, "x", 1, 1) == [0, 0]
        assert await agree(hub, "y", 1, 1) == [1, 1]
        assert hub.failed_rounds == 1


async def test_a_withdrawn_proposal_still_joins() -> None:
    hub = RankHub(2)
    async with open_services() as services, hub.running():
        await opened(hub, services)
        hub.ranks[0].propose(("test", "x"), 3).withdraw()
        assert await hub.ranks[1].agree(("test", "x"), 3) == 0


async def test_terms_that_differ_are_refused_by_name() -> None:
    hub = RankHub(2)
    async with open_services() as services:
        await hub.ranks[0].open(services, RankTerms(1.0, {"page_tokens": "16"}))
        with pytest.raises(ConfigError, match="page_tokens: 64 on rank 1, 16 on rank 0"):
            await hub.ranks[1].open(services, RankTerms(1.0, {"page_tokens": "64"}))


async def test_a_single_rank_agrees_with_itself() -> None:
    ranks = SingleRank()
    async with open_services() as services:
        await ranks.open(services, RankTerms(1.0))
        assert await ranks.agree(("test", "x"), 5) == 5
        proposal = ranks.propose(("test", "x"), 5)
        proposal.withdraw()
        assert await proposal.outcome() == 5
        await ranks.close(1.0)
        assert ranks.describe() == {"rank": 0, "size": 1}
