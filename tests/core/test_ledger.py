"""Claims are owned tokens, consumed once, whatever the path out."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcr_actors.core.ledger import Claim, ClaimLedger, ClaimState
from kvcr_actors.errors import ClaimError


@pytest.fixture
def ledger() -> ClaimLedger:
    return ClaimLedger()


def test_a_with_block_releases_its_claim_at_exit(ledger: ClaimLedger) -> None:
    released: list[str] = []
    with ledger.claim("prefetch", "r1", lambda: released.append("r1")) as claim:
        assert ledger.open == 1
        assert claim.state is ClaimState.HELD
    assert released == ["r1"]
    assert (ledger.taken, ledger.released, ledger.open) == (1, 1, 0)


def test_a_with_block_releases_its_claim_when_it_raises(ledger: ClaimLedger) -> None:
    released: list[str] = []
    with pytest.raises(KeyError), ledger.claim("prefetch", "r1", lambda: released.append("r1")):
        raise KeyError("anything")
    assert released == ["r1"]
    assert ledger.open == 0


def test_a_claim_released_inside_its_with_block_is_not_released_again(ledger: ClaimLedger) -> None:
    released: list[str] = []
    with ledger.claim("prefetch", "r1", lambda: released.append("r1")) as claim:
        claim.release()
    assert released == ["r1"]
    assert ledger.refused == 0


def test_a_kept_claim_outlives_its_with_block_and_belongs_to_its_holder(ledger: ClaimLedger) -> None:
    released: list[str] = []
    with ledger.claim("restore", 7, lambda: released.append("7")) as claim:
        owned = claim.keep()
    assert not released
    assert [(c.kind, c.holder, c.state) for c in ledger.open_claims()] == [("restore", 7, ClaimState.HELD)]
    owned.release()
    assert released == ["7"]
    assert owned.is_released


def test_scenario_21_two_claims_on_one_thing_are_independent(ledger: ClaimLedger) -> None:
    pins = {"page": 0}

    def unpin() -> None:
        pins["page"] -= 1

    pins["page"] += 2
    first, second = ledger.take("prefetch", "a", unpin), ledger.take("prefetch", "b", unpin)
    first.release()
    with pytest.raises(ClaimError, match="prefetch claim of 'a', released"):
        first.release()
    assert pins["page"] == 1
    assert not second.is_released
    assert (ledger.open, ledger.refused) == (1, 1)


def test_a_claim_is_consumed_even_if_its_callback_raises(ledger: ClaimLedger) -> None:
    def fail() -> None:
        raise OSError("device lost")

    claim = ledger.take("backup", 3, fail)
    with pytest.raises(OSError, match="device lost"):
        claim.release()
    assert ledger.open == 0
    with pytest.raises(ClaimError):
        claim.release()


def test_a_callback_that_releases_its_own_claim_is_refused(ledger: ClaimLedger) -> None:
    claims: list[Claim] = []
    claims.append(ledger.take("backup", 3, lambda: claims[0].release()))
    with pytest.raises(ClaimError):
        claims[0].release()
    assert (ledger.taken, ledger.released, ledger.refused) == (1, 1, 1)


def test_quarantine_lasts_until_the_release(ledger: ClaimLedger) -> None:
    released: list[str] = []
    with ledger.claim("read", "r1", lambda: released.append("r1")) as claim:
        claim.quarantine(4096)
    assert not released
    assert (ledger.quarantined, ledger.quarantined_bytes, claim.quarantined_bytes) == (1, 4096, 4096)
    assert ledger.open_claims()[0].state is ClaimState.QUARANTINED
    assert ledger.open_claims()[0].quarantined_bytes == 4096
    claim.quarantine(1024)
    assert (ledger.quarantined, ledger.quarantined_bytes) == (1, 1024)
    claim.release()
    assert released == ["r1"]
    assert (ledger.quarantined, ledger.quarantined_bytes, claim.quarantined_bytes) == (0, 0, 0)


def test_a_released_claim_can_be_neither_kept_nor_quarantined(ledger: ClaimLedger) -> None:
    claim = ledger.take("read", "r1", lambda: None)
    with pytest.raises(ValueError, match="-1 bytes"):
        claim.quarantine(-1)
    claim.release()
    with pytest.raises(ClaimError, match="too late to keep"):
        claim.keep()
    with pytest.raises(ClaimError, match="too late to quarantine"):
        claim.quarantine(1)
    assert ledger.refused == 2
    assert ledger.quarantined == 0


class LedgerMachine(RuleBasedStateMachine):
    """Any order of taking, quarantining and releasing keeps the counters equal to a plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ClaimLedger()
        self.claims: list[Claim] = []
        self.quarantined: dict[Claim, int] = {}
        self.gone: list[Claim] = []
        self.callbacks = 0

    def _released(self) -> None:
        self.callbacks += 1

    @rule(holder=st.integers(0, 3))
    def take(self, holder: int) -> None:
        self.claims.append(self.ledger.take("kind", holder, self._released))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), size=st.integers(0, 100))
    def quarantine(self, data: st.DataObject, size: int) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        claim.quarantine(size)
        self.quarantined[claim] = size

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        claim.release()
        self.claims.remove(claim)
        self.quarantined.pop(claim, None)
        self.gone.append(claim)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        with pytest.raises(ClaimError):
            data.draw(st.sampled_from(self.gone)).release()

    @invariant()
    def counters_match(self) -> None:
        ledger = self.ledger
        assert ledger.open == len(self.claims) == len(ledger.open_claims())
        assert ledger.taken == ledger.released + ledger.open
        assert ledger.released == self.callbacks == len(self.gone)
        assert ledger.quarantined == len(self.quarantined)
        assert ledger.quarantined_bytes == sum(self.quarantined.values())


TestLedgerMachine = LedgerMachine.TestCase


def test_whoever_knows_that_memory_is_quiet_finds_what_waits_for_it() -> None:
    ledger = ClaimLedger()
    ledger.take("prefetch", "held", lambda: None)
    late = ledger.take("backup", 1, lambda: None)
    late.quarantine(10)
    assert ledger.quarantined_claims() == (late,)
    late.release()
    assert not ledger.quarantined_claims()
