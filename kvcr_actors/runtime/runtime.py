"""The runtime: all actors of a controller, their orderly end, and the question whether they are quiet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from structlog.typing import FilteringBoundLogger

from kvcr_actors.errors import ConfigError, ControllerClosedError
from kvcr_actors.runtime.supervisor import ActorSpec, ActorState, Supervisor, raising_sole_cause


class Runtime:
    """Runs the actors of `specs`, which are given in the order in which they drain. Everything is on the loop."""

    def __init__(self, specs: Sequence[ActorSpec[Any]], log: FilteringBoundLogger) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ConfigError(f"actors {names}: each name may occur only once")
        self._log = log
        self._supervisors = [Supervisor[Any](spec, log, self.poke) for spec in specs]
        self._changed: anyio.Event | None = None
        self._cut_short = False

    async def run(self, started: Callable[[], None], stop: anyio.Event) -> None:
        """Run until `stop`, then drain. `started` is called once all actors are built.

        Raises the error of an actor that could not be built, or ActorEscalatedError; the other actors are
        cancelled then. Cancelling `run` skips the drain. In each case every message ends handled or abandoned.
        """
        with raising_sole_cause():
            async with anyio.create_task_group() as tasks:
                try:
                    for supervisor in self._supervisors:
                        await tasks.start(supervisor.run, name=supervisor.spec.name)
                    started()
                    await stop.wait()
                    for supervisor in self._supervisors:
                        await self._drain(supervisor)
                except BaseException:
                    self._cut_short = True
                    self.poke()
                    raise
                tasks.cancel_scope.cancel()

    def is_quiet(self) -> bool:
        """Whether all inboxes are empty, no batch is in hand and no actor is busy."""
        return all(supervisor.is_quiet for supervisor in self._supervisors)

    @property
    def unfinished(self) -> list[str]:
        """The actors that have not ended."""
        return [one.spec.name for one in self._supervisors if not one.done.is_set()]

    def poke(self) -> None:
        """Look again whether all is quiet, a turn of the loop later. Free while nobody waits for it."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait_quiet(self) -> None:
        """Wait until all is quiet at one moment. The caller sets the deadline.

        ControllerClosedError if the actors failed or were cancelled: what they had was abandoned, not done.
        """
        await checkpoint()
        while True:
            self._check_whole()
            if self.is_quiet():
                return
            if self._changed is None:
                self._changed = anyio.Event()
            await self._changed.wait()

    def describe(self) -> dict[str, dict[str, Any]]:
        """For each actor its state, inbox, counters, last error and own description."""
        return {supervisor.spec.name: supervisor.describe() for supervisor in self._supervisors}

    async def _drain(self, supervisor: Supervisor[Any]) -> None:
        budget_s = supervisor.spec.drain_budget_s
        supervisor.spec.inbox.close()
        with anyio.move_on_after(budget_s):
            await supervisor.done.wait()
            return
        self._log.warning(
            "actor.given_up",
            actor=supervisor.spec.name,
            budget_s=budget_s,
            queued=len(supervisor.spec.inbox),
            in_hand=supervisor.in_hand,
            busy=supervisor.busy,
        )
        # What its clean-up tells the actors that drain after it must find their inboxes open.
        supervisor.cancel()
        with anyio.move_on_after(budget_s):
            await supervisor.done.wait()
            return
        self._log.error("actor.does_not_end", actor=supervisor.spec.name, busy=supervisor.busy)

    def _check_whole(self) -> None:
        # A failure counts from the moment of it, before the other actors are cancelled and so become quiet.
        for supervisor in self._supervisors:
            if supervisor.state is ActorState.FAILED:
                name, error = supervisor.spec.name, supervisor.last_error
                raise ControllerClosedError(f"actor {name} failed before all was quiet: {error}")
        if self._cut_short:
            raise ControllerClosedError("the actors were cancelled before all was quiet")
