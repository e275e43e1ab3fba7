"""Ranks for tests: several controllers on one loop agree in rounds, without processes, under virtual time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import anyio
import attrs

from kvcr_actors.core.rounds import OpenOperation, OperationTable, Resolution, RoundShape, operation_number
from kvcr_actors.errors import ConfigError
from kvcr_actors.ports import Agreement, Description, OperationId, RankTerms, Services
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.transfers import Operation


@attrs.frozen
class Verdict:
    """One operation's end on one rank: in which round, and with which bits (0: also a miss by deadline or fault)."""

    round: int
    rank: int
    operation: OperationId
    bits: int


@attrs.frozen(eq=False)
class _Proposal:
    entry: OpenOperation
    waiter: Operation[int]

    async def outcome(self) -> int:
        return await self.waiter.outcome()

    def withdraw(self) -> None:
        self.entry.bits = 0


class LoopRanks:
    """One rank of a `RankHub`, as its controller sees it."""

    def __init__(self, hub: RankHub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self.frozen = False
        """Whether it takes part in no round, though it does not know that."""
        self.table = OperationTable(hub.shape)
        self.others_open = False
        self.is_open = False
        self._hub = hub
        self._waiters: dict[OpenOperation, tuple[OperationId, Operation[int]]] = {}

    @property
    def has_work(self) -> bool:
        """Whether it wants a round."""
        return not self.frozen and (self.others_open or len(self.table) > 0)

    async def open(self, services: Services, terms: RankTerms) -> None:
        """Take part from now on. ConfigError if a rank that is open has other terms."""
        del services
        self._hub.compare(self.rank, terms)
        self.is_open = True

    def propose(self, operation: OperationId, bits: int) -> Agreement:
        """Open an operation on this rank; see `Ranks.propose`."""
        number = operation_number(*operation)
        if not self.is_open:
            return _Proposal(OpenOperation(number, 0, 0.0), Operation[int].finished(0))
        entry = self.table.open(number, bits, anyio.current_time() + self._hub.deadline_s)
        waiter: Operation[int] = Operation()
        self._waiters[entry] = (operation, waiter)
        self._hub.notice()
        return _Proposal(entry, waiter)

    async def agree(self, operation: OperationId, bits: int) -> int:
        """Propose and wait; a caller that is cancelled withdraws."""
        proposal = self.propose(operation, bits)
        try:
            return await proposal.outcome()
        finally:
            proposal.withdraw()

    async def close(self, deadline_s: float) -> None:
        """End what is open with 0; the others see a rank that is gone."""
        del deadline_s
        self.is_open = False
        self.lose()
        self._hub.notice()

    def describe(self) -> Description:
        """State for people."""
        return {"rank": self.rank, "size": self.size, "open": len(self.table), "rounds": self._hub.rounds}

    def lose(self) -> None:
        """Every open operation ends with 0."""
        self.others_open = False
        self._settle([(entry, 0) for entry in self.table.clear()])

    def take(self, result: Resolution) -> bool:
        """Use a round's result; whether it ended anything."""
        self.others_open = result.others_open
        ended = self.table.settle(result.agreed, anyio.current_time())
        self._settle(ended)
        return bool(ended)

    def _settle(self, ended: list[tuple[OpenOperation, int]]) -> None:
        for entry, bits in ended:
            operation, waiter = self._waiters.pop(entry)
            self._hub.verdicts.append(Verdict(self._hub.rounds, self.rank, operation, bits))
            waiter.settle(bits)


class RankHub:
    """The rounds of `size` ranks: a round takes `round_s`, and waits at most `deadline_s` for a rank.

    A round that fails (a rank is frozen past the deadline, or closed, or `faults` says so for the kind `round`) ends
    every operation that is open on a rank that took part. `verdicts` tells how each operation ended.
    """

    def __init__(
        self,
        size: int,
        *,
        deadline_s: float = 10.0,
        round_s: float = 0.001,
        shape: RoundShape | None = None,
        faults: FaultPlan | None = None,
    ) -> None:
        self.size = size
        self.deadline_s = deadline_s
        self.shape = shape or RoundShape()
        self.faults = faults or FaultPlan()
        self.rounds = 0
        self.failed_rounds = 0
        self.verdicts: list[Verdict] = []
        self.ranks = tuple(LoopRanks(self, rank) for rank in range(size))
        self._round_s = round_s
        self._terms: dict[int, Mapping[str, str]] = {}
        self._changed = anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[RankHub]:
        """Run rounds until the block ends."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, name="rank hub")
            yield self
            tasks.cancel_scope.cancel()

    def notice(self) -> None:
        """Look again whether a rank has work."""
        self._changed.set()

    def compare(self, rank: int, terms: RankTerms) -> None:
        """Refuse terms that differ from those of an open rank."""
        for other, theirs in self._terms.items():
            for field in sorted(theirs.keys() | terms.settings.keys()):
                if self.ranks[other].is_open and theirs.get(field) != terms.settings.get(field):
                    raise ConfigError(
                        f"ranks disagree on {field}: {terms.settings.get(field)} on rank {rank}, "
                        f"{theirs.get(field)} on rank {other}; give every rank the same"
                    )
        self._terms[rank] = terms.settings

    async def _run(self) -> None:
        while True:
            while not any(one.has_work for one in self.ranks):
                self._changed = anyio.Event()
                await self._changed.wait()
            if not await self._gathered():
                self._fail()
                continue
            self.rounds += 1
            fault = self.faults.decide("round")
            if fault in (Fault.STALL, Fault.DROP, Fault.LATE):
                await anyio.sleep(self.deadline_s)
            tables = [one.table.encode(self.rounds) for one in self.ranks]
            await anyio.sleep(self._round_s)
            if fault is not None or not all(one.is_open for one in self.ranks):
                self._fail()
                continue
            result = self.shape.resolve(tables)
            ended = [one.take(result) for one in self.ranks]
            if not any(ended):
                await anyio.sleep(self._round_s)

    async def _gathered(self) -> bool:
        """Wait until every rank has work; False if one does not in time, or is closed."""
        with anyio.move_on_after(self.deadline_s):
            while not all(one.has_work for one in self.ranks):
                if not all(one.is_open for one in self.ranks):
                    return False
                self._changed = anyio.Event()
                await self._changed.wait()
            return True
        return False

    def _fail(self) -> None:
        self.failed_rounds += 1
        for one in self.ranks:
            if one.has_work:
                one.lose()
