"""What comes of a search: a prefix that stands ready until the engine takes it or its life time ends, or an answer."""

from __future__ import annotations

from functools import partial

import anyio
import structlog

from kvcr_actors.actors.prefix_end import answer_prefix, count_started, end_prefix
from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.prefetch_state import HeldPrefix, Phase
from kvcr_actors.messages import Completion, PrefetchReady
from kvcr_actors.runtime.foreign import Tasks
from kvcr_actors.types import MissReason

log = structlog.get_logger()


class ReadyPrefixes:
    """Concludes searches, and ends what nobody takes; the prefixes themselves are the loop's state."""

    def __init__(self, state: LoopState, tasks: Tasks) -> None:
        self._state = state
        self._tasks = tasks
        self._expiry_runs = False
        # An actor that was rebuilt finds those of its predecessor.
        self._watch_expiry()

    def conclude(self, prefix: HeldPrefix, answers: list[Completion]) -> None:
        """Hold the prefix for the engine if it is worth a restore, else end it here; what breaks off is ended too."""
        if not prefix.is_current:
            end_prefix(self._state, prefix, MissReason.RESET, answers)
            return
        try:
            self._hold_or_end(prefix, answers)
        except Exception:
            end_prefix(self._state, prefix, MissReason.STOPPED, answers)
            raise

    def end_without(self, prefix: HeldPrefix, answers: list[Completion]) -> None:
        """Nothing beyond the device is worth a restore."""
        request = prefix.request
        ready = partial(PrefetchReady, request.request_id, request.device_pages)
        answer_prefix(self._state, prefix, MissReason.BELOW_THRESHOLD, ready, answers)

    def _hold_or_end(self, prefix: HeldPrefix, answers: list[Completion]) -> None:
        state = self._state
        prefix.truncate(state.device.layout)
        request_id = prefix.request.request_id
        if prefix.beyond_device < state.config.prefetch_threshold_pages:
            if prefix.failed:
                count_started(state, prefix)
                state.stats.prefetch.failed += 1
            self.end_without(prefix, answers)
            return
        count_started(state, prefix)
        prefix.advance(Phase.READY)
        prefix.expires_at = anyio.current_time() + state.config.claim_lifetime_s
        state.prefixes[request_id] = prefix
        answers.append(PrefetchReady(request_id, len(prefix.pages)))
        self._watch_expiry()

    def _watch_expiry(self) -> None:
        if self._state.prefixes and not self._expiry_runs:
            self._tasks.start_soon(self._expire, name="prefetch expiry")
            self._expiry_runs = True

    async def _expire(self) -> None:
        """End prefixes that the engine neither took nor cancelled in their life time."""
        prefixes = self._state.prefixes
        try:
            while prefixes:
                await anyio.sleep_until(min(prefix.expires_at for prefix in prefixes.values()))
                now = anyio.current_time()
                answers: list[Completion] = []
                for prefix in [one for one in prefixes.values() if one.expires_at <= now]:
                    log.warning("prefetch.expired", request_id=prefix.request.request_id)
                    end_prefix(self._state, prefix, MissReason.NOT_RESTORED, answers)
                self._state.outbox.deliver(answers)
        finally:
            self._expiry_runs = False
