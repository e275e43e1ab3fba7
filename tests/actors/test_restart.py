"""An actor fails in the middle of a batch, with claims open: the next incarnation finds the books in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kvcr_actors.errors import ActorEscalatedError
from kvcr_actors.messages import ControllerFailed, PrefetchCancelled, RestoreFinished
from kvcr_actors.types import MissReason, PrefetchRequest, SkipReason
from tests.actors.rig import PlantedError, Rig, chain, live, virtual

pytestmark = pytest.mark.anyio


def raising_at(k: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, but its k-th use (from 0) raises."""
    seen = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == k + 1:
            raise PlantedError("planted")
        return call(*args, **kwargs)

    return wrapped


def plant(rig: Rig, place: str, k: int) -> None:
    """Have the k-th use of a place inside an actor's handling raise."""
    host, device = rig.assembly.host, rig.device
    match place:
        case "submit":
            device.submit = raising_at(k, device.submit)  # type: ignore[method-assign]
        case "reserve":
            host.reserve = raising_at(k, host.reserve)  # type: ignore[method-assign]
        case "commit":
            host.commit = raising_at(k, host.commit)  # type: ignore[method-assign]
        case "match":
            host.match = raising_at(k, host.match)  # type: ignore[method-assign]
        case "touch":
            host.touch = raising_at(k, host.touch)  # type: ignore[method-assign]
        case _:
            actor: Any = rig.supervisor(place)._actor
            actor._tasks.start_soon = raising_at(k, actor._tasks.start_soon)


PLACES = ("submit", "reserve", "commit", "match", "touch", "confirmation", "deposit", "prefetch", "restore")


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("place", PLACES)
async def test_scenario_16_whatever_raises_on_the_way_every_order_ends_once_and_no_claim_is_left(
    place: str, k: int
) -> None:
    rig = Rig(store_latency_s=0.002, restarts=3, restart_backoff_s=0.001)
    async with rig.running():
        plant(rig, place, k)
        await live(rig)
        await rig.quiet()
        await rig.ports_quiet()
        rig.check()
        assert sum(actor["restarts"] for actor in rig.assembly.describe()["actors"].values()) <= 1
    rig.check()
    assert rig.failure is None


async def test_a_batch_of_prefetches_that_breaks_in_the_middle_answers_each_request_once() -> None:
    rig = Rig(store_latency_s=0.005, restart_backoff_s=0.001)
    held, stored = chain("held", 2), chain("stored", 2)
    async with rig.running():
        await rig.stored(stored)
        await rig.back_up(rig.node(held))
        await rig.prefetched("ready before", held)
        plant(rig, "touch", 3)
        # One that host memory decides, one that reads, one that finds nothing, one that breaks, one behind it.
        for request_id, keys in (
            ("host", held),
            ("reads", stored),
            ("absent", chain("absent", 1)),
            ("breaks", held),
            ("behind", held),
        ):
            rig.orders.prefetch(request := PrefetchRequest(request_id, keys))
            rig.desk.prefetch(request)
        rig.desk.flush_pending_backups()
        for request_id in ("breaks", "behind", "reads"):
            answer = await rig.reply(request_id)
            assert isinstance(answer, PrefetchCancelled), request_id
            assert set(answer.account.reasons) == {MissReason.STOPPED}
        assert await rig.reply("absent") is not None
        ids = rig.give_restore("host", 2)
        assert await rig.reply("host") is not None
        assert isinstance(await rig.reply("host"), RestoreFinished)
        rig.assert_bytes(ids, held)
        rig.give_cancel("ready before")
        assert isinstance(await rig.reply("ready before"), PrefetchCancelled)
        await rig.quiet()
        await rig.ports_quiet()
    rig.check()


async def test_a_batch_of_steps_that_breaks_in_the_middle_acknowledges_each_step_once() -> None:
    rig = Rig(restart_backoff_s=0.001)
    async with rig.running():
        plant(rig, "submit", 1)
        steps = [rig.give_step(rig.node(chain(name, 2))) for name in "abc"]
        acks = [await rig.ack(step) for step in steps]
        assert [ack is not None and [why for _, why in ack.failed] for ack in acks] == [
            [],
            [SkipReason.STOPPED],
            [SkipReason.STOPPED],
        ]
        await rig.quiet()
        assert rig.assembly.host.contents() == set(chain("a", 2))
    rig.check()


