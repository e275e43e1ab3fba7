"""How one request's missing pages are brought from the store to the host: in which order, and whom it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio

from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.completing import PageCompleter
from kvcr_actors.actors.filling import Filling, PageFiller
from kvcr_actors.actors.read_share import ReadShare
from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.actors.surveying import PrefixSurvey, Question
from kvcr_actors.core.failed_keys import FailedKeys
from kvcr_actors.core.hit_policy import boundaries, longest, needed_masks
from kvcr_actors.core.host_tier import HostPage
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.errors import ConfigError
from kvcr_actors.types import MissReason


class PrefixReader:
    """Extends a prefix page by page from the store; shared by all requests, so that their memory is bounded."""

    def __init__(self, state: LoopState) -> None:
        self._state = state
        config = state.config
        if 0 < state.host.capacity < config.prefetch_threshold_pages:
            raise ConfigError(
                f"prefetch_threshold_pages {config.prefetch_threshold_pages} is more than the {state.host.capacity} "
                "pages of the host: no prefix would ever be used; lower it, or enlarge the host"
            )
        self._failed = FailedKeys(config.failed_read_pause_s)
        self._share = ReadShare(config, state.host.capacity)
        self._survey = PrefixSurvey(state, self._failed)
        self._completer = PageCompleter(state)
        self._filler = PageFiller(state, self._failed, self._share)

    def is_all_held(self, prefix: HeldPrefix, found: Sequence[HostPage]) -> bool:
        """Whether nothing can be added to the ready pages that were found: no page fills, and no store has more."""
        state, keys = self._state, prefix.request.keys
        count = len(keys)
        if len(found) < count:
            return state.store is None and state.host.get(keys[len(found)]) is None
        if state.store is None:
            return True
        return longest(boundaries([page.mask for page in found], self._state.device.layout)) == count

    def ask(self, prefix: HeldPrefix, found: Sequence[HostPage], now: float) -> Question | None:
        """Ask the store what it has beyond the ready pages that were found.

        None where something must come before that: pages that are being filled, or what this request lends the store.
        """
        store, request = self._state.store, prefix.request
        if store is None or request.hints is not None or store.traits.requires_confirmation:
            return None
        if len(found) < len(request.keys) and self._state.host.get(request.keys[len(found)]) is not None:
            return None
        return self._survey.ask(prefix, found, store, now)

    def is_answered(self, prefix: HeldPrefix, question: Question, now: float) -> bool:
        """Whether the store has answered, or is too late (see `PrefixSurvey.is_answered`)."""
        return self._survey.is_answered(prefix, question, now)

    def needs_only_reads(self, prefix: HeldPrefix, question: Question) -> bool:
        """Whether all that the answer promises can be read now: no other request fills it, no page is held in part."""
        self._catch_up(prefix)
        keys, start, masks = prefix.request.keys, len(prefix.pages), question.masks or ()
        if start < len(keys) and self._state.host.get(keys[start]) is not None:
            return False
        return not self._lacking(prefix, masks[: question.length])

    def begin(self, prefix: HeldPrefix, question: Question, wake: Callable[[], None], now: float) -> Filling | None:
        """Begin to read what the answer promises beyond what is held (see `PageFiller.begin`)."""
        store, masks = self._state.store, question.masks
        if store is None or masks is None:
            return None
        return self._filler.begin(prefix, self._wanted(prefix, masks[: question.length]), store, wake, now)

    def align(self, prefix: HeldPrefix) -> None:
        """Refresh a prefix in the store: batches were read head first, and the tail must be the first to leave."""
        if self._state.config.refresh_store and self._state.store is not None:
            self._state.store.align(prefix.request.keys)

    async def read(self, prefix: HeldPrefix, accord: Accord, question: Question | None) -> None:
        """Extend the prefix as far as the store can; says in `prefix.miss` why it ends where it ends.

        `question` is what the store was asked already. The caller sets the deadline and may cancel at any await: what
        is held then is what was committed.
        """
        store = self._state.store
        if store is None:
            await self._wait_for_fills(prefix)
            await self.join(prefix, accord)
            return
        with store.serving(prefix.request):
            await self._read(prefix, accord, store, question)

    async def join(self, prefix: HeldPrefix, accord: Accord) -> None:
        """Make the agreements that come before the last with what is held, for a search that reads no more."""
        await self._survey.join(prefix, accord)

    async def _wait_for_fills(self, prefix: HeldPrefix) -> None:
        """Take in what is being filled for others, page after page: no store has it sooner."""
        state, keys = self._state, prefix.request.keys
        while prefix.is_current:
            self._catch_up(prefix)
            start = len(prefix.pages)
            page = state.host.get(keys[start]) if start < len(keys) else None
            if page is None or state.is_stuck(page):
                return
            await state.filled(page)

    async def _read(self, prefix: HeldPrefix, accord: Accord, store: GuardedStore, question: Question | None) -> None:
        keys, state = prefix.request.keys, self._state
        masks: list[int] | None = None
        while prefix.is_current:
            self._catch_up(prefix)
            start = len(prefix.pages)
            if masks is None and start == len(keys) and not accord.is_shared and prefix.is_whole(state.device.layout):
                return
            filling = state.host.get(keys[start]) if start < len(keys) else None
            stuck = filling is not None and state.is_stuck(filling)
            if stuck and masks is not None:
                prefix.fail(MissReason.READ_FAILED)
                return
            if filling is not None and not stuck:
                await state.filled(filling)
            elif masks is None:
                masks = await self._survey.masks(prefix, accord, store, question)
            else:
                wanted = self._wanted(prefix, masks)
                with state.reading():
                    if await self._complete(prefix, masks, store):
                        await self._filler.fill(prefix, wanted, store)
                self.align(prefix)
                return

    def _catch_up(self, prefix: HeldPrefix) -> None:
        """Take in pages that became ready meanwhile, for another request."""
        found = self._state.host.match(prefix.request.keys)
        if len(found) > len(prefix.pages):
            prefix.extend(found[len(prefix.pages) :])

    async def _complete(self, prefix: HeldPrefix, masks: Sequence[int], store: GuardedStore) -> bool:
        """Bring what the prefix of these masks needs of pages that the host holds in part; whether all came."""
        lacking = self._lacking(prefix, masks)
        if not lacking:
            return True
        if (refusal := self._share.refusal(len(lacking))) is not None:
            prefix.miss = refusal
            return False
        self._share.take(len(lacking))
        prefix.when_ended(partial(self._share.give_back, len(lacking)))
        failed = await self._completer.complete(prefix, lacking, store)
        if failed is not None:
            self._failed.note(failed, anyio.current_time())
        return all(not mask & ~page.mask for page, mask in lacking)

    def _lacking(self, prefix: HeldPrefix, masks: Sequence[int]) -> list[tuple[HostPage, int]]:
        """The pages held that lack pools which the prefix of these masks needs, with those pools."""
        if not prefix.pages:
            return []
        needed = needed_masks(self._state.device.layout, len(masks))
        return [
            (page, mask & need & ~page.mask)
            for page, mask, need in zip(prefix.pages, masks, needed, strict=False)
            if mask & need & ~page.mask
        ]

    def _wanted(self, prefix: HeldPrefix, masks: Sequence[int]) -> Sequence[int]:
        """The masks of the pages that follow what is held, up to one that the host has all the same, cut off."""
        start = len(prefix.pages)
        keys = prefix.request.keys[start : len(masks)]
        return masks[start : start + self._state.host.absent_run(keys)]
