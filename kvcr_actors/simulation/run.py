"""Runs seeds, each on a fresh loop with a virtual clock, one after the other or in several processes."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from logging import CRITICAL
from multiprocessing import get_context

import attrs
import structlog

from kvcr_actors.simulation.faults import Kind
from kvcr_actors.simulation.schedule import number_tasks, seeded_schedule
from kvcr_actors.simulation.world import SimulationOptions, World
from kvcr_actors.testing.virtual_time import BackendName, run_virtual

_CHUNK = 8
"""Seeds that a process takes at a time: a few seconds of work."""

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
            _raise_interrupt(error)
            failure = f"{type(error).__name__}: {error}"
    return SeedResult(seed, world.operations, world.virtual_s, world.fired, tuple(world.trace), failure)


def run_seeds(
    options: SimulationOptions, seeds: Sequence[int], advance: Callable[[SeedResult], None], jobs: int = 1
) -> None:
    """Run seeds up to the first that fails, in `jobs` processes, and tell of each in the order of the seeds."""
    if jobs == 1:
        _advance_to_failure((run_seed(options, seed) for seed in seeds), advance)
        return
    # Spawned, not forked: a child must not share the threads and loops of a parent that is embedded somewhere.
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        _advance_to_failure(pool.map(partial(_run_brief, options), seeds, chunksize=_CHUNK), advance)
    finally:
        pool.shutdown(cancel_futures=True)


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
    """A loop wraps a signal that came in the middle of its own work: it is no finding."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        cause = cause.__cause__ or cause.__context__


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
