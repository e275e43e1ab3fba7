"""Ranks over torch.distributed (gloo): rounds in a thread of their own, two collectives each, under deadlines.

An operation is opened on every rank by the same request. While any is open, the thread runs rounds; when none is, it
blocks without a collective. The first collective of a round gathers a table of fixed size, so neither its number nor
its size depends on what a rank has open. The second tells each rank that all have the result: only then it is used.

A round that fails ends the group, which gloo cannot use again; the next one is built under a new epoch. Ranks may fail
at different points of one round, so the shared store decides, once for all, whether its result counts: a rank that has
the result proposes it, one that has not proposes to drop it (then nobody can have used it), the first proposal wins.
All other open operations end as misses. Not covered: the store's host freezes in the microseconds between the two
collectives, for longer than the deadlines of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from time import monotonic

import anyio
import attrs
import structlog

from kvcr_actors.core.rounds import OpenOperation, OperationTable, Resolution, RoundShape, operation_number
from kvcr_actors.errors import ConfigError, DeadlineError, KvcrActorsError
from kvcr_actors.ports import Agreement, Description, OperationId, RankTerms, Services
from kvcr_actors.ranks._gloo import CollectiveError, GlooGroup, SharedStore, TorchStore
from kvcr_actors.ranks._terms import compare_terms, tell_terms
from kvcr_actors.transfers import Operation

log = structlog.get_logger()

_EPOCH = "kvcr-actors/epoch"
_DROPPED = "dropped"
_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.005
"""Between two rounds that settled nothing: the first pause, and what it grows to."""
_POLL_S = 0.02
_JOIN_S = 5.0
"""What the thread needs after its last word is the time of a collective under way."""


@attrs.frozen(eq=False)
class _Proposal:
    """An operation as its proposer sees it."""

    entry: OpenOperation
    waiter: Operation[int]
    deadline_s: float
    store_hangs: Callable[[], bool]

    async def outcome(self) -> int:
        """Wait; the thread ends every operation, unless the shared store hangs."""
        while True:
            with anyio.move_on_after(self.deadline_s):
                return await self.waiter.outcome()
            if self.store_hangs():
                log.error("ranks.store_hangs", operation=self.entry.number)
                return 0

    def withdraw(self) -> None:
        """Propose nothing in the rounds to come."""
        self.entry.bits = 0


class TorchDistributedRanks:
    """The `Ranks` of `size` processes that share a torch.distributed store (such as a TCPStore) for rendezvous.

    `interface` is where the collectives' sockets listen: loopback unless told otherwise. `start_deadline_s` bounds the
    wait at `open` for ranks that start later. A restarted rank opens anew with the same store. An agreement ends
    within two deadlines of a collective, and within four where the store hangs. `rounds`, `failed_rounds`,
    `collectives` and `epoch` count for tests and people; so does `expired`, operations that another rank lacked.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: TorchStore,
        *,
        interface: str = "lo",
        start_deadline_s: float = 300.0,
        shape: RoundShape | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank {rank} of {size} does not exist")
        self.rank = rank
        self.size = size
        self.rounds = 0
        self.failed_rounds = 0
        self.expired = 0
        self.collectives = 0
        self.epoch = -1
        self._shape = shape or RoundShape()
        self._store = SharedStore(store)
        self._interface = interface
        self._start_deadline_s = start_deadline_s
        self._deadline_s = 0.0
        self._table = OperationTable(self._shape)
        self._waiters: dict[OpenOperation, Operation[int]] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._others_open = False
        self._slept = True
        self._fruitless = 0
        self._round_of_epoch = 0
        self._group: GlooGroup | None = None
        self._store_called_at: float | None = None
        self._services: Services | None = None
        self._thread: threading.Thread | None = None
        self._ended = anyio.Event()

    async def open(self, services: Services, terms: RankTerms) -> None:
        """Compare terms with the other ranks and start the rounds. ConfigError names the setting that differs."""
        self._services = services
        self._deadline_s = terms.deadline_s
        settings = {**terms.settings, "deadline_s": repr(terms.deadline_s), "ranks": str(self.size)}
        settings["round shape"] = repr(self._shape)
        compared: Operation[KvcrActorsError | None] = Operation()
        self._thread = threading.Thread(
            target=self._run, args=(settings, compared), name=f"kvcr-ranks-{self.rank}", daemon=True
        )
        self._thread.start()
        try:
            refusal = await compared.outcome()
        except BaseException:
            self._stop()
            raise
        if refusal is not None:
            raise refusal

    def propose(self, operation: OperationId, bits: int) -> Agreement:
        """Open an operation; see `Ranks.propose`. The same name may be open several times, paired in order."""
        number = operation_number(*operation)
        waiter: Operation[int] = Operation()
        with self._changed:
            if self._closing or self._thread is None:
                waiter.settle(0)
                return _Proposal(OpenOperation(number, 0, 0.0), waiter, self._deadline_s, self._store_hangs)
            entry = self._table.open(number, bits, monotonic() + self._deadline_s)
            self._waiters[entry] = waiter
            self._changed.notify()
        return _Proposal(entry, waiter, self._deadline_s, self._store_hangs)

    async def agree(self, operation: OperationId, bits: int) -> int:
        """Propose and wait; a caller that is cancelled withdraws."""
        proposal = self.propose(operation, bits)
        try:
            return await proposal.outcome()
        finally:
            proposal.withdraw()

    async def close(self, deadline_s: float) -> None:
        """End every open operation as a miss and stop the rounds; DeadlineError if the shared store hangs."""
        self._stop()
        if self._thread is None:
            return
        with anyio.move_on_after(deadline_s):
            await self._ended.wait()
            # A thread that is still in native code when the interpreter ends aborts the process.
            await anyio.to_thread.run_sync(self._thread.join, _JOIN_S)
            return
        self._settle_rest()
        raise DeadlineError(f"rank {self.rank}: its thread did not end within {deadline_s:g} s; the shared store hangs")

    def describe(self) -> Description:
        """State and counters for people."""
        return {
            "rank": self.rank,
            "size": self.size,
            "epoch": self.epoch,
            "rounds": self.rounds,
            "failed_rounds": self.failed_rounds,
            "expired": self.expired,
            "collectives": self.collectives,
            "open": len(self._table),
        }

    def _stop(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _store_hangs(self) -> bool:
        since = self._store_called_at
        return since is not None and monotonic() - since > 2 * self._deadline_s

    def _post(self, call: Callable[[], None]) -> None:
        if self._services is not None:
            self._services.post(call)

    # From here on, everything runs on the ranks' own thread.

    def _run(self, settings: dict[str, str], compared: Operation[KvcrActorsError | None]) -> None:
        """Compare settings, then run rounds until the close."""
        try:
            refusal = self._refusal(settings)
            self._post(partial(compared.settle, refusal))
            while refusal is None and self._wait_for_work():
                if self._round():
                    self._fruitless = 0
                else:
                    self._pause()
        finally:
            self._stop()
            self._settle_rest()
            self._post(self._ended.set)
            self._group = None  # last: it waits for a collective under way

    def _wait_for_work(self) -> bool:
        with self._changed:
            while not (self._closing or self._others_open or len(self._table)):
                self._slept = True
                self._changed.wait()
            return not self._closing

    def _pause(self) -> None:
        self._fruitless += 1
        with self._changed:
            if not self._closing:
                self._changed.wait(min(_PAUSE_S * self._fruitless, _LONGEST_PAUSE_S))

    def _round(self) -> bool:
        """Run one round, in a group of the epoch that the ranks are in; whether it settled anything."""
        result: Resolution | None = None
        try:
            group = self._current_group()
            with self._changed:
                table = self._table.encode(self._round_of_epoch)
            result = self._shape.resolve(self._gather(group, table))
            self._confirm(group, result)
        except CollectiveError as error:
            self._end_epoch(error, result)
            return False
        self.rounds += 1
        self._round_of_epoch += 1
        self._others_open = result.others_open
        return self._deliver(result.agreed)

    def _goes_on(self) -> bool:
        return not self._closing

    def _gather(self, group: GlooGroup, mine: bytes) -> list[bytes]:
        self.collectives += 1
        return group.gather(mine, self._goes_on)

    def _confirm(self, group: GlooGroup, result: Resolution) -> None:
        """The second collective: all ranks have the result, and it is the same."""
        digest = sha256(self._shape.encode(result.agreed)).digest()[:16]
        if any(other != digest for other in self._gather(group, digest)):
            raise CollectiveError("the ranks resolved one round differently")

    def _current_group(self) -> GlooGroup:
        """The group of the present epoch: a new one if a rank failed or restarted, perhaps while this one slept."""
        epoch = self._store_number(0) if self._slept or self._group is None else self.epoch
        self._slept = False
        if self._group is None or epoch != self.epoch:
            self._group = None
            self.epoch, self._round_of_epoch = epoch, 0
            name = f"kvcr-actors/group/{epoch}"
            self._group = GlooGroup(self._store, name, self.rank, self.size, self._interface, self._deadline_s)
        return self._group

    def _deliver(self, agreed: Mapping[int, int]) -> bool:
        with self._changed:
            ended = self._table.settle(agreed, monotonic())
        if expired := sum(entry.number not in agreed and entry.bits > 0 for entry, _ in ended):
            self.expired += expired
            log.warning("ranks.expired", rank=self.rank, operations=expired, seconds=self._deadline_s)
        self._settle(ended)
        return bool(ended)

    def _end_epoch(self, error: CollectiveError, result: Resolution | None) -> None:
        """A deadline was missed or a peer is gone: the store decides about this round, everything else is a miss."""
        if not self._closing:
            self.failed_rounds += 1
            log.warning("ranks.round_failed", rank=self.rank, epoch=self.epoch, error=str(error))
        self._others_open = False
        with self._changed:
            failed = list(self._table)
        try:
            self._deliver(self._decide(result))
            # Only the first rank to see the failure moves the epoch on.
            self._in_store(lambda: self._store.swap(_EPOCH, str(self.epoch), str(self.epoch + 1)))
        except CollectiveError as fault:
            log.error("ranks.store_failed", rank=self.rank, error=str(fault))
        # What was opened since then belongs to the next epoch, on the other ranks too.
        with self._changed:
            dropped = self._table.drop(failed)
        self._settle([(entry, 0) for entry in dropped])
        if not self._closing:
            self._group = None

    def _decide(self, result: Resolution | None) -> Mapping[int, int]:
        key = f"kvcr-actors/round/{self.epoch}/{self._round_of_epoch}"
        mine = _DROPPED if result is None else self._shape.encode(result.agreed).hex()
        decision = self._in_store(lambda: self._store.swap(key, "", mine))
        return {} if decision == _DROPPED else self._shape.decode(bytes.fromhex(decision))

    def _store_number(self, amount: int) -> int:
        return int(self._in_store(lambda: str(self._store.add(_EPOCH, amount))))

    def _in_store(self, call: Callable[[], str]) -> str:
        """Call the store, noting since when: a server that hangs must not hang those who wait for an agreement."""
        self._store_called_at = monotonic()
        try:
            return call()
        finally:
            self._store_called_at = None

    def _settle_rest(self) -> None:
        with self._changed:
            entries = self._table.clear()
        self._settle([(entry, 0) for entry in entries])

    def _settle(self, ended: Sequence[tuple[OpenOperation, int]]) -> None:
        pairs = [(self._waiters.pop(entry), bits) for entry, bits in ended]

        def tell() -> None:
            for waiter, bits in pairs:
                waiter.settle(bits)

        if pairs:
            self._post(tell)

    def _refusal(self, settings: Mapping[str, str]) -> KvcrActorsError | None:
        """Compare settings with the other ranks; why this one cannot start."""

        def sleep() -> bool:
            with self._changed:
                self._changed.wait(_POLL_S)
                return not self._closing

        try:
            if tell_terms(self._store, self.rank, settings):
                self._store_number(1)  # a rank that starts again is in no group of the epochs before
            compare_terms(self._store, self.rank, self.size, settings, self._start_deadline_s, sleep)
        except KvcrActorsError as error:
            return error
        except CollectiveError as error:
            return DeadlineError(f"rank {self.rank} of {self.size} did not start: {error}")
        return None
