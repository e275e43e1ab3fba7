"""A full store is told of in the log a few times, with counts, however many batches it refuses."""

from __future__ import annotations

from structlog.testing import capture_logs

from kvcr_actors.actors.owed import OwedDeposits
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.messages import Completion
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.types import SkipReason


def test_a_reason_is_logged_at_doubling_counts_and_every_page_is_told_to_the_engine() -> None:
    outbox: Outbox[Completion] = Outbox()
    owed = OwedDeposits(ControllerStats(), outbox)
    with capture_logs() as logs:
        for number in range(268):
            owed.fail([number.to_bytes(32, "big")] * 3, SkipReason.STORE_FULL)
        owed.fail([bytes(32)], SkipReason.STORE_FAILED)
    assert [(one["reason"], one["times"], one["pages_so_far"]) for one in logs] == [
        *(("store_full", 1 << power, 3 << power) for power in range(9)),
        ("store_failed", 1, 1),
    ]
    assert len(outbox.take()) == 269
