"""The ranks of an engine that has one: every proposal is agreed as it stands."""

from __future__ import annotations

import attrs

from kvcr_actors.ports import Agreement, Description, OperationId, RankTerms, Services


@attrs.frozen
class _Settled:
    bits: int

    async def outcome(self) -> int:
        return self.bits

    def withdraw(self) -> None:
        """It is agreed already."""


class SingleRank:
    """The `Ranks` of a process that shares its operations with nobody."""

    rank = 0
    size = 1

    async def open(self, services: Services, terms: RankTerms) -> None:
        """There is nobody to compare terms with."""

    def propose(self, operation: OperationId, bits: int) -> Agreement:
        """Agree at once."""
        del operation
        return _Settled(bits)

    async def agree(self, operation: OperationId, bits: int) -> int:
        """Return the bits unchanged."""
        del operation
        return bits

    async def close(self, deadline_s: float) -> None:
        """Nothing is open."""

    def describe(self) -> Description:
        """State for people."""
        return {"rank": self.rank, "size": self.size}
