"""How a request's prefix ends: what it holds goes back, and the engine is told, once, whatever raises on the way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvcr_actors.actors.state import LoopState
from kvcr_actors.core.accounting import RequestAccount
from kvcr_actors.core.prefetch_state import HeldPrefix
from kvcr_actors.messages import Completion, PrefetchCancelled
from kvcr_actors.runtime.endings import run_endings
from kvcr_actors.types import MissReason


def end_ready(state: LoopState, reason: MissReason) -> None:
    """End every prefix that stands ready."""
    answers: list[Completion] = []
    endings = [partial(end_prefix, state, prefix, reason, answers) for prefix in state.prefixes.values()]
    run_endings(*endings, state.prefixes.clear, partial(state.outbox.deliver, answers))


def end_prefix(state: LoopState, prefix: HeldPrefix, reason: MissReason, answers: list[Completion]) -> None:
    """Give back what a prefix holds, wherever it stands, and tell the engine why."""
    run_endings(partial(_end_once, state, prefix, reason, answers))


def _end_once(state: LoopState, prefix: HeldPrefix, reason: MissReason, answers: list[Completion]) -> None:
    request_id = prefix.request.request_id
    if state.prefixes.get(request_id) is prefix:
        del state.prefixes[request_id]
    count_started(state, prefix)
    prefix.miss = reason
    if not prefix.answered:
        state.stats.prefetch.cancelled += 1
        state.ended_by_reset += reason is MissReason.RESET
    answer_prefix(state, prefix, reason, partial(PrefetchCancelled, request_id), answers)


def answer_prefix(
    state: LoopState,
    prefix: HeldPrefix,
    drop: MissReason,
    answer: Callable[[RequestAccount], Completion],
    answers: list[Completion],
) -> None:
    """Give back what a prefix holds and answer it with its account, once; may be taken up again where it broke off."""
    if not prefix.is_over:
        prefix.end()
    if not prefix.answered:
        account = prefix.account(drop)
        answers.append(prefix.answer(answer(account)))
        state.stats.settle(account)


def count_started(state: LoopState, prefix: HeldPrefix) -> None:
    """Count a prefetch that held, or tried to read, pages that the device lacks; once."""
    if not prefix.counted:
        prefix.counted = True
        state.stats.prefetch.started += 1
