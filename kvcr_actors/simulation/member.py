"""One rank of the cluster: its controller, which may be restarted, with everything that it is connected to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import anyio

from kvcr_actors.assembly import Assembly
from kvcr_actors.config import ControllerConfig
from kvcr_actors.errors import DeadlineError
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    ControllerFailed,
    DepositFailed,
    PrefetchCancelled,
    PrefetchReady,
    ResetFinished,
    RestoreFinished,
)
from kvcr_actors.runtime.hosts import TaskHost
from kvcr_actors.simulation.checks import ViolationError, check_life
from kvcr_actors.simulation.faults import SeedFaults
from kvcr_actors.simulation.orders import StepOrders
from kvcr_actors.simulation.pages import LAYOUT
from kvcr_actors.simulation.ports import EventLink, FenceQueue, InjectedError, SimDevice, SimStore
from kvcr_actors.testing.host_memory import BytesHostMemory
from kvcr_actors.testing.invariants import OrderBook
from kvcr_actors.testing.ranks import LoopRanks

DEVICE_PAGES = 160
ACTORS = ("prefetch", "restore", "confirmation", "deposit")

CONFIG: dict[str, Any] = {
    "prefetch_deadline_s": 0.6,
    "claim_lifetime_s": 1.0,
    "failed_read_pause_s": 0.2,
    "deposit_backoff_s": 0.005,
    "deposit_yield_s": 0.05,
    "copy_deadline_s": 0.3,
    "agreement_deadline_s": 0.3,
    "restarts": 1 << 20,
    "restart_backoff_s": 0.0001,
    "restart_window_s": 0.001,
    "drain_budget_s": 0.4,
    "poison_freed_pages": True,
}

START_S = 60.0
ANSWER_S = {"step": 4.0, "prefetch": 4.0, "ready": 4.0, "restore": 15.0, "reset": 8.0}
"""The most that an order may take, whatever goes wrong: its deadlines, and those of the ranks, added up."""
_STORE_S = 20.0

Waited: TypeAlias = tuple[str, int]
"""What an order's answer is known by: a kind of `ANSWER_S`, and its step or request."""


class Life:
    """One life of a rank's controller, and the orders that it was given."""

    def __init__(self, member: Member, store: SimStore | None) -> None:
        memory = BytesHostMemory(LAYOUT, member.host_slots)
        self.memory = memory
        self.device = SimDevice(DEVICE_PAGES, memory, member.faults, member.rank)
        self.assembly = Assembly(
            member.config, device=self.device, store=store, ranks=member.ranks, sinks=(member.link,), relay=False
        )
        self.desk = self.assembly.make_desk()
        self.host = TaskHost(self.assembly.main)
        self.orders = OrderBook()
        self.completions: list[Completion] = []
        self._resets_before = member.resets
        self.due: dict[Waited, float] = {}

    @property
    def generation(self) -> int:
        """The generation of the pages that the controller knows."""
        state = self.assembly._state  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        return self._resets_before + (0 if state is None else state.resets)

    @property
    def resets(self) -> bool:
        """Whether a reset is not over."""
        return any(kind == "reset" for kind, _ in self.due)

    @property
    def runtime(self) -> Any:
        """The runtime, for its supervisors; None before the start."""
        return self.assembly._runtime  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]

    def take(self, now: float) -> list[Completion]:
        """What completed since the last call, each within its time."""
        new = self.desk.take()
        for completion in new:
            for waited in _answered(completion):
                due = self.due.pop(waited, None)
                if due is not None and now > due:
                    raise ViolationError(f"{waited} ended {now - due:.3f} s past its deadline: {completion}")
            if isinstance(completion, PrefetchReady) and completion.account is None:
                request_id = cast("int", completion.request_id)
                self.due["ready", request_id] = now + self.assembly.config.claim_lifetime_s + ANSWER_S["ready"]
        self.completions += new
        return new

    def note_due(self, orders: StepOrders, step: int | None, now: float) -> None:
        """Note when a step's orders must have ended."""
        if step is not None:
            self.due["step", step] = now + ANSWER_S["step"]
        if orders.reset is not None:
            self.due["reset", orders.reset.generation] = now + ANSWER_S["reset"]
        for request in orders.requests:
            self.due["prefetch", cast("int", request.request_id)] = now + ANSWER_S["prefetch"]
        for order in orders.restores:
            request_id = cast("int", order.request_id)
            # One that has expired is answered already.
            if self.due.pop(("ready", request_id), None) is not None:
                self.due["restore", request_id] = now + ANSWER_S["restore"]

    def check_due(self, now: float, *, endless_copies: bool) -> None:
        """Nothing that was asked for is overdue."""
        for waited, due in self.due.items():
            if now > due and not (endless_copies and waited[0] == "restore"):
                raise ViolationError(f"{waited} has not ended, {now - due:.3f} s past its deadline")


