"""What of a request's prefix can be had: asked of the store, agreed with the other ranks, confirmed where need be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import anyio
import attrs

from kvcr_actors.actors.accord import Accord
from kvcr_actors.actors.state import LoopState
from kvcr_actors.actors.store_guard import GuardedStore
from kvcr_actors.core.failed_keys import FailedKeys
from kvcr_actors.core.hit_policy import boundaries, longest, needed_masks
from kvcr_actors.core.host_tier import HostPage
from kvcr_actors.core.prefetch_state import HeldPrefix, first_incomplete
from kvcr_actors.transfers import Operation
from kvcr_actors.types import MissReason, PageKey

_CONFIRMATIONS = 32
"""The most boundaries of one prefix that a store is asked to confirm; the same on every rank."""

_NOTHING_TO_CONFIRM, _HAS_STORE, _TAKES_PART = 1, 2, 4
"""Below the boundaries in the first agreement; the last of them is lost only where a rank has left."""
_FLAGS = 3
_GOES_ON, _CONFIRMED = 2, 1


@attrs.define(eq=False)
class Question:
    """What the store was asked of a prefix; `masks` is the answer, with what the host holds, once it is known."""

    held: Sequence[int]
    """The pools that the host had of each page."""
    first: int
    """The first page that the store was asked for."""
    keys: Sequence[PageKey]
    """What it was asked for."""
    lookup: Operation[tuple[int, ...]]
    late_at: float
    """The loop time after which the answer is not waited for."""
    masks: list[int] | None = None
    length: int = 0
    """The longest prefix that could be restored with the answer."""

    @property
    def adds_nothing(self) -> bool:
        """Whether it is known that the store has nothing for the prefix."""
        return self.masks is not None and self.length <= self.first


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

    def ask(self, prefix: HeldPrefix, pages: Sequence[HostPage], store: GuardedStore, now: float) -> Question:
        """Ask the store for what the host lacks beyond the ready pages given; an answer at once is taken in."""
        held, traits = [page.mask for page in pages], store.traits
        first = first_incomplete(held, self._state.device.layout)
        keys = prefix.request.keys[first:]
        late_at = now + traits.read_budget_s + traits.read_budget_page_s * len(keys)
        question = Question(held, first, keys, store.lookup(keys, prefix.request.request_id), late_at)
        self.is_answered(prefix, question, now)
        return question

    def is_answered(self, prefix: HeldPrefix, question: Question, now: float) -> bool:
        """Take in the store's answer if it is there or late; what is late is there no more, and `prefix` failed."""
        if question.masks is None:
            if question.lookup.is_settled:
                question.masks = self._believed(prefix, question, now)
            elif now >= question.late_at:
                prefix.fail(MissReason.DEADLINE)
                question.masks = list(question.held)
            else:
                return False
            question.length = longest(boundaries(question.masks, self._state.device.layout))
        return True

    async def masks(
        self, prefix: HeldPrefix, accord: Accord, store: GuardedStore, question: Question | None
    ) -> list[int]:
        """Ask the store, if that was not done, and agree with the other ranks.

        Returns the pools to read of each page, for the longest prefix.
        """
        if question is None:
            question = self.ask(prefix, prefix.pages, store, anyio.current_time())
        masks = await self._answer(prefix, question)
        confirms = store.traits.requires_confirmation
        if not (accord.is_shared or confirms):
            return masks[: question.length]
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

    async def _answer(self, prefix: HeldPrefix, question: Question) -> list[int]:
        """Wait for the store's answer within its budget; without one there is what the host holds."""
        while not self.is_answered(prefix, question, anyio.current_time()):
            with anyio.CancelScope(deadline=question.late_at):
                await question.lookup.outcome()
        return list(question.masks or ())

    def _believed(self, prefix: HeldPrefix, question: Question, now: float) -> list[int]:
        """What the store has, as far as it can be believed, with what the host holds."""
        keys, found = question.keys, question.lookup.settled_outcome() or ()
        trusted = self._failed.trusted(keys, found, now)
        if trusted < len(keys) and found[trusted : trusted + 1] and found[trusted]:
            prefix.miss = MissReason.READ_FAILED
        known, asked = question.held[: question.first], question.held[question.first :]
        more = [a | b for a, b in zip_longest(asked, found[:trusted], fillvalue=0)] if asked else found[:trusted]
        return [*known, *more]
