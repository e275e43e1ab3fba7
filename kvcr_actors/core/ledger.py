"""Claims: owned tokens, consumed once, that keep memory or a residency from eviction and reuse."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import TracebackType

import attrs

from kvcr_actors.errors import ClaimError
from kvcr_actors.types import RequestId


class ClaimState(enum.StrEnum):
    """Where a claim stands."""

    HELD = "held"
    QUARANTINED = "quarantined"
    """Native code that cannot be stopped may still touch the memory."""
    RELEASED = "released"


@attrs.frozen
class OpenClaim:
    """One open claim, for people."""

    kind: str
    holder: RequestId
    state: ClaimState
    quarantined_bytes: int


class Claim:
    """One owned token. As a context manager it is released at exit unless it was kept, quarantined or released inside.

    Made by `ClaimLedger.take` or `ClaimLedger.claim` only.
    """

    __slots__ = ("_ledger", "_owned", "_quarantined_bytes", "_release", "holder", "kind", "state")

    def __init__(self, ledger: ClaimLedger, kind: str, holder: RequestId, release: Callable[[], None]) -> None:
        self.kind = kind
        self.holder = holder
        self.state = ClaimState.HELD
        self._ledger = ledger
        self._release = release
        self._quarantined_bytes = 0
        self._owned = False

    def release(self) -> None:
        """Consume the claim, then run its release callback; the claim is consumed even if that raises.

        A second release is a ClaimError, and counted.
        """
        ledger = self._ledger
        if self.state is ClaimState.RELEASED:
            ledger.refused += 1
            raise ClaimError(f"{self!r} was released already; its holder must release it once")
        self._end_quarantine()
        self.state = ClaimState.RELEASED
        ledger.forget(self)
        self._release()

    def keep(self) -> Claim:
        """Take the claim out of its `with` block: from now on the holder must release it."""
        self._check_open("keep")
        self._owned = True
        return self

    def quarantine(self, size: int) -> None:
        """Mark `size` bytes as still touched by native code, and keep the claim until a later `release`.

        Marking again replaces the size.
        """
        self._check_open("quarantine")
        if size < 0:
            raise ValueError(f"{self!r}: {size} bytes cannot be quarantined")
        self._end_quarantine()
        self.state = ClaimState.QUARANTINED
        self._owned = True
        self._quarantined_bytes = size
        self._ledger.quarantined += 1
        self._ledger.quarantined_bytes += size

    @property
    def is_released(self) -> bool:
        """Whether the claim was consumed."""
        return self.state is ClaimState.RELEASED

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of this claim that are quarantined now."""
        return self._quarantined_bytes

    def _end_quarantine(self) -> None:
        if self.state is ClaimState.QUARANTINED:
            self._ledger.quarantined -= 1
            self._ledger.quarantined_bytes -= self._quarantined_bytes
            self._quarantined_bytes = 0

    def _check_open(self, action: str) -> None:
        if self.state is ClaimState.RELEASED:
            self._ledger.refused += 1
            raise ClaimError(f"{self!r} was released already; it is too late to {action} it")

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._owned and self.state is not ClaimState.RELEASED:
            self.release()

    def __repr__(self) -> str:
        return f"<{self.kind} claim of {self.holder!r}, {self.state}>"


class ClaimLedger:
    """Counts and names every claim: `taken == released + open`, always.

    `refused` counts uses of a claim after its release, `quarantined` the open claims whose memory is not quiet.
    """

    __slots__ = ("_open", "quarantined", "quarantined_bytes", "refused", "released", "taken")

    def __init__(self) -> None:
        self._open: dict[Claim, None] = {}
        self.taken = 0
        self.released = 0
        self.refused = 0
        self.quarantined = 0
        self.quarantined_bytes = 0

    def take(self, kind: str, holder: RequestId, release: Callable[[], None]) -> Claim:
        """Open a claim that `holder` must release; `release` gives back what it holds."""
        claim = Claim(self, kind, holder, release)
        self._open[claim] = None
        self.taken += 1
        return claim

    def claim(self, kind: str, holder: RequestId, release: Callable[[], None]) -> Claim:
        """Open a claim for a `with` block, which releases it unless `keep()` was called inside."""
        return self.take(kind, holder, release)

    @property
    def open(self) -> int:
        """Claims that are not released."""
        return len(self._open)

    def open_claims(self) -> tuple[OpenClaim, ...]:
        """Every open claim, oldest first."""
        return tuple(OpenClaim(c.kind, c.holder, c.state, c.quarantined_bytes) for c in tuple(self._open))

    def quarantined_claims(self) -> tuple[Claim, ...]:
        """The claims on memory that native code may still touch, oldest first, for whoever knows that it has ended."""
        return tuple(claim for claim in self._open if claim.state is ClaimState.QUARANTINED)

    def forget(self, claim: Claim) -> None:
        """Count a claim as released. Called by the claim itself."""
        del self._open[claim]
        self.released += 1
