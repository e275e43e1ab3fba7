"""What of a request's prefix can be had: asked of the store, agreed with the other ranks, confirmed where need be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import anyio

from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.core.failed_keys import FailedKeys
from kvcr_actors.core.hit_policy import boundaries, longest, needed_masks
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.types import MissReason, PageKey

_CONFIRMATIONS = 32
"""The most boundaries of one prefix that a store is asked to confirm; the same on every rank."""

_NOTHING_TO_CONFIRM, _HAS_STORE, _TAKES_PART = 1, 2, 4
"""Below the boundaries in the first agreement; the last of them is lost only where a rank has left."""
_FLAGS = 3
_GOES_ON, _CONFIRMED = 2, 1


class PrefixSurvey:
    """Finds the longest prefix that every rank can restore; nothing is read and no memory taken.

    On several ranks the sequence of agreements is the same on each, whatever a rank has: which boundaries all could
    restore, then, if any rank's store wants it, one for each boundary that they try to confirm.
    """

    def __init__(self, state: LoopState, failed: FailedKeys) -> None:
        self._state = state
        self._failed = failed

    async def join(self, prefix: HeldPrefix, accord: Accord) -> None:
        """Make the agreements that come before the last with what is held, for a search that reads no more."""
        legal, any_confirms = await self._agree([page.mask for page in prefix.pages], prefix, accord, None)
        if any_confirms:
            await self._confirm(prefix, legal, accord, None)
        accord.reach_last()

    async def masks(self, prefix: HeldPrefix, accord: Accord, store: GuardedStore) -> list[int]:
        """Ask the store, agree with the other ranks; returns the pools to read of each page, for the longest prefix."""
        held = [page.mask for page in prefix.pages]
        first = prefix.first_incomplete(self._state.device.layout)
        found = await self._lookup(prefix.request.keys[first:], prefix, store)
        masks = [*held[:first], *(mask | more for mask, more in zip_longest(held[first:], found, fillvalue=0))]
        confirms = store.traits.requires_confirmation
        legal, any_confirms = await self._agree(masks, prefix, accord, store)
        if not any_confirms:
            accord.reach_last()
            return masks[: longest(legal)]
        length = await self._confirm(prefix, legal, accord, store if confirms else None)
        accord.reach_last()
        # What was promised beyond the need of this boundary was not confirmed.
        needed = needed_masks(self._state.device.layout, length)
        return [mask & need for mask, need in zip(masks[:length], needed, strict=True)] if confirms else masks[:length]

    async def _agree(
        self, masks: Sequence[int], prefix: HeldPrefix, accord: Accord, store: GuardedStore | None
    ) -> tuple[int, bool]:
        """The boundaries that every rank could restore, and whether any rank's store must confirm them.

        Where this rank alone could have gone further, `prefix.miss` says whether for want of another rank's store.
        """
        bits = boundaries(masks, self._state.device.layout)
        confirms = store is not None and store.traits.requires_confirmation
        flags = (0 if confirms else _NOTHING_TO_CONFIRM) | (0 if store is None else _HAS_STORE) | _TAKES_PART
        agreed = await accord.agree(bits << _FLAGS | flags)
        legal = agreed >> _FLAGS
        if store is not None and longest(legal) < longest(bits):
            lacks_store = agreed & _TAKES_PART and not agreed & _HAS_STORE
            prefix.miss = MissReason.RANK_WITHOUT_STORE if lacks_store else MissReason.RANKS_DISAGREED
        return legal, not agreed & _NOTHING_TO_CONFIRM

    async def _confirm(self, prefix: HeldPrefix, legal: int, accord: Accord, store: GuardedStore | None) -> int:
        """Try boundaries from the longest down; the first that every rank could confirm, 0 if none.

        A rank that has left votes against going on, and so every rank leaves in the same round.
        """
        held = prefix.boundaries(self._state.device.layout)
        for _ in range(_CONFIRMATIONS):
            length = longest(legal)
            if not length:
                break
            confirmed = store is None or held >> length & 1 or await self._delivered(prefix, length, store)
            vote = await accord.agree(_GOES_ON | (_CONFIRMED if confirmed else 0))
            if not vote & _GOES_ON:
                break
            if vote & _CONFIRMED:
                return length
            legal &= (1 << length) - 1
        return 0

    async def _delivered(self, prefix: HeldPrefix, length: int, store: GuardedStore) -> bool:
        traits = store.traits
        confirmation = store.confirm(prefix.request.keys[:length], prefix.request.request_id)
        with anyio.move_on_after(traits.read_budget_s + traits.read_budget_page_s * length):
            return await confirmation.outcome()
        prefix.miss = MissReason.DEADLINE
        return False

    async def _lookup(self, keys: Sequence[PageKey], prefix: HeldPrefix, store: GuardedStore) -> Sequence[int]:
        traits = store.traits
        lookup = store.lookup(keys, prefix.request.request_id)
        with anyio.move_on_after(traits.read_budget_s + traits.read_budget_page_s * len(keys)):
            masks = await lookup.outcome()
            trusted = self._failed.trusted(keys, masks, anyio.current_time())
            if trusted < len(keys) and masks[trusted : trusted + 1] and masks[trusted]:
                prefix.miss = MissReason.READ_FAILED
            return masks[:trusted]
        prefix.fail(MissReason.DEADLINE)
        return ()
