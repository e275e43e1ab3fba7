"""Hits of policies at capacities: LRU and the bound in one pass each, the others by simulation in processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Final

import attrs

from kvcr_actors.errors import ConfigError
from kvcr_actors.lab.bound import Bound
from kvcr_actors.lab.simulate import simulate
from kvcr_actors.lab.stack import LruCurve, lru_curve
from kvcr_actors.lab.workload import Workload, workload
from kvcr_actors.replay.trace import TraceRequest
from kvcr_actors.types import Eviction, PageKey

BELADY: Final = "belady"
INFINITE: Final = "infinite"
POLICIES: Final = (*(policy.value for policy in Eviction), BELADY, INFINITE)
"""The policies of a controller, the bound that none can beat, and a cache without limit."""

_POINTS = 8
_SPAWN_PAGES = 50_000
"""Fewer pages than this, over all simulations, are not worth a process."""


@attrs.frozen
class Row:
    """Pages found of those asked for, by one policy at one capacity."""

    policy: str
    capacity_pages: int
    hits: int
    pages: int

    @property
    def ratio(self) -> float:
        """The share of pages that was found."""
        return self.hits / self.pages


@attrs.frozen
class Sweep:
    """What a sweep found. A miss is cold if the page was never asked for before; else more capacity would find it."""

    rows: Sequence[Row]
    requests: int
    pages: int
    unique: int
    largest: int
    """Pages of the largest request: a controller's host tier needs as many at least."""
    infinite: int
    """Hits without limit."""
    lru: LruCurve

    @property
    def cold(self) -> int:
        """Pages that no cache could have: asked for the first time."""
        return self.pages - self.infinite

    def row(self, policy: str, capacity: int) -> Row:
        """The row of a policy and a capacity; KeyError if it was not asked for."""
        for row in self.rows:
            if (row.policy, row.capacity_pages) == (policy, capacity):
                return row
        raise KeyError(f"{policy} at {capacity} pages was not swept")


def sweep(
    requests: Sequence[TraceRequest],
    capacities: Sequence[int] | None = None,
    policies: Sequence[str] = POLICIES,
    *,
    first: int = 0,
    jobs: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sweep:
    """Count the hits of each policy at each capacity (pages), as the sequential replay counts them.

    Without `capacities`: eight from the largest request to all that LRU can use. Hits count from request `first` on.
    `jobs` processes share the simulations (all cores by default; 1 uses none), so a script calls this below
    `if __name__ == "__main__"`. `progress` hears of points done, of all. ConfigError names what is wrong.
    """
    work = workload(requests)
    _check(work, capacities, policies, first, jobs)
    curve, bound = lru_curve(work, first), Bound(work, first)
    points = [*capacities] if capacities is not None else default_capacities(work, curve)
    counted: dict[tuple[str, int], int] = {}
    simulated = [(Eviction(name), point) for name in policies if _is_simulated(name) for point in points]
    total = len(policies) * len(points)
    for name in policies:
        if not _is_simulated(name):
            for point in points:
                counted[name, point] = _exact(name, point, curve, bound)
                progress(len(counted), total)
    # Small capacities evict most, and take longest.
    for (name, point), hits in _simulations(work, sorted(simulated, key=lambda task: task[1]), first, jobs):
        counted[name, point] = hits
        progress(len(counted), total)
    asked = sum(map(len, work.paths[first:]))
    rows = [Row(name, point, counted[name, point], asked) for name in policies for point in points]
    return Sweep(rows, len(work.paths) - first, asked, work.unique, work.largest, bound.infinite, curve)


def default_capacities(work: Workload, curve: LruCurve) -> list[int]:
    """Eight capacities, each the same multiple of the one before: from the largest request to all that LRU can use."""
    low, high = work.largest, max(work.largest, curve.enough)
    steps = {round(low * (high / low) ** (step / (_POINTS - 1))) for step in range(_POINTS)}
    return sorted(steps)


def _check(
    work: Workload, capacities: Sequence[int] | None, policies: Sequence[str], first: int, jobs: int | None
) -> None:
    for capacity in capacities or ():
        if type(capacity) is not int or capacity < 1:
            raise ConfigError(f"capacities: {capacity!r} is not a number of pages of 1 or more")
    for name in policies:
        if name not in POLICIES:
            raise ConfigError(f"policies: {name!r} is not known; use {', '.join(POLICIES)}")
    for what, values in (("capacities", capacities), ("policies", policies)):
        if values is not None and (not values or len(set(values)) != len(values)):
            raise ConfigError(f"{what}: {', '.join(map(str, values))!r} must name one at least, and none twice")
    if not 0 <= first < len(work.paths):
        raise ConfigError(f"first: {first} is not a request of the trace, which has {len(work.paths)}")
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs: {jobs}: simulations need a process to run in; give 1 or more")


def _is_simulated(name: str) -> bool:
    return name not in (Eviction.LRU, BELADY, INFINITE)


def _exact(name: str, capacity: int, curve: LruCurve, bound: Bound) -> int:
    if name == INFINITE:
        return bound.infinite
    return bound.at(capacity) if name == BELADY else curve.at(capacity)


_Task = tuple[Eviction, int]


def _simulations(
    work: Workload, tasks: Sequence[_Task], first: int, jobs: int | None
) -> Iterator[tuple[tuple[str, int], int]]:
    processes = min(len(tasks), jobs or os.cpu_count() or 1)
    if processes <= 1 or work.pages * len(tasks) < _SPAWN_PAGES:
        keys = work.keys if tasks else []
        for task in tasks:
            yield task, _hits(keys, task, first)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _start_worker, (work,)) as pool:
        futures: dict[Future[int], _Task] = {pool.submit(_run_in_worker, task, first): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _hits(keys: Iterable[Sequence[PageKey]], task: _Task, first: int) -> int:
    eviction, capacity = task
    with _without_collector():
        return sum(simulate(keys, eviction, capacity)[first:])


@contextmanager
def _without_collector() -> Generator[None]:
    """A tree has no cycles, and many objects: looking through them for garbage takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_worker_keys: list[list[PageKey]] = []


def _start_worker(work: Workload) -> None:
    _worker_keys.extend(work.keys)


def _run_in_worker(task: _Task, first: int) -> int:
    return _hits(_worker_keys, task, first)
