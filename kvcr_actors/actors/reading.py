"""How one request's missing pages are found in the store and brought to the host."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import structlog

from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.core.admission import PrefetchAdmission
from kvcr_actors.core.hit_policy import boundaries, longest
from kvcr_actors.core.host_tier import HostPage
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.ports import BatchOutcome, PageBatch, PageOutcome
from kvcr_actors.runtime.operation import Operation
from kvcr_actors.types import MissReason, PageKey

log = structlog.get_logger()

_TRIES = 2
"""A read that fails is tried once more, never in a loop: the request recomputes."""

_DISTRUSTED_KEYS = 4096


class PrefixReader:
    """Extends a prefix page by page from the store; shared by all requests, so that their memory is bounded."""

    def __init__(self, state: LoopState, store: GuardedStore) -> None:
        self._state = state
        self._store = store
        self._in_flight = 0
        self._distrusted: dict[PageKey, float] = {}
        self._stuck: set[HostPage] = set()
        """Pages whose read is over for everybody, but whose memory is not quiet: nobody waits for them."""
        config = state.config
        self._admission = PrefetchAdmission(
            threshold_pages=1,
            capacity_pages=state.host.capacity,
            reserve_fraction=config.host_reserve_fraction,
            in_flight_limit=config.prefetch_in_flight_pages,
        )

    async def read(self, prefix: HeldPrefix) -> None:
        """Extend the prefix as far as the store can; says in `prefix.miss` why it ends where it ends.

        The caller sets the deadline and may cancel at any await: what is held then is what was committed.
        """
        with self._store.hinted(prefix.request):
            await self._read(prefix)

    async def _read(self, prefix: HeldPrefix) -> None:
        keys = prefix.request.keys
        known: list[int] | None = None
        while True:
            self._catch_up(prefix)
            start = len(prefix.pages)
            if start == len(keys):
                return
            filling = self._state.host.get(keys[start])
            if filling is not None and filling in self._stuck:
                prefix.fail(MissReason.READ_FAILED)
                return
            if filling is not None:
                await self._state.filled(filling)
            elif known is None:
                known = await self._agreed_masks(prefix)
            else:
                await self._fill(prefix, known[start : start + self._state.host.absent_run(keys[start:])])
                if self._state.config.refresh_store:
                    # Batches were read head first; the tail must be the first to leave.
                    self._store.align(keys)
                return

    def _catch_up(self, prefix: HeldPrefix) -> None:
        """Take in pages that became ready meanwhile, for another request."""
        host, keys = self._state.host, prefix.request.keys
        found = host.match(keys)
        if len(found) > len(prefix.pages):
            prefix.extend(found[len(prefix.pages) :])

    async def _agreed_masks(self, prefix: HeldPrefix) -> list[int]:
        """Ask the store, agree with the other ranks; returns each page's pools up to the longest legal boundary."""
        layout = self._state.device.layout
        start, request = len(prefix.pages), prefix.request
        found = await self._lookup(request.keys[start:], prefix)
        masks = [*(page.mask for page in prefix.pages), *found]
        bits = await self._state.ranks.agree(("prefetch", request.request_id), boundaries(masks, layout))
        return masks[: longest(bits)]

    async def _lookup(self, keys: Sequence[PageKey], prefix: HeldPrefix) -> Sequence[int]:
        traits = self._store.traits
        lookup = self._store.lookup(keys, prefix.request.request_id)
        with anyio.move_on_after(traits.read_budget_s + traits.read_budget_page_s * len(keys)):
            return self._trusted(prefix, keys, await lookup.outcome())
        prefix.fail(MissReason.DEADLINE)
        return ()

    def _trusted(self, prefix: HeldPrefix, keys: Sequence[PageKey], masks: Sequence[int]) -> Sequence[int]:
        """Cut the answer before a page whose read failed a short while ago."""
        if self._distrusted:
            now = anyio.current_time()
            for index, (key, mask) in enumerate(zip(keys, masks, strict=False)):
                if mask and self._distrusted.get(key, now) > now:
                    prefix.miss = MissReason.READ_FAILED
                    return masks[:index]
        return masks[: len(keys)]

    def _distrust(self, key: PageKey) -> None:
        """Believe a page absent for a while, so that each request for it does not pay for its reads again."""
        self._distrusted.pop(key, None)
        self._distrusted[key] = anyio.current_time() + self._state.config.failed_read_pause_s
        if len(self._distrusted) > _DISTRUSTED_KEYS:
            del self._distrusted[next(iter(self._distrusted))]

    async def _fill(self, prefix: HeldPrefix, masks: Sequence[int]) -> None:
        """Reserve host slots for the pages that the store has, and read them in batches."""
        state = self._state
        start = len(prefix.pages)
        if not masks:
            return
        beyond_device = start + len(masks) - prefix.request.device_pages
        if beyond_device < state.config.prefetch_threshold_pages:
            if beyond_device > 0:
                prefix.miss = MissReason.BELOW_THRESHOLD
            return
        refusal = self._admission.admit(len(masks), self._in_flight)
        if refusal is not None:
            prefix.miss = refusal
            return
        keys = prefix.request.keys[start : start + len(masks)]
        try:
            pages = state.host.reserve(prefix.pages[-1] if start else None, keys, masks)
        except NoHostMemoryError:
            prefix.miss = MissReason.NO_HOST_MEMORY
            return
        # Pages under a read that is not quiet go on counting: they are memory that prefetches took.
        self._in_flight += len(pages)
        claim = state.ledger.take("read", prefix.request.request_id, lambda: self._give_back(pages))
        reads: list[Operation[BatchOutcome]] = []
        try:
            state.publish_changes()
            size = self._store.traits.batch_pages
            for first in range(0, len(pages), size):
                if not await self._read_batch(prefix, pages[first : first + size], reads):
                    return
        finally:
            if reads and not reads[-1].is_quiet:
                self._stuck.update(pages)
                self._state.stop_waiting(pages)
            # Those before the last are quiet, else it would not have begun.
            state.release_when_quiet(reads[-1] if reads else None, claim, len(pages) * state.device.layout.page_bytes)

    async def _read_batch(
        self, prefix: HeldPrefix, left: Sequence[HostPage], reads: list[Operation[BatchOutcome]]
    ) -> bool:
        """Read pages, with one more try for those that fail, and add them to the prefix; whether all came."""
        reason = MissReason.READ_FAILED
        faulty = False
        for _ in range(_TRIES):
            reads.append(self._store.read(_page_batch(left), prefix.request.request_id))
            outcome = await self._outcome(reads[-1], len(left))
            if outcome is None:
                faulty, reason = True, MissReason.DEADLINE
                break
            left = left[self._take(prefix, left, outcome) :]
            if not left:
                return True
            faulty = outcome.pages[-len(left)] is PageOutcome.FAILED
            if not faulty or not reads[-1].is_quiet:
                break
        log.warning("prefetch.read_failed", request_id=prefix.request.request_id, reason=reason.value)
        if faulty:
            self._distrust(left[0].key)
        prefix.fail(reason)
        return False

    async def _outcome(self, read: Operation[BatchOutcome], pages: int) -> BatchOutcome | None:
        traits = self._store.traits
        with anyio.move_on_after(traits.read_budget_s + traits.read_budget_page_s * pages):
            outcome = await read.outcome()
            if PageOutcome.OK in outcome.pages:
                # Pages that native code still touches must not be handed on.
                await read.quiet()
            return outcome
        return None

    def _give_back(self, pages: Sequence[HostPage]) -> None:
        self._in_flight -= len(pages)
        self._stuck.difference_update(pages)
        self._state.abandon_unfilled(pages)

    def _take(self, prefix: HeldPrefix, pages: Sequence[HostPage], outcome: BatchOutcome) -> int:
        """Commit the leading good pages and add them to the prefix; returns how many."""
        good = 0
        while good < len(pages) and outcome.pages[good] is PageOutcome.OK:
            good += 1
        for page in pages[:good]:
            page.stored = True
        prefix.extend(self._state.commit(pages[:good]))
        self._state.publish_changes()
        return good


def _page_batch(pages: Sequence[HostPage]) -> PageBatch:
    slots = tuple(zip(*(page.slots for page in pages), strict=True))
    return PageBatch(tuple(page.key for page in pages), slots)
