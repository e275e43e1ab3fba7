"""Runs seeds, each on a fresh loop with a virtual clock, one after the other or in several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from functools import partial
from logging import CRITICAL
from typing import cast

import attrs
import structlog

from kvcr_actors.simulation.faults import Kind
from kvcr_actors.simulation.processes import in_processes
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
        except BaseException as error:
            _raise_interrupt(error)
            if not isinstance(error, Exception):
                raise
            failure = f"{type(error).__name__}: {error}"
    return SeedResult(seed, world.operations, world.virtual_s, world.fired, tuple(world.trace), failure)


def run_seeds(
    options: SimulationOptions, seeds: Sequence[int], advance: Callable[[SeedResult], None], jobs: int = 1
) -> None:
    """Run seeds up to the first that fails, in `jobs` processes, and tell of each in the order of the seeds.

    No process outlives the call, however it ends.
    """
    if jobs == 1:
        _advance_to_failure((run_seed(options, seed) for seed in seeds), advance)
        return
    with closing(in_processes(partial(_run_brief, options), seeds, jobs)) as results:
        _advance_to_failure(results, advance)


def _advance_to_failure(results: Iterable[SeedResult], advance: Callable[[SeedResult], None]) -> None:
    for result in results:
        advance(result)
        if result.failure is not None:
            return


def _run_brief(options: SimulationOptions, seed: int) -> SeedResult:
    """Of a seed that kept every rule nobody wants the trace, which would cost more than the seed to send."""
    result = run_seed(options, seed)
    return result if result.failure is not None else attrs.evolve(result, trace=())


def _raise_interrupt(error: BaseException) -> None:
    """A loop wraps a signal that came in the middle of its own work, trio in groups: it is no finding."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        if isinstance(one, KeyboardInterrupt):
            raise one from None
        seen.add(id(one))
        waiting += (one.__cause__, one.__context__)
        if isinstance(one, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", one).exceptions


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
