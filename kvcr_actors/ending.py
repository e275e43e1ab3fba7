"""How a controller ends: what is open is answered once its memory is quiet, and its failure is the last word.

An engine gives device pages and host pools to others once it is told that all is over. So nothing is told before the
copies have ended; what does not end in time is named instead.
"""

from __future__ import annotations

import anyio

from kvcr_actors.actors.resetting import Resets
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.ledger import ClaimLedger
from kvcr_actors.errors import DeadlineError
from kvcr_actors.messages import Completion, ControllerFailed
from kvcr_actors.port_life import LatePorts
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.runtime.outbox import Outbox


class Ending:
    """The end of one controller. Everything but `describe` is on the loop."""

    def __init__(self, ledger: ClaimLedger, outbox: Outbox[Completion]) -> None:
        self.late = LatePorts()
        self.failure: Exception | None = None
        """What ended the controller; the first counts."""
        self._ledger = ledger
        self._outbox = outbox
        self._is_told = False

    async def wait_quiet(self, state: LoopState, budget_s: float, resets: Resets) -> None:
        """After the actors have failed: tell of it as soon as no memory is in use; later, if something goes on."""
        with anyio.move_on_after(budget_s, shield=True):
            await state.claims_over()
            if not resets.open:
                self.tell()

    def settle(self) -> None:
        """The ports are closed: end what waits for copies whose end was never told, unless they may still run."""
        if self.late.is_memory_quiet:
            run_endings(*(claim.release for claim in self._ledger.quarantined_claims()))

    def tell(self) -> None:
        """Say the last word, if there is a failure to be told; once."""
        if self.failure is None or self._is_told:
            return
        self._is_told = True
        error = str(self.failure) or repr(self.failure)
        self._outbox.deliver((ControllerFailed("; ".join((error, *self.describe()))),))

    def check(self) -> None:
        """DeadlineError, after an orderly end, that names what still runs."""
        if words := self.describe():
            raise DeadlineError(f"the controller is closed, but not all has ended: {'; '.join(words)}")

    def describe(self) -> tuple[str, ...]:
        """What has not ended: ports, and orders whose memory is in use; from any thread."""
        claims = self._ledger.open_claims()
        words = [f"{claim.kind} of {claim.holder!r}" for claim in claims]
        return (*self.late.words, *([f"memory is in use for {', '.join(words)}"] if words else []))
