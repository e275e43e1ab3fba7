"""Scenarios 3 and 16: each actor's tasks are interrupted at the k-th await, for every k, in every way there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import pytest

from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.runtime.supervisor import Actor, ActorSpec
from kvcr_actors.testing.cancellation import Interruption, count_tasks
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from tests.actors.rig import PlantedError, Rig, live

ACTORS = ("confirmation", "deposit", "prefetch", "restore")
CHECKPOINTS = {"confirmation": 2, "deposit": 4, "prefetch": 4, "restore": 1}
"""The least that each actor suspends in one life."""


async def _break() -> None:
    raise PlantedError("planted")


def fail(rig: Rig, actor: str, tasks: Tasks) -> None:
    """A task of the actor raises: the incarnation ends, and the next one takes over."""
    del rig, actor
    tasks.start_soon(_break)


def stop(rig: Rig, actor: str, tasks: Tasks) -> None:
    """The controller is asked to stop: it drains."""
    del actor, tasks
    rig.host._program.ask_stop()
    rig.host._program.apply()


def give_up(rig: Rig, actor: str, tasks: Tasks) -> None:
    """The drain's budget is used up for this actor: it is cancelled, and the others drain."""
    rig.supervisor(actor).cancel()
    stop(rig, actor, tasks)


def kill(rig: Rig, actor: str, tasks: Tasks) -> None:
    """The whole controller is cancelled, without a drain."""
    del actor, tasks
    rig.host._program.ask_cancel()
    rig.host._program.apply()


Way = Callable[[Rig, str, Tasks], None]


def interrupt(rig: Rig, actor: str, k: int, way: Way) -> list[Interruption]:
    """Have the k-th suspension of the actor's tasks interrupted, counted over its incarnations."""
    made: list[Interruption] = []
    specs = rig.assembly._specs

    def interrupting(state: Any) -> Sequence[ActorSpec[Any]]:
        return [wrapped(spec) if spec.name == actor else spec for spec in specs(state)]

    def wrapped(spec: ActorSpec[Any]) -> ActorSpec[Any]:
        def make(tasks: Tasks) -> Actor[Any]:
            if not made:
                made.append(Interruption(k, lambda: way(rig, actor, tasks)))
                return spec.make(count_tasks(tasks, made[0]))
            return spec.make(tasks)

        return attrs.evolve(spec, make=make)

    rig.assembly._specs = interrupting
    return made


async def one_life(actor: str, k: int, way: Way) -> bool:
    """Whether the actor came as far as its k-th suspension."""
    rig = Rig(store_latency_s=0.01)
    made = interrupt(rig, actor, k, way)
    async with rig.running():
        await live(rig)
        if rig.host.is_running and not made[0].happened:
            await rig.quiet()
    # A killed loop takes the copies and writes that run on it along: nobody can tell that their memory is quiet.
    rig.check(quiet=way is not kill)
    if way is fail:
        assert rig.failure is None
        assert rig.supervisor(actor).describe()["restarts"] == made[0].happened
    return made[0].happened


@pytest.mark.parametrize("backend", VIRTUAL)
@pytest.mark.parametrize("way", [fail, stop, give_up, kill], ids=lambda way: way.__name__)
@pytest.mark.parametrize("actor", ACTORS)
def test_scenario_03_16_an_interruption_at_any_await_leaves_no_claim_slot_or_order_open(
    actor: str, way: Way, backend: BackendName
) -> None:
    k = 1
    while run_virtual(partial(one_life, actor, k, way), backend=backend):
        k += 1
    assert k > CHECKPOINTS[actor]
