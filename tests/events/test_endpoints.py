"""Ports are checked for every rank before a socket is opened, and nothing leaves the machine unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.endpoints import Endpoint


@pytest.mark.parametrize(
    ("text", "rank", "address"),
    [
        ("5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://:5557", 3, "tcp://127.0.0.1:5560"),
        ("tcp://*:5557", 1, "tcp://*:5558"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///run/events", 0, "ipc:///run/events"),
        ("ipc://@events", 2, "ipc://@events_dp2"),
    ],
)
def test_each_rank_has_an_address_of_its_own(text: str, rank: int, address: str) -> None:
    assert Endpoint.parse(text, "events").at(rank) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost",
        "udp://a:1",
        "tcp://a",
        "tcp://a:b",
        "tcp://::1:5557",
        "ipc://",
        "ipc:///run/a\0b",
        "tcp://a\0b:5557",
        "tcp://[::1\0]:5557",
        "tcp://a b:5557",
    ],
)
def test_what_is_no_endpoint_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^replay: .* is no endpoint; write a port"):
        Endpoint.parse(text, "replay")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"endpoint": "65534", "data_parallel_size": 3},
            "events port 65534: 3 .* need 65534 to 65536",
        ),
        ({"endpoint": "65533", "data_parallel_size": 3, "replay_endpoint": "65534"}, "replay port 65534"),
        ({"endpoint": "0"}, "events port 0"),
        ({"endpoint": "5557", "replay_endpoint": "5559", "data_parallel_size": 4}, "both use port 5559 over 4 ranks"),
        ({"endpoint": "ipc://a", "replay_endpoint": "ipc://a"}, "events and replay share ipc:///.*/a;"),
        (
            {"endpoint": "ipc://a_dp1", "replay_endpoint": "ipc://a", "data_parallel_size": 2},
            "events and replay share ipc:///.*/a_dp1;",
        ),
        ({"endpoint": "5557", "data_parallel_rank": 2, "data_parallel_size": 2}, "rank 2 of 2 does not exist"),
        ({"endpoint": "5557", "tensor_rank": -1}, "tensor_rank must be 0 or more"),
        ({"endpoint": "5557", "heartbeat_s": 6.0}, "heartbeat_s 6 and silent_after_s 5"),
        ({"endpoint": "5557", "silent_after_s": 11.0}, "to below 10 s"),
        ({"endpoint": "5557", "dialect": "morse"}, "dialect 'morse'"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        EventsConfig(**values)


def test_the_last_port_can_be_used() -> None:
    assert EventsConfig("65533", data_parallel_size=3, data_parallel_rank=2).events.at(2) == "tcp://127.0.0.1:65535"


@pytest.mark.parametrize(
    ("endpoint", "replay", "exposed"),
    [
        ("5557", "5600", False),
        ("tcp://localhost:5557", None, False),
        ("tcp://[::1]:5557", None, False),
        ("ipc:///tmp/x", None, False),
        ("tcp://0.0.0.0:5557", None, True),
        ("tcp://*:5557", None, True),
        ("5557", "tcp://eth0:5600", True),
    ],
)
def test_it_is_known_whether_others_can_listen(endpoint: str, replay: str | None, exposed: bool) -> None:
    assert EventsConfig(endpoint, replay).is_exposed is exposed


def test_each_rank_keeps_its_numbers_in_a_file_of_its_own() -> None:
    paths = [
        EventsConfig("5557", data_parallel_size=2, data_parallel_rank=rank, sequence_file=Path("/run/kv")).sequence_path
        for rank in range(2)
    ]
    assert paths == [Path("/run/kv"), Path("/run/kv_dp1")]
    assert EventsConfig("5557").sequence_path is None


def test_readers_that_cannot_replay_are_told_everything_when_they_join() -> None:
    assert EventsConfig("5557").begins_anew_on_join
    assert not EventsConfig("5557", "5600").begins_anew_on_join
    assert EventsConfig("5557", "5600", snapshot_on_join=True).begins_anew_on_join
    assert EventsConfig("5557", sequence_file=Path("x")).is_active
    assert not EventsConfig("5557", tensor_rank=1).is_active
