"""What the ranks agree on while one request's prefix is searched: a sequence that each of them makes alike."""

from __future__ import annotations

from functools import partial

from kvcr_actors.ports import Agreement, Ranks, Services
from kvcr_actors.types import RequestId


class Accord:
    """The agreements of one search, numbered; every rank makes the same ones, until one comes out empty or the last is
    made.

    A search that leaves earlier (cancelled, refused, stopped) withdraws what is open, and its rank still joins: the
    agreement that is open, or the next one if that came out with bits. So no other rank waits for it, and each of them
    leaves with the same agreement.
    """

    __slots__ = ("_at_last", "_is_last", "_made", "_open", "_over", "_ranks", "_request_id", "_services")

    def __init__(self, ranks: Ranks, services: Services, request_id: RequestId) -> None:
        self._ranks = ranks
        self._services = services
        self._request_id = request_id
        self._made = 0
        self._open: Agreement | None = None
        self._is_last = False
        self._at_last = False
        self._over = False

    @property
    def is_shared(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks.size > 1

    @property
    def is_over(self) -> bool:
        """Whether no rank makes another agreement."""
        return self._over

    @property
    def has_begun(self) -> bool:
        """Whether an agreement was made."""
        return self._made > 0

    @property
    def is_at_last(self) -> bool:
        """Whether the next agreement is the last one on every rank: agreements are paired by their numbers alone."""
        return self._at_last

    def reach_last(self) -> None:
        """Note that all agreements before the last are made."""
        self._at_last = True

    async def agree(self, bits: int, *, last: bool = False) -> int:
        """Make the next agreement; 0 ends the search on every rank, and so does the last."""
        self._is_last = last
        self._open = self._propose(bits)
        agreed = await self._open.outcome()
        self._open = None
        self._over = last or not agreed
        return agreed

    def leave_if_open(self) -> None:
        """Leave if an agreement was given up half way."""
        if self._open is not None:
            self.leave()

    def leave(self) -> None:
        """Make no more agreements, but let no other rank wait."""
        if self._over or not self.is_shared:
            return
        self._over = True
        if self._open is None:
            self._open = self._propose(0)
        self._open.withdraw()
        self._services.spawn(partial(self._see_out, self._open), "ranks: leave a search")

    async def _see_out(self, agreement: Agreement) -> None:
        """Where the ranks agreed just before this one left, they go on to the next: leave with that one."""
        if await agreement.outcome() and not self._is_last:
            await self._propose(0).outcome()

    def _propose(self, bits: int) -> Agreement:
        self._made += 1
        return self._ranks.propose((f"prefetch {self._made}", self._request_id), bits)
