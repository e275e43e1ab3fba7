"""Options: strict by name and kind, checked together, and told in a table that is the code's own."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kvcr_actors import ConfigError
from kvcr_actors import open_store as open_by_name
from kvcr_actors_kvcr import KvcrOptions, open_store, options_table
from kvcr_actors_kvcr.options import parse_options
from tests.conftest import NAMESPACE

SWITCHES = [name for name, field in attrs.fields_dict(KvcrOptions).items() if field.metadata["kind"] == "switch"]


def test_the_seven_switches_of_the_store_are_there():
    assert set(SWITCHES) >= {
        "publish_inventory",
        "verify_transfer_bytes",
        "align_storage_prefix",
        "diagnostic_telemetry",
        "combine_page_reads",
        "combine_page_writes",
        "share_replicated_mla",
    }


@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_not_a_boolean_is_refused_by_name(name: str):
    for value in (0, 1, "true", None):
        with pytest.raises(ConfigError, match=f"option {name}="):
            KvcrOptions(**{name: value})
    for text in ("True", "1", "", "yes"):
        with pytest.raises(ConfigError, match=f"option {name}="):
            parse_options({name: text})
    assert getattr(parse_options({name: "false"}), name) is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"operation_timeout_ms": 1_000, "abandon_timeout_ms": 1_999}, "abandon_timeout_ms=1999; give 2000 or more"),
        ({"remote_wait_ms": 9_999}, "remote_wait_ms=9999; the runner itself waits 10000"),
        ({"control_port": True}, "control_port=True; give a whole number"),
        ({"control_port": 65_536}, "control_port=65536"),
        ({"disk_path": "somewhere"}, "disk_blocks=0; the disk tier needs a folder and a size"),
        ({"owner_endpoint": "tcp://127.0.0.1:1"}, "owner_endpoint"),
        ({"owner_endpoint": "tcp://127.0.0.1:1", "share_replicated_mla": True}, "control_port=0"),
        ({"sharded_pools": "mamba"}, "sharded_pools='mamba'; it is for share_replicated_mla=true"),
        ({"policy": 3}, "policy=3; give text"),
    ],
)
def test_values_that_do_not_go_together_are_refused(options, words: str):
    with pytest.raises(ConfigError, match=words):
        KvcrOptions(**options)


@pytest.mark.parametrize("text", ["kv", "kv:0", "kv:x", "kv:1,kv:2", ":2x"])
def test_spans_are_pool_and_count(text: str):
    with pytest.raises(ConfigError, match="spans"):
        _ = KvcrOptions(spans=text).span_counts
    assert KvcrOptions(spans="kv:2, indexer:1").span_counts == {"kv": 2, "indexer": 1}


@pytest.mark.parametrize("text", ["1.0", "\uff11", "0x10", "", "--1"])
def test_whole_numbers_are_digits(text: str):
    with pytest.raises(ConfigError, match="idle_poll_ms"):
        parse_options({"idle_poll_ms": text})


def test_an_unknown_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="unknown option 'fsync'"):
        open_store({"fsync": "true"}, 4, None, NAMESPACE)


def test_the_store_is_found_by_its_name():
    store = open_by_name("kvcr", {"idle_poll_ms": "10"}, 4, None, NAMESPACE)
    assert (store.name, store.traits.requires_confirmation) == ("kvcr", False)


def test_a_store_with_peers_makes_promises_that_must_be_confirmed():
    store = open_store({"control_port": "40000"}, 4, None, NAMESPACE)
    assert store.traits.requires_confirmation


def test_a_capacity_of_no_pages_is_refused():
    with pytest.raises(ConfigError, match="capacity_pages 0"):
        open_store({}, 0, None, NAMESPACE)


def test_the_readme_shows_the_table_of_the_code():
    assert options_table() in (Path(__file__).parents[1] / "README.md").read_text()
