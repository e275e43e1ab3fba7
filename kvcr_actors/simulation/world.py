"""One seed's run: a cluster, its workload, its mishaps, and what must hold at the end."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import anyio
import anyio.abc
import attrs

from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.hit_policy import boundaries, longest
from kvcr_actors.errors import ConfigError
from kvcr_actors.runtime.supervisor import raising_sole_cause
from kvcr_actors.simulation.checks import ViolationError, check_same_operations, check_verdicts
from kvcr_actors.simulation.engine import SimEngine
from kvcr_actors.simulation.faults import KINDS, EdgeFaults, Kind, SeedFaults
from kvcr_actors.simulation.member import ACTORS, CONFIG, Member
from kvcr_actors.simulation.pages import LAYOUT, computed_mask, key_of
from kvcr_actors.testing.ranks import RankHub
from kvcr_actors.types import PageKey, WritePolicy

_RELEASE_S = 0.45
"""How long what stalls, stalls at most."""
_SETTLE_S = 60.0
_LIFE_S = 3600.0
MOST_RANKS = 64
"""Of more, the turns of one thread take longer than the deadlines of the ranks allow for: what fails is no rule."""
_MOST_STEPS = 10**9


@attrs.frozen
class SimulationOptions:
    """What a simulated cluster is like."""

    ranks: int = attrs.field(default=2)
    kinds: tuple[Kind, ...] = KINDS
    steps: int = attrs.field(default=200)
    loop: str = "trio"

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"--ranks {self.ranks}: give 1 to {MOST_RANKS}; all of them run in one thread")
        if not 1 <= self.steps <= _MOST_STEPS:
            raise ConfigError(f"--steps {self.steps}: give 1 to {_MOST_STEPS}")
        if self.loop not in ("asyncio", "trio"):
            raise ConfigError(f"--loop: {self.loop!r} is neither asyncio nor trio")


class World:
    """A cluster that lives once, on a loop with a virtual clock. `trace` tells everything that happened, in order."""

    def __init__(self, options: SimulationOptions, seed: int) -> None:
        self.trace: list[str] = []
        self.operations = 0
        self.virtual_s = 0.0
        self._options = options
        rng = self._rng = random.Random(seed)
        self.faults = SeedFaults(options.kinds, rng, self._note)
        self._hub = RankHub(
            options.ranks, deadline_s=CONFIG["agreement_deadline_s"], faults=EdgeFaults(self.faults, -1)
        )
        host_slots = rng.choice((10, 16, 24, 60))
        store_pages = rng.choice((None, 10, 30, 100, 100, 100))
        config = ControllerConfig(
            **CONFIG,
            inbox_limit=rng.choice((2, 4096, 4096)),
            deposit_retries=rng.choice((0, 2)),
            host_reserve_fraction=rng.choice((0.0, 0.2)),
            prefetch_threshold_pages=rng.choice((1, 1, 3)),
            refresh_store=rng.random() < 0.8,
        )
        self._config = config
        self.members = [
            Member(
                ranks,
                self.faults,
                rng,
                self._note,
                host_slots=host_slots,
                store_pages=store_pages,
                config=config,
                thawed=self._hub.notice,
            )
            for ranks in self._hub.ranks
        ]
        self._engine = SimEngine(self.members, rng, lambda: self.faults.fires(-1, "order", "reset"))
        self._release_at = 0.0
        self._now = 0.0
        self._tasks: anyio.abc.TaskGroup | None = None

    @property
    def fired(self) -> Counter[Kind]:
        """Faults so far, by kind."""
        return self.faults.fired

    async def live(self) -> None:
        """Run from the start of the controllers to their end; AssertionError where a rule is broken."""
        try:
            with raising_sole_cause(), anyio.fail_after(_LIFE_S):
                async with self._hub.running(), anyio.create_task_group() as tasks:
                    for member in self.members:
                        tasks.start_soon(member.start)
                    self._tasks = tasks
                    await self._work(tasks)
                    await self._settle()
                    self._check(quiet=True)
                    await self._prove_alive()
                    self._check(quiet=True)
                    for member in self.members:
                        await member.close()
                    self._check(quiet=True, closed=True)
        finally:
            self.operations = sum(member.operations for member in self.members) + len(self._hub.verdicts)
            self.virtual_s = self._now

    async def _work(self, tasks: anyio.abc.TaskGroup) -> None:
        for _ in range(self._options.steps):
            self._turn(busy=True)
            self._have_mishaps(tasks)
            roll = self._rng.random()
            await anyio.sleep(self._rng.random() * (0.004 if roll < 0.7 else 0.03 if roll < 0.95 else 0.3))

    def _turn(self, *, busy: bool) -> None:
        self._now = anyio.current_time()
        if self._now >= self._release_at:
            self._release_at = self._now + _RELEASE_S
            for member in self.members:
                member.release()
        for member in self.members:
            if member.lacks_store and member.life.host.is_running and self._tasks is not None:
                member.restarting = True
                self._tasks.start_soon(member.restart_store)
        self._engine.step(self._now, busy=busy)

    def _have_mishaps(self, tasks: anyio.abc.TaskGroup) -> None:
        for member in self.members:
            fires = partial(self.faults.fires, member.rank)
            if member.restarting or not member.life.host.is_running:
                continue
            if fires("rank", "restart"):
                self._engine.crashes += 1
                tasks.start_soon(member.restart, lambda: self._now, self._engine.rank_lost)
            elif member.has_store and not member.life.resets and fires("store", "restart"):
                tasks.start_soon(member.restart_store)
            elif fires("rank", "freeze"):
                member.freeze(self._now + self._rng.uniform(0.05, 0.8))
            elif fires("actor", "restart"):
                self._engine.crashes += 1
                member.crash(self._rng.choice(ACTORS))

    async def _settle(self) -> None:
        """No more faults: everything must come to an end, and be quiet."""
        self.faults.active = False
        for member in self.members:
            member.thaw()
        until = self._now + _SETTLE_S
        quiet_turns = 0
        while quiet_turns < 2:
            self._turn(busy=False)
            self._release_at = 0.0
            quiet = self._engine.is_idle and all(member.is_quiet for member in self.members)
            quiet_turns = quiet_turns + 1 if quiet else 0
            if self._now > until:
                raise ViolationError(f"the cluster was not quiet within {_SETTLE_S:g} s: {self._engine.running}")
            await anyio.sleep(0.01)
        for member in self.members:
            member.link.settle()

    def _check(self, *, quiet: bool, closed: bool = False) -> None:
        for member in self.members:
            member.check(quiet=quiet, closed=closed)
            member.link.check()
        check_verdicts(self._hub.verdicts)
        if not self._engine.crashes:
            check_same_operations(self._hub.verdicts, self._options.ranks)

    async def _prove_alive(self) -> None:
        """A path that no fault met goes to every tier and comes back."""
        keys = tuple(key_of((9, *range(end))) for end in range(5))
        keys = keys[: longest(boundaries([computed_mask(key) for key in keys], LAYOUT))]
        await self._run_one(keys)
        self._engine.evict(1 << 20)
        for member in self.members:
            if member.has_store:
                member.clear_host()
        expects = self._engine.policy is WritePolicy.WRITE_THROUGH and not self.faults.unquiet
        restored = await self._run_one(keys)
        if expects and restored != len(keys):
            raise ViolationError(
                f"after all faults were over, {restored} of {len(keys)} pages came back from the store"
            )

    async def _run_one(self, keys: tuple[PageKey, ...]) -> int:
        request = self._engine.admit(keys)
        await self._settle()
        return request.restored

    def _note(self, rank: int, words: str) -> None:
        who = f"rank {rank}" if rank >= 0 else "ranks"
        self.trace.append(f"{self._now:9.4f} {who}: {words}")