@pytest.mark.parametrize("actor", ["confirmation", "deposit", "prefetch", "restore"])
async def test_an_actor_that_escalates_ends_everything_answered_and_says_so_last(actor: str) -> None:
    rig = Rig(store_latency_s=0.005, restarts=0)
    keys = chain("a", 3)
    await rig.start()
    await rig.stored(keys)
    await rig.back_up(rig.node(chain("held", 2)))
    await rig.prefetched("ready", chain("held", 2))
    living: Any = rig.supervisor(actor)._actor
    rig.give_prefetch("searching", keys)
    step = rig.give_step(rig.node(chain("b", 2)))
    await anyio.sleep(0.002)

    async def explode() -> None:
        raise PlantedError("planted")

    living._tasks.start_soon(explode)
    assert await rig.ack(step) is not None
    while not isinstance(await rig.reply("ready"), PrefetchCancelled):
        pass
    assert await rig.reply("searching") is not None
    failed = await rig.answer(lambda one: isinstance(one, ControllerFailed))
    assert failed is not None
    assert f"actor {actor} failed 1 times" in failed.error
    # What is asked for from now on is refused at once, in the right form.
    rig.give_prefetch("after", keys)
    after = rig.give_step(rig.node(chain("c", 1)))
    assert await rig.reply("after") is not None
    assert await rig.ack(after) is not None
    await rig.close()
    rig.check()
    assert isinstance(rig.failure, ActorEscalatedError)
    assert sum(isinstance(one, ControllerFailed) for one in rig.completions) == 1


@virtual
async def test_a_store_task_that_raises_is_a_fault_of_the_store_alone() -> None:
    rig = Rig()
    keys = chain("a", 2)
    async with rig.running():
        await rig.stored(keys)
        assert rig.store is not None
        real = rig.store._backend.read

        def raising(*args: object) -> Any:
            raise OSError("planted")

        rig.store._backend.read = raising  # type: ignore[method-assign]
        answer = await rig.prefetched("r", keys)
        assert answer.account is not None
        assert answer.account.reasons == {MissReason.DEADLINE: 2}
        rig.store._backend.read = real  # type: ignore[method-assign]
        assert rig.stats.store_faults == 1
        ack = await rig.back_up(rig.node(chain("b", 2)))
        assert ack is not None
        assert not ack.failed
        await rig.quiet()
        rig.check(quiet=False)  # nobody can tell whether that read is quiet
    assert rig.failure is None


async def test_a_device_task_that_raises_ends_the_controller_with_everything_answered() -> None:
    rig = Rig()
    await rig.start()

    def raising(*args: object) -> Any:
        raise OSError("planted")

    rig.device._copy_all = raising  # type: ignore[method-assign]
    step = rig.give_step(rig.node(chain("a", 2)))
    assert await rig.ack(step) is not None
    assert await rig.answer(lambda one: isinstance(one, ControllerFailed)) is not None
    with pytest.raises(OSError, match="planted"):
        await rig.host.stop(10)
    rig.check(quiet=False)


async def test_a_restore_that_breaks_behind_its_launch_keeps_its_claims_until_the_copy_is_quiet() -> None:
    rig = Rig(store_pages=None, restart_backoff_s=0.001)
    keys = chain("a", 2)
    async with rig.running():
        await rig.back_up(rig.node(keys))
        await rig.prefetched("r", keys)
        plant(rig, "restore", 0)
        fence = anyio.Event()
        rig.give_restore("r", 2, fence=fence)
        await anyio.sleep(0.05)
        assert rig.assembly.ledger.quarantined_bytes == 2 * 29
        rig.forget_host()
        assert rig.assembly.host.contents() == set(keys)
        fence.set()
        finished = await rig.reply("r")
        assert isinstance(finished, RestoreFinished)
        assert finished.pages == 0
        await rig.quiet()
    rig.check()