class Member:
    """A rank over all lives of its controller. Orders reach it in batches, perhaps late, always in order."""

    def __init__(
        self,
        ranks: LoopRanks,
        faults: SeedFaults,
        rng: random.Random,
        note: Callable[[int, str], None],
        *,
        host_slots: int,
        store_pages: int | None,
        config: ControllerConfig,
        thawed: Callable[[], None],
    ) -> None:
        self.ranks = ranks
        self._thawed = thawed
        self.rank = ranks.rank
        self.faults = faults
        self.host_slots = host_slots
        self.config = config
        self.link = EventLink(faults, self.rank)
        self.fences = FenceQueue(lambda: self.life.device)
        self.restarting = False
        """Whether a restart of the controller or of its store is under way."""
        self.resets = 0
        """Resets that were handed over, to all lives together."""
        self.thaws_at: float | None = None
        self._rng = rng
        self._note = note
        self._store_pages = store_pages
        self._stores: list[SimStore] = []
        self._waiting: list[StepOrders] = []
        self._late_until = 0.0
        self._last_words: list[Completion] = []
        self._operations = 0
        self.life = Life(self, self._new_store())

    @property
    def operations(self) -> int:
        """Orders, copies and calls of the store so far."""
        return self._operations + self.life.device.submits + sum(store.calls for store in self._stores)

    @property
    def has_store(self) -> bool:
        """Whether the rank is to have a store."""
        return self._store_pages is not None

    @property
    def lacks_store(self) -> bool:
        """Whether a reset that failed has left the rank without the store that it is to have."""
        life = self.life
        return self.has_store and life.assembly.store is None and not (life.resets or self.restarting)

    @property
    def is_quiet(self) -> bool:
        """Whether actors, ports, ranks and orders have nothing to do."""
        ports = self.life.device.describe()["running"] or any(store.running for store in self._stores)
        resets = self.restarting or self.lacks_store or self.life.resets
        waiting = resets or self._waiting or len(self.fences) or len(self.ranks.table)
        return not ports and not waiting and self.life.runtime is not None and self.life.runtime.is_quiet()

    async def start(self) -> None:
        """Start the controller."""
        await self.life.host.start(START_S)

    async def close(self) -> None:
        """End the controller; what waited for a word that was lost is answered now."""
        self.release()
        await self.life.host.stop(START_S)
        self.life.completions += self.life.desk.take()

    def post(self, orders: StepOrders, now: float) -> None:
        """Take a step's orders; they are handed over at once unless they are late."""
        self._waiting.append(orders)
        if self.faults.fires(self.rank, "order", "delay"):
            self._late_until = now + self._rng.uniform(0.005, 0.2)
        self.hand_over(now)

    def hand_over(self, now: float) -> None:
        """Give the desk what is due."""
        if now < self._late_until:
            return
        waiting, self._waiting = self._waiting, []
        for orders in waiting:
            self._operations += orders.size
            for words in orders.words():
                self._note(self.rank, words)
            self.resets += orders.reset is not None
            step = orders.give(self.life.desk, self.life.orders, self._fence(orders, now), self._exchanged)
            self.life.note_due(orders, step, now)

    def take(self, now: float) -> list[Completion]:
        """What completed since the last call."""
        new, self._last_words = [*self._last_words, *self.life.take(now)], []
        for completion in new:
            if isinstance(completion, ControllerFailed):
                failure = self.life.assembly.failure
                raise ViolationError(f"rank {self.rank}: the controller failed: {completion.error}") from failure
            self._note(self.rank, _words(completion))
        return new

    def release(self) -> None:
        """Let what stalls go on."""
        self.life.device.release()
        for store in self._stores:
            store.release()

    def tick(self, now: float) -> None:
        """Let time pass outside the controller: kernels end, events land, late orders come."""
        self.fences.run(now)
        self.link.land(now)
        if self.thaws_at is not None and now >= self.thaws_at:
            self.thaw()
        self.hand_over(now)
        self.life.check_due(now, endless_copies=self.rank in self.faults.unquiet)

    def clear_host(self) -> None:
        """Evict from host memory what no claim protects, unless the controller is just being restarted."""
        if not self.restarting and self.life.runtime is not None:
            self.life.assembly.slot.clear_host()

    def freeze(self, until: float) -> None:
        """Take part in no round for a while."""
        self.ranks.frozen, self.thaws_at = True, until

    def thaw(self) -> None:
        """Take part in rounds again."""
        self.ranks.frozen, self.thaws_at = False, None
        self._thawed()

    def check(self, *, quiet: bool, closed: bool = False) -> None:
        """Check the controller, idle or closed in order: then nothing uses memory, whatever word was lost."""
        for store in self._stores:
            store.check()
        quiet = quiet and (closed or self.rank not in self.faults.unquiet)
        check_life(self.rank, self.life, self.link.index, quiet=quiet)

    def crash(self, actor: str) -> None:
        """Have a task of an actor raise, if it lives."""
        for supervisor in () if self.life.runtime is None else self.life.runtime._supervisors:  # noqa: SLF001
            if supervisor.spec.name == actor and supervisor.state == "running":
                supervisor._actor._tasks.start_soon(_raise)  # noqa: SLF001

    async def restart(self, now: Callable[[], float], lost: Callable[[int], None]) -> None:
        """End the controller in the middle of its work, check what it leaves, and start another on an empty host.

        `lost` is called when its last words can be taken and orders reach the next one.
        """
        self.restarting = True
        old = self.life
        try:
            await old.host.stop(START_S)
        except DeadlineError as error:
            self._note(self.rank, f"closed: {error}")
        self._late_until = 0.0
        self.hand_over(now())
        self._last_words += old.take(now())
        self.check(quiet=False)
        self._operations += old.device.submits
        self.life = Life(self, self._new_store())
        self.life.device.adopt(old.device)
        self.link.begin_anew()
        lost(self.rank)
        await self.start()
        self.restarting = False

    async def restart_store(self) -> None:
        """Detach the store under load, attach an empty one, and fill it."""
        self.restarting = True
        slot = self.life.assembly.slot
        with anyio.move_on_after(_STORE_S) as budget:
            try:
                await slot.detach(0.2)
            except DeadlineError:
                self._note(self.rank, "the store was not quiet in time")
            await anyio.sleep(self._rng.random() * 0.05)
            store = self._new_store()
            if store is not None:
                await slot.attach(store)
                await slot.deposit_all()
        if budget.cancelled_caught:
            raise ViolationError(f"rank {self.rank}: a store was not exchanged within {_STORE_S:g} s")
        self.restarting = False

    def _exchanged(self) -> SimStore | None:
        """The store that comes with a reset; while one is being exchanged anyhow, that is cleared."""
        return None if self.restarting or self.life.resets else self._new_store()

    def _new_store(self) -> SimStore | None:
        if self._store_pages is None:
            return None
        self._stores.append(SimStore(self._store_pages, self.faults, self.rank, self._rng))
        return self._stores[-1]

    def _fence(self, orders: StepOrders, now: float) -> anyio.Event | None:
        writes = orders.kernel_writes(self.rank)
        if not writes and not len(self.fences):  # kernels of earlier steps may still write what is backed up now
            return None
        late = self.faults.fires(self.rank, "fence", "delay")
        takes = self._rng.uniform(0.05, 0.25) if late else self._rng.random() * 0.008
        return self.fences.launch(now + takes, writes)


