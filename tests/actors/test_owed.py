"""What is owed to a store is bounded by the host's pages, and each page that leaves it unstored is named once."""

from __future__ import annotations

import pytest

from kvcr_actors.actors.owed import OwedDeposits
from kvcr_actors.core.host_tier import PagesRemoved
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.messages import Completion, DepositFailed
from kvcr_actors.runtime.outbox import Outbox
from kvcr_actors.types import PageKey, SkipReason
from tests.actors.rig import Rig, chain

SLOTS = 8


class Owing:
    """A host of a few pages, and what is owed of them."""

    def __init__(self) -> None:
        self.outbox: Outbox[Completion] = Outbox()
        self.stats = ControllerStats()
        self.owed = OwedDeposits(self.stats, self.outbox)
        self._host = Rig(host_slots=SLOTS, store_pages=None).assembly.host

    def owe(self, name: str, count: int) -> tuple[PageKey, ...]:
        """Owe pages that are new in the host; those that leave it for them are told of."""
        pages = self._host.reserve(None, chain(name, count))
        self._tell_of_leaving()
        self._host.commit(pages)
        self.owed.owe(pages)
        return tuple(page.key for page in pages)

    def failures(self) -> list[tuple[PageKey, SkipReason]]:
        told = [one for one in self.outbox.take() if isinstance(one, DepositFailed)]
        return [(key, one.reason) for one in told for key in one.keys]

    def _tell_of_leaving(self) -> None:
        for change in self._host.take_changes():
            if isinstance(change, PagesRemoved):
                self.owed.lose(change.keys)


def test_what_is_owed_is_never_more_than_the_host_holds() -> None:
    owing = Owing()
    shed = [key for number in range(20) for key in owing.owe(f"path {number}", 3)]
    assert len(owing.owed) <= SLOTS
    named = owing.failures()
    assert sorted([*(key for key, _ in named), *owing.owed.take()]) == sorted(shed)
    assert {reason for _, reason in named} == {SkipReason.QUEUE_FULL}
    assert owing.stats.deposit.shed == len(shed)


def test_without_its_bound_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwedDeposits, "lose", lambda owed, keys: None)
    with pytest.raises(AssertionError):
        test_what_is_owed_is_never_more_than_the_host_holds()


def test_what_had_no_room_comes_first_again_and_what_the_store_has_is_owed_no_more() -> None:
    owing = Owing()
    first = owing.owe("a", 3)
    taken = owing.owed.take()
    second = owing.owe("b", 2)
    owing.owed.put_back(taken[1:])
    owing.owed.settle(second[0])
    assert owing.owed.take() == [*first[1:], second[1]]
    assert not owing.owed


def test_the_end_names_all_that_is_owed_once() -> None:
    owing = Owing()
    keys = owing.owe("a", 3)
    owing.owed.end(SkipReason.STOPPED)
    owing.owed.end(SkipReason.STOPPED)
    assert owing.failures() == [(key, SkipReason.STOPPED) for key in keys]
