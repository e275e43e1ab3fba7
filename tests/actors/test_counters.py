"""Counters of a whole controller: each moves in some life, none when nothing happens."""

from __future__ import annotations

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcr_actors.core.inventory import TierCleared
from kvcr_actors.messages import PrefetchCancelled
from kvcr_actors.metrics import Gauges, Metrics
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.types import MissReason, Tier
from tests.actors.rig import Rig, chain, live, virtual

A, B = chain("a", 3), chain("b", 3)

ELSEWHERE = {"kvcr_actors_event_silence_seconds", "kvcr_actors_deposit_shed_pages"}
"""Moved by a real publisher (`tests/events/test_zmq.py`), and by a store that is too slow (`test_deposit.py`)."""


class Scrapes:
    """Reads a rig's metrics as a scraper does; `moved` has the families that ever had a sample above 0."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._metrics = Metrics(lambda: rig.stats, self._gauges)
        self.moved: set[str] = set()
        self.known: set[str] = set()

    def take(self) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(self._metrics.render().decode()):
            self.known.add(family.name)
            for sample in family.samples:
                found[sample.name, *sorted(sample.labels.values())] = sample.value
                if sample.value > 0:
                    self.moved.add(family.name)
        return found

    def _gauges(self) -> Gauges:
        ledger, actors = self._rig.assembly.ledger, self._rig.assembly.describe()["actors"]
        return Gauges(
            claims_taken=ledger.taken,
            claims_released=ledger.released,
            claims_open=ledger.open,
            quarantined_bytes=ledger.quarantined_bytes,
            inbox_depth={name: actor["inbox"] for name, actor in actors.items()},
            restarts={name: actor["restarts"] for name, actor in actors.items()},
        )


async def move_everything(rig: Rig, scrapes: Scrapes) -> None:
    store, keys = rig.store, chain("child", 2)
    assert store is not None
    rig.give_step(rig.node(A))
    scrapes.take()  # the step waits in its inbox
    await rig.quiet()
    assert await rig.restored("from the host", A) is not None
    rig.forget_host()
    assert await rig.restored("from the store", A) is not None
    await rig.back_up(rig.node(keys[1:], keys[0]))  # skipped: the host lacks its parent
    await rig.prefetched("absent", B)
    await rig.prefetched("cancelled", A)
    rig.give_cancel("cancelled")
    assert isinstance(await rig.reply("cancelled"), PrefetchCancelled)
    await rig.crash("prefetch")
    store.faults = FaultPlan({("write", 0): Fault.FAIL, ("write", 1): Fault.LATE})
    await rig.back_up(rig.node(B))
    await rig.quiet()
    scrapes.take()  # a write is not quiet
    await rig.ports_quiet()
    store.faults = FaultPlan.always(Fault.FAIL, "read")
    rig.forget_host()
    answer = await rig.prefetched("failing", A)
    assert answer.account is not None
    assert answer.account.reasons == {MissReason.READ_FAILED: 3}
    await rig.back_up(rig.node(chain("more", 3)))
    await rig.quiet()
    rig.store._backend.align = None  # type: ignore[union-attr,assignment] # a call that raises
    await rig.prefetched("raising", A)
    await rig.quiet()


@virtual
async def test_scenario_55_every_declared_metric_moves_in_the_life_of_a_controller() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcr_actors.events.feed.CHANGES_KEPT", 3)
        rig = Rig(host_slots=8, store_pages=5, deposit_retries=1, inbox_limit=8)
    scrapes = Scrapes(rig)
    async with rig.running():
        await move_everything(rig, scrapes)
        state = rig.assembly._state
        assert state is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvcr_actors.events.intake.PUBLISHES_KEPT", 3)
            for _ in range(20):  # the publisher has no turn in between
                state.publish([TierCleared(Tier.DEVICE)])
        await rig.quiet()
        scrapes.take()
    assert scrapes.known - scrapes.moved == ELSEWHERE


@virtual
async def test_scenario_55_idle_leaves_every_counter_flat() -> None:
    rig = Rig()
    scrapes = Scrapes(rig)
    async with rig.running():
        await live(rig)
        await rig.quiet()
        before = scrapes.take()
        await anyio.sleep(50_000)
        rig.desk.flush_pending_backups()
        await rig.quiet()
        assert scrapes.take() == before
    rig.check()


@virtual
async def test_scenario_55_for_each_tier_queried_is_used_plus_the_reasons_after_any_life() -> None:
    rig = Rig(store_faults=FaultPlan({("read", 1): Fault.FAIL, ("read", 2): Fault.FAIL, ("write", 1): Fault.FAIL}))
    async with rig.running():
        await live(rig)
        await rig.quiet()
        for tier in (rig.stats.host, rig.stats.store):
            assert tier.queried == tier.used + tier.reasons.total() > 0
    rig.check()
