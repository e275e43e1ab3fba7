"""The runtime: all actors of a controller, their orderly end, and the question whether they are quiet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
from anyio.lowlevel import checkpoint
from structlog.typing import FilteringBoundLogger

from kvcr_actors.errors import ConfigError
from kvcr_actors.runtime.supervisor import ActorSpec, Supervisor, raising_sole_cause


class Runtime:
    """Runs the actors of `specs`, which are given in the order in which they drain. Everything is on the loop."""

    def __init__(self, specs: Sequence[ActorSpec[Any]], log: FilteringBoundLogger) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ConfigError(f"actors {names}: each name may occur only once")
        self._log = log
        self._supervisors = [Supervisor[Any](spec, log, self.poke) for spec in specs]
        self._changed: anyio.Event | None = None
        self._quiet_calls: list[Callable[[], None]] = []
        self._quiet_asked = anyio.Event()

    async def run(self, started: Callable[[], None], stop: anyio.Event) -> None:
        """Run until `stop`, then drain. `started` is called once all actors are built.

        Raises the error of an actor that could not be built, or ActorEscalatedError; the other actors are
        cancelled then. Cancelling `run` skips the drain. In each case every message ends handled or abandoned.
        """
        try:
            with raising_sole_cause():
                async with anyio.create_task_group() as tasks:
                    for supervisor in self._supervisors:
                        await tasks.start(supervisor.run, name=supervisor.spec.name)
                    tasks.start_soon(self._answer_quiet_calls, name="runtime.quiet")
                    started()
                    await stop.wait()
                    for supervisor in self._supervisors:
                        await self._drain(supervisor)
                    tasks.cancel_scope.cancel()
        finally:
            self._run_quiet_calls()

    def is_quiet(self) -> bool:
        """Whether all inboxes are empty, no batch is in hand and no actor is busy."""
        return all(supervisor.is_quiet for supervisor in self._supervisors)

    def poke(self) -> None:
        """Look again whether all is quiet, a turn of the loop later. Free while nobody waits for it."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait_quiet(self) -> None:
        """Wait until all is quiet at one moment. The caller sets the deadline."""
        await checkpoint()
        while not self.is_quiet():
            if self._changed is None:
                self._changed = anyio.Event()
            await self._changed.wait()

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop once all is quiet, or the runtime ends. It must not raise."""
        self._quiet_calls.append(call)
        self._quiet_asked.set()

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

    async def _answer_quiet_calls(self) -> None:
        while True:
            await self._quiet_asked.wait()
            self._quiet_asked = anyio.Event()
            await self.wait_quiet()
            self._run_quiet_calls()

    def _run_quiet_calls(self) -> None:
        calls, self._quiet_calls = self._quiet_calls, []
        for call in calls:
            call()
