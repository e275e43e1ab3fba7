"""The life of one actor: it is built, handles batches, is rebuilt after a failure, drains and ends.

A batch is never lost: from the moment it is taken, either `handle` returns or `abandon` is called with it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

import anyio
import attrs
from anyio.abc import TaskStatus
from structlog.typing import FilteringBoundLogger

from kvcr_actors.errors import ActorEscalatedError, ControllerClosedError, ForeignExitError
from kvcr_actors.runtime.foreign import ContainedTasks, Tasks, contained, containing
from kvcr_actors.runtime.inbox import Inbox
from kvcr_actors.runtime.traces import traced

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class Actor(Protocol[M_contra]):
    """State that only its own messages change. Everything here is called on the loop, `handle` never twice at once."""

    @property
    def name(self) -> str:
        """Who this is, in logs and errors."""
        ...

    @property
    def busy(self) -> int:
        """Operations in flight beyond the batch in hand. Poke the runtime when it falls."""
        ...

    async def handle(self, batch: Sequence[M_contra]) -> None:
        """Do what the messages say. An exception ends this incarnation: the batch is abandoned, the actor rebuilt."""
        ...

    def abandon(self, batch: Sequence[M_contra], error: Exception) -> None:
        """Settle each message of a batch that `handle` did not finish, and release what it holds.

        It may have been handled in part. Nothing may be raised: the actor would escalate at once.
        """
        ...

    async def drain(self) -> None:
        """End what is in flight: no message follows. Cancelled when the drain budget is used up."""
        ...

    def describe(self) -> dict[str, Any]:
        """State for people."""
        ...


@attrs.frozen
class RestartPolicy:
    """At most `limit` restarts in any `window_s` seconds; the first waits `backoff_s`, each further twice as long."""

    limit: int = attrs.field(default=3, validator=attrs.validators.ge(0))
    window_s: float = attrs.field(default=60.0, validator=attrs.validators.gt(0))
    backoff_s: float = attrs.field(default=0.05, validator=attrs.validators.ge(0))


@attrs.frozen
class ActorSpec(Generic[M]):
    """How to build an actor, and rebuild it: `make` gets the task group of the incarnation, for its children.

    When an incarnation fails its children are cancelled and have cleaned up before the next `make`. The inbox, and what
    `make` shares between incarnations, survive.
    """

    name: str
    make: Callable[[Tasks], Actor[M]]
    inbox: Inbox[M]
    restart: RestartPolicy = RestartPolicy()
    drain_budget_s: float = attrs.field(default=10.0, validator=attrs.validators.gt(0))


class ActorState(enum.StrEnum):
    """Where in its life an actor is."""

    NEW = "new"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


def sole_cause(error: BaseException) -> BaseException:
    """The one exception inside nested groups of one; the group itself if it holds several."""
    while isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        if len(group.exceptions) != 1:
            return group
        (error,) = group.exceptions
    return error


@contextmanager
def raising_sole_cause() -> Generator[None]:
    """Raise the one cause of an exception group instead of the group, which a task group makes of any error."""
    try:
        yield
    except BaseExceptionGroup as group:
        cause = sole_cause(group)
        if cause is group:
            raise
        raise cause from cause.__cause__


class Supervisor(Generic[M]):
    """Runs the actor of one spec. `changed` is called whenever it may have become quiet."""

    def __init__(self, spec: ActorSpec[M], log: FilteringBoundLogger, changed: Callable[[], None]) -> None:
        self.spec = spec
        self.state = ActorState.NEW
        self.done = anyio.Event()
        self.last_error: str | None = None
        self._log = log.bind(actor=spec.name)
        self._changed = changed
        self._scope: anyio.CancelScope | None = None
        self._actor: Actor[M] | None = None
        self._alive = False
        self._batch: Sequence[M] = ()
        self._failed_at: deque[float] = deque()
        self._restarts = 0
        self._batches = 0
        self._messages = 0

    @property
    def in_hand(self) -> int:
        """Messages taken and not yet handled or abandoned."""
        return len(self._batch)

    @property
    def busy(self) -> int:
        """The living actor's operations in flight; 0 between incarnations."""
        return self._actor.busy if self._alive and self._actor is not None else 0

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is queued, in hand or in flight."""
        return not (len(self.spec.inbox) or self._batch or self.busy)

    def describe(self) -> dict[str, Any]:
        """State, inbox, counters, and the actor's own description."""
        return {
            "state": self.state.value,
            "inbox": len(self.spec.inbox),
            "inbox_limit": self.spec.inbox.limit,
            "in_hand": self.in_hand,
            "busy": self.busy,
            "restarts": self._restarts,
            "last_error": self.last_error,
            "batches": self._batches,
            "messages": self._messages,
            "actor": {} if self._actor is None else self._actor.describe(),
        }

    def cancel(self) -> None:
        """Give up: cancel the actor and its children; what is left of its messages is abandoned."""
        if self._scope is not None:
            self._scope.cancel()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Live until the inbox is closed and drained, or cancelled. Started once the actor was built.

        An error of the first `make` is raised as it is; later ones count as failures. ActorEscalatedError when
        the restart policy is used up.
        """
        try:
            with anyio.CancelScope() as self._scope:
                await self._live_and_restart(task_status)
        finally:
            self._scope = None
            try:
                self._abandon_queue()
            finally:
                if self.state is not ActorState.FAILED:
                    self.state = ActorState.STOPPED
                self.done.set()
                self._changed()

    async def _live_and_restart(self, task_status: TaskStatus[None]) -> None:
        while True:
            try:
                with containing():
                    await self._live(task_status)
            except ActorEscalatedError:
                raise
            except Exception as error:
                if self._actor is None:
                    self.state = ActorState.FAILED
                    raise
                delay_s = self._count_failure(sole_cause(error))
            else:
                return
            self._changed()
            await anyio.sleep(delay_s)
            self._restarts += 1

    async def _live(self, task_status: TaskStatus[None]) -> None:
        inbox = self.spec.inbox
        try:
            async with anyio.create_task_group() as children:
                first = self._actor is None
                actor = self._actor = self.spec.make(ContainedTasks(children))
                self._alive = True
                self.state = ActorState.RUNNING
                if first:
                    task_status.started()
                while batch := await inbox.take():
                    self._batch = batch
                    await actor.handle(batch)
                    self._batches += 1
                    self._messages += len(batch)
                    self._batch = ()
                    self._changed()
                self.state = ActorState.DRAINING
                await actor.drain()
                children.cancel_scope.cancel()
        except BaseException as error:
            # Only here, after the group: the children that worked for this batch have cleaned up.
            self._abandon_batch(error)
            raise
        finally:
            self._alive = False

    def _count_failure(self, error: BaseException) -> float:
        """Seconds to wait before the next incarnation; ActorEscalatedError if there is to be none."""
        policy, failed_at, now = self.spec.restart, self._failed_at, anyio.current_time()
        failed_at.append(now)
        while now - failed_at[0] > policy.window_s:
            failed_at.popleft()
        self.last_error = repr(error)
        if isinstance(error, ForeignExitError):
            self.state = ActorState.FAILED
            raise ActorEscalatedError(f"actor {self.spec.name} is ended: {error}") from error
        if len(failed_at) > policy.limit:
            self.state = ActorState.FAILED
            raise ActorEscalatedError(
                f"actor {self.spec.name} failed {len(failed_at)} times in {policy.window_s:g} s; the last: {error!r}"
            ) from error
        self.state = ActorState.BACKING_OFF
        delay_s = policy.backoff_s * 2 ** (len(failed_at) - 1)
        self._log.warning("actor.failed", failures=len(failed_at), restart_in_s=delay_s, traceback=traced(error))
        return delay_s

    def _abandon_batch(self, error: BaseException) -> None:
        batch, self._batch = self._batch, ()
        cause = sole_cause(error)
        self._abandon(batch, cause if isinstance(cause, Exception) else self._stopped())

    def _abandon_queue(self) -> None:
        self.spec.inbox.close()
        self._abandon(self.spec.inbox.take_now(), self._stopped())

    def _stopped(self) -> Exception:
        return ControllerClosedError(f"actor {self.spec.name} was stopped before it finished the message")

    def _abandon(self, batch: Sequence[M], error: Exception) -> None:
        if not batch:
            return
        if self._actor is None:  # it never started, so nobody was told that messages would be taken
            self._log.error("actor.messages_dropped", messages=len(batch))
            return
        try:
            self._actor.abandon(batch, error)
        except BaseException as raised:  # noqa: BLE001 - raised again below
            fault = contained(raised)
            self.state = ActorState.FAILED
            raise ActorEscalatedError(
                f"actor {self.spec.name} failed to abandon {len(batch)} messages; some may be unsettled: {fault!r}"
            ) from fault
