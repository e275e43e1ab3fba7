"""Runs seeds one after the other, each on a fresh loop with a virtual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from logging import CRITICAL

import attrs
import structlog

from kvcr_actors.simulation.faults import Kind
from kvcr_actors.simulation.schedule import number_tasks, seeded_schedule
from kvcr_actors.simulation.world import SimulationOptions, World
from kvcr_actors.testing.virtual_time import BackendName, run_virtual

_BACKENDS: dict[str, BackendName] = {"asyncio": "asyncio-virtual", "trio": "trio-virtual"}


@attrs.frozen
class SeedResult:
    """How one seed ended. `failure` names the rule that it broke; `trace` is everything that happened."""

    seed: int
    operations: int
    virtual_s: float
    fired: Counter[Kind]
    trace: tuple[str, ...]
    failure: str | None = None


def run_seed(options: SimulationOptions, seed: int) -> SeedResult:
    """Run one seed to its end; whatever it raises is its failure."""
    world = World(options, seed)
    failure = None
    with quiet_logs(), seeded_schedule():
        try:
            run_virtual(partial(_live, world), backend=_BACKENDS[options.loop], seed=seed)
        except Exception as error:  # noqa: BLE001 - any error is what a simulation looks for
            failure = f"{type(error).__name__}: {error}"
    return SeedResult(seed, world.operations, world.virtual_s, world.fired, tuple(world.trace), failure)


def run_seeds(options: SimulationOptions, seeds: Iterable[int], advance: Callable[[SeedResult], None]) -> None:
    """Run seeds up to the first that fails, and tell of each."""
    for seed in seeds:
        result = run_seed(options, seed)
        advance(result)
        if result.failure is not None:
            return


async def _live(world: World) -> None:
    number_tasks()
    await world.live()


@contextmanager
def quiet_logs() -> Generator[None]:
    """Faults are what is asked for: nobody wants a line for each."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
