"""Nothing grows without bound: every container that is reachable from a controller, over many steps with every fault.

`KVCR_GROWTH_STEPS` sets the steps; a release runs 100,000.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import count
from types import FunctionType, MethodType, ModuleType
from typing import Any

import anyio
import pytest

from kvcr_actors.actors.owed import OwedDeposits
from kvcr_actors.core.host_tier import HostPage
from kvcr_actors.messages import PrefetchReady
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.virtual_time import run_virtual
from tests.actors.rig import Rig, chain

STEPS = int(os.environ.get("KVCR_GROWTH_STEPS", "1500"))
SLACK = 64
"""What a container's length may differ by from one look to the next."""
PATHS = 40
FAULTS = tuple(fault for fault in Fault if fault not in (Fault.DROP, Fault.CORRUPT_SILENTLY))


def sizes(root: object) -> Counter[str]:
    """The lengths of all containers reachable from an object, summed up by the attribute that leads to them."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [("controller", root)]
    while todo:
        path, one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (list, dict, set, frozenset, deque)):
            found[path] += len(one)
        todo += parts(path, one)
    return found


def parts(path: str, one: object) -> Iterator[tuple[str, object]]:
    """What an object refers to, with the names that lead there; items of a container share its name."""
    if isinstance(one, (type, ModuleType, str, bytes, int, float)):
        return
    if isinstance(one, (list, tuple, set, frozenset, deque)):
        yield from ((path, item) for item in list(one))
    elif isinstance(one, dict):
        yield from ((path, item) for pair in list(one.items()) for item in pair)
    elif isinstance(one, MethodType):
        yield path, one.__self__
    elif isinstance(one, FunctionType):
        yield from ((path, cell.cell_contents) for cell in one.__closure__ or () if cell_is_full(cell))
    elif type(one).__module__.startswith(("kvcr_actors", "tests")):
        name = type(one).__name__
        yield from ((f"{name}.{key}", value) for key, value in vars_of(one).items())
        for attribute in names(one):
            try:
                yield f"{name}.{attribute}", object.__getattribute__(one, attribute)
            except AttributeError:
                continue
    else:
        yield from ((f"{path}>{type(one).__name__}", item) for item in gc.get_referents(one))


def vars_of(one: object) -> dict[str, object]:
    try:
        return dict(vars(one))
    except TypeError:  # slots only
        return {}


def names(one: object) -> Iterator[str]:
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def cell_is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - the access is what is asked
    except ValueError:
        return False
    return True


def plant_faults(rig: Rig, rng: random.Random) -> None:
    """One of the next calls of the device, and of the store, may go wrong."""
    assert rig.store is not None
    for plan, kinds in ((rig.device.faults, ("to_host", "to_device")), (rig.store.faults, ("lookup", "read", "write"))):
        plan.schedule.clear()
        if rng.random() < 0.2:
            kind = rng.choice(kinds)
            plan.schedule[kind, plan.seen[kind]] = rng.choice(FAULTS)


async def work(rig: Rig, rng: random.Random, steps: int, start: int) -> None:
    for number in range(start, start + steps):
        keys = chain(f"path {rng.randrange(PATHS)}", rng.randrange(1, 6))
        plant_faults(rig, rng)
        roll = rng.random()
        if roll < 0.4:
            rig.give_step(rig.node(keys))
        elif roll < 0.9:
            rig.give_prefetch(number, keys)
            if roll < 0.5:
                rig.give_cancel(number)
        else:
            rig.forget_host()
        await anyio.sleep(rng.random() * 0.02)
        for one in rig.take():
            if isinstance(one, PrefetchReady) and one.account is None:
                if rng.random() < 0.6:
                    rig.give_restore(one.request_id, one.pages)
                elif rng.random() < 0.5:
                    rig.give_cancel(one.request_id)
        rig.completions.clear()
        rig._unread.clear()
        rig.orders = type(rig.orders)()
        rig._free_page = count(number * 7 % 3000)
        if number % 50 == 0:
            rig.device.release()
            if rig.store is not None:
                rig.store.release()


async def settled(rig: Rig) -> Counter[str]:
    """The containers once all is quiet."""
    rig.device.faults.schedule.clear()
    assert rig.store is not None
    rig.store.faults.schedule.clear()
    for _ in range(3):
        rig.device.release()
        rig.store.release()
        await anyio.sleep(100.0)
    rig.take()
    rig.completions.clear()
    rig._unread.clear()
    gc.collect()
    return sizes((rig.assembly, rig.desk))


def growth(steps: int) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}

    async def life() -> None:
        rig = Rig(
            host_slots=24,
            deposit_queue_pages=4,
            store_latency_s=0.002,
            late_s=0.5,
            restarts=1 << 20,
            device_faults=FaultPlan(),
            store_faults=FaultPlan(),
        )
        rng = random.Random(7)
        async with rig.running():
            await work(rig, rng, 500, 0)
            before = await settled(rig)
            await work(rig, rng, steps, 500)
            after = await settled(rig)
        for path, length in after.items():
            if length > before[path] + SLACK and length > 1.25 * before[path]:
                found[path] = (before[path], length)

    run_virtual(life)
    return found


def test_no_container_that_a_controller_reaches_grows_with_the_steps() -> None:
    assert not growth(STEPS)


def test_a_table_that_lost_its_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def owe(owed: OwedDeposits, pages: Sequence[HostPage]) -> None:
        owed._owed.update((page.key + bytes([len(owed._owed) % 251]), None) for page in pages)

    monkeypatch.setattr(OwedDeposits, "owe", owe)
    monkeypatch.setattr(OwedDeposits, "lose", lambda owed, keys: None)
    monkeypatch.setattr(OwedDeposits, "take", lambda owed: [])
    assert "OwedDeposits._owed" in growth(600)
