"""How pages that the host holds in part get from the store what a prefix needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.core.host_tier import Growth, HostPage
from kvcr_actors.core.ledger import Claim
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.ports import BatchOutcome, PageBatch, PageOutcome
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.transfers import Operation
from kvcr_actors.types import MissReason, PageKey

log = structlog.get_logger()


class PageCompleter:
    """Reads components into pages that stand ready. A copy was read for one boundary; another may need more of it."""

    def __init__(self, state: LoopState) -> None:
        self._state = state

    async def complete(
        self, prefix: HeldPrefix, wanted: Sequence[tuple[HostPage, int]], store: GuardedStore
    ) -> PageKey | None:
        """Read for each page of the prefix the pools given; returns the first page whose read failed, None if none.

        Where something does not come, the pages stay as they were, and `prefix.miss` says why. The caller may cancel.
        """
        try:
            growths = self._state.host.reserve_more(wanted)
        except NoHostMemoryError:
            prefix.miss = MissReason.NO_HOST_MEMORY
            return None
        reads: list[Operation[BatchOutcome]] = []
        give_back = partial(run_endings, partial(self._state.drop_growths, growths))
        claim = self._state.ledger.take("read", prefix.request.request_id, give_back)
        try:
            self._state.publish_changes()
            size = store.traits.batch_pages
            for first in range(0, len(growths), size):
                failed = await self._read(prefix, growths[first : first + size], reads, store)
                if prefix.failed:
                    return failed
            return None
        finally:
            run_endings(partial(self._leave, len(growths), reads, claim))

    async def _read(
        self, prefix: HeldPrefix, growths: Sequence[Growth], reads: list[Operation[BatchOutcome]], store: GuardedStore
    ) -> PageKey | None:
        """Read one batch and give its components to their pages; the page that failed, if one did."""
        traits = store.traits
        slots = tuple(zip(*(growth.slots for growth in growths), strict=True))
        batch = PageBatch(tuple(growth.page.key for growth in growths), slots)
        read = store.read(batch, prefix.request.request_id)
        reads.append(read)
        with anyio.move_on_after(traits.read_budget_s + traits.read_budget_page_s * len(growths)):
            if PageOutcome.OK in (await read.outcome()).pages:
                await read.quiet()
        landed = read.settled_outcome() if read.is_quiet else None
        pages = (PageOutcome.FAILED,) * len(growths) if landed is None else landed.pages
        good = [growth for growth, page in zip(growths, pages, strict=True) if page is PageOutcome.OK]
        # The store has what it gave: the pages are as stored as they were.
        self._state.host.grow(good)
        if len(good) == len(growths):
            return None
        reason = MissReason.READ_FAILED if read.is_settled else MissReason.DEADLINE
        log.warning("prefetch.not_completed", request_id=prefix.request.request_id, reason=reason.value)
        prefix.fail(reason)
        return next(
            (growth.page.key for growth, page in zip(growths, pages, strict=True) if page is PageOutcome.FAILED), None
        )

    def _leave(self, pages: int, reads: Sequence[Operation[BatchOutcome]], claim: Claim) -> None:
        last = reads[-1] if reads else None
        self._state.release_when_quiet(last, claim, pages * self._state.device.layout.page_bytes)