async def _raise() -> None:
    raise InjectedError("injected: the actor failed")


def _answered(completion: Completion) -> tuple[Waited, ...]:
    match completion:
        case BackupAck():
            return (("step", completion.step),)
        case PrefetchReady():
            return (("prefetch", cast("int", completion.request_id)),)
        case RestoreFinished():
            return (("restore", cast("int", completion.request_id)),)
        case PrefetchCancelled():
            request_id = cast("int", completion.request_id)
            return (("prefetch", request_id), ("ready", request_id), ("restore", request_id))
        case ResetFinished():
            return (("reset", cast("int", completion.label)),)
        case DepositFailed() | ControllerFailed():
            return ()


def _words(completion: Completion) -> str:
    match completion:
        case BackupAck():
            failed = ", ".join(f"{node} {reason}" for node, reason in completion.failed)
            return f"ack of step {completion.step}: {list(completion.node_ids)}, failed: {failed or 'none'}"
        case PrefetchReady():
            ended = "" if completion.account is None else ", over"
            return f"ready {completion.request_id} up to {completion.pages}{ended}"
        case RestoreFinished():
            return f"restored {completion.request_id} up to {completion.pages}"
        case PrefetchCancelled():
            reasons = ", ".join(completion.account.reasons)
            return f"cancelled {completion.request_id}: {reasons}"
        case DepositFailed():
            return f"not stored: {len(completion.keys)} pages, {completion.reason}"
        case ResetFinished():
            return f"reset {completion.label}: {completion.host_pages} + {completion.store_pages} pages"
        case ControllerFailed():
            return f"failed: {completion.error}"
