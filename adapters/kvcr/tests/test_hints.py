"""Hints are parsed strictly; whatever comes, the answer is a typed hint or a reason, and agrees with the runner."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvcr.hint_parser import _KVFetchHint

from kvcr_actors_kvcr import FetchHint, HintRefusal, parse_hint

HOSTS = frozenset({"127.0.0.1", "node-1"})
GOOD = FetchHint("tcp://127.0.0.1:5000", frozenset({1, (1 << 64) - 1}))


def parse(envelope: object, *, move_hints: bool = False) -> FetchHint | HintRefusal:
    return parse_hint(envelope, HOSTS, move_hints=move_hints)


def changed(**payload: Any) -> dict[str, Any]:
    envelope = GOOD.envelope("id")
    envelope["actions"][0]["payload"].update(payload)
    return envelope


def test_a_good_envelope_is_a_typed_hint():
    assert parse(GOOD.envelope("id")) == GOOD


def test_unknown_actions_are_ignored():
    envelope = GOOD.envelope("id")
    envelope["actions"].insert(0, {"action_type": "kv.other", "action_version": "7"})
    assert parse(envelope) == GOOD
    envelope["actions"].pop()
    assert parse(envelope) is HintRefusal.NO_FETCH


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"source_control_endpoint": "tcp://10.0.0.1:5000"}, HintRefusal.HOST),
        ({"source_control_endpoint": "tcp://127.0.0.1:0"}, HintRefusal.MALFORMED),
        ({"source_control_endpoint": "tcp://127.0.0.1:65536"}, HintRefusal.MALFORMED),
        ({"source_control_endpoint": "tcp://127.0.0.1:" + "9" * 5_000}, HintRefusal.MALFORMED),
        ({"source_control_endpoint": "tcp://*:5000"}, HintRefusal.MALFORMED),
        ({"source_control_endpoint": "tcp://127.0.0.1"}, HintRefusal.MALFORMED),
        ({"source_control_endpoint": "ipc://127.0.0.1:5000"}, HintRefusal.MALFORMED),
        ({"source_control_endpoint": "tcp://127.0.0.1@evil:5000"}, HintRefusal.MALFORMED),
        ({"source_control_endpoint": None}, HintRefusal.MALFORMED),
        ({"block_hashes": []}, HintRefusal.MALFORMED),
        ({"block_hashes": [1, -1]}, HintRefusal.MALFORMED),
        ({"block_hashes": [1 << 64]}, HintRefusal.MALFORMED),
        ({"block_hashes": [True]}, HintRefusal.MALFORMED),
        ({"block_hashes": "12"}, HintRefusal.MALFORMED),
        ({"block_hashes": [0] * ((1 << 16) + 1)}, HintRefusal.MALFORMED),
        ({"mode": "steal"}, HintRefusal.MALFORMED),
        ({"mode": ["move"]}, HintRefusal.MALFORMED),
        ({"mode": "move"}, HintRefusal.MOVE),
        ({"no_retain": True}, HintRefusal.MOVE),
    ],
)
def test_what_is_wrong_in_a_payload_is_its_reason(payload: dict[str, Any], reason: HintRefusal):
    assert parse(changed(**payload)) is reason


def test_a_move_is_refused_by_the_store_and_where_moves_are_on_because_the_runner_has_none():
    for payload in ({"mode": "move"}, {"no_retain": True}):
        assert parse(changed(**payload)) is HintRefusal.MOVE
        assert parse(changed(**payload), move_hints=True) is HintRefusal.MOVE_UNSUPPORTED
        with pytest.raises(ValueError, match=r"not currently supported|only copy mode"):
            _KVFetchHint.from_hint(changed(**payload))


@pytest.mark.parametrize(("offset", "port"), [(3, 5_003), (-2, 4_998), (0, 5_000)])
def test_a_hint_is_for_the_first_shard_and_leads_to_the_counterpart(offset: int, port: int):
    found = parse_hint(GOOD.envelope("id"), HOSTS, move_hints=False, shard_offset=offset)
    assert found == FetchHint(f"tcp://127.0.0.1:{port}", GOOD.hashes)


@pytest.mark.parametrize("offset", [60_536, -5_000])
def test_a_counterpart_at_a_port_that_does_not_exist_is_refused(offset: int):
    assert parse_hint(GOOD.envelope("id"), HOSTS, move_hints=False, shard_offset=offset) is HintRefusal.PORT


@pytest.mark.parametrize("field", ["protocol_version", "action_version"])
def test_another_version_is_refused(field: str):
    envelope = GOOD.envelope("id")
    (envelope if field in envelope else envelope["actions"][0])[field] = "2.0"
    assert parse(envelope) is HintRefusal.VERSION


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["kv.fetch", "1.0", "0.1", "move"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["protocol_version", "actions", "action_type", "action_version", "payload", "mode"]), inner
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_no_value_raises(value: object):
    assert isinstance(parse(value), FetchHint | HintRefusal)


@given(st.integers(1, 65_535), st.frozensets(st.integers(0, (1 << 64) - 1), min_size=1, max_size=8), json_values)
def test_what_is_accepted_the_runner_accepts(port: int, hashes: frozenset[int], mode: object):
    envelope = FetchHint(f"tcp://node-1:{port}", hashes).envelope("id")
    envelope["actions"][0]["payload"]["mode"] = mode
    hint = parse(envelope)
    if isinstance(hint, FetchHint):
        theirs = _KVFetchHint.from_hint(hint.envelope("id"))
        assert (theirs.source_endpoint, theirs.block_hashes) == (hint.endpoint, hint.hashes)
