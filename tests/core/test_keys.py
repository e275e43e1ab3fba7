"""One injective, process-independent name a page."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcr_actors.core.keys import (
    KeyAdapter,
    Namespace,
    PageKeyAdapter,
    RouterForm,
    RouterKey,
    chain_seed,
    layout_name,
    page_key,
    page_keys,
    router_key,
)
from kvcr_actors.errors import KeyFormatError
from kvcr_actors.types import AllPages, CacheLayout, PoolSpec, TrailingPages

SEED = "18ea7dfb4fca860649f80162420ece86bb730fecaa9e0b2f610818617d26aabe"
CHAIN = (
    "501adf5281f7e18b612049c4c7e276b258c815713f2268ffc8cc7d107c57e9a9",
    "5689c1e51ecd0313889915120b9de505e15c022b3c160229ed7492228978ba26",
    "4cff321e8ac3bb206e77e04e3e57d500e784f4cdacf423e469aeea6f577d689f",
)
NAMESPACE = Namespace("m", "w", "bfloat16", "page-first", 4096, (("tensor", 0, 2),))


def test_scenario_12_golden_vectors_never_change() -> None:
    seed = chain_seed()
    assert seed.hex() == SEED
    assert tuple(key.hex() for key in page_keys([1, 2, 3], 1, seed)) == CHAIN
    assert page_key(seed, (1, -1)).hex() == "5a9ff3db804eb919ad535bd7f42ac640fc19a20e71f1f1a95d399dd9f57bab9e"
    assert (
        chain_seed(page_tokens=16, salt="a", adapter="x", extra=("img", 7)).hex()
        == "1a57e1e89aafe0e61a89049dfc018c69b530d4cfd43dda9bf44d596a893d78ac"
    )
    first = bytes.fromhex(CHAIN[0])
    assert NAMESPACE.digest.hex() == "ed31eaf1acff810e35e1d284f66b56edffa571181b7ff691f4b0d2ace9eb8273"
    assert NAMESPACE.storage_key(first).hex() == "174df2388ac6ddb27ae5fe03a5dfa964116ccb3d7a143b7eafa1f88b292bb343"
    assert NAMESPACE.storage_key(first, "kv").hex() == (
        "b72ca4003b0648d2799840a54cdacd8f9c5ef0c24d5d2b1f7c6b7969c9f33fce"
    )
    assert router_key(first) == 0x501ADF5281F7E18B


def test_the_encoding_is_the_one_that_other_languages_would_write() -> None:
    fields = b"i" + (1).to_bytes(8, "little") + b"1" + b"-" + b"-"
    assert chain_seed() == hashlib.sha256(b"kvcr-actors/sd/1" + fields).digest()
    tokens = (5).to_bytes(4, "little") + (6).to_bytes(4, "little")
    assert page_key(chain_seed(), (5, 6)) == hashlib.sha256(b"kvcr-actors/pg/4" + chain_seed() + tokens).digest()


def test_scenario_12_three_fresh_processes_make_equal_keys() -> None:
    program = (
        "from kvcr_actors.core.keys import *\n"
        "seed = chain_seed(salt='s', adapter='x', extra=('e', 1))\n"
        "keys = page_keys(range(8), 2, seed)\n"
        "print(Namespace('m', 'w', 'd', 'l', 1).storage_key(keys[-1], 'kv').hex())"
    )
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env={}) for _ in range(3)]
    assert len({run.stdout for run in runs}) == 1
    assert len(runs[0].stdout.strip()) == 64


def test_scenario_10_salts_and_adapters_make_disjoint_key_sets_and_leave_plain_keys_alone() -> None:
    tokens = range(32)
    sets = [
        set(page_keys(tokens, 4, chain_seed(page_tokens=4, salt=salt, adapter=adapter)))
        for salt, adapter in itertools.product((None, "a", "b"), (None, "x"))
    ]
    assert len(set().union(*sets)) == 6 * 8
    assert set(page_keys(tokens, 4, chain_seed(page_tokens=4))) == sets[0]


def test_page_size_and_empty_strings_tell_seeds_apart() -> None:
    seeds = [
        chain_seed(),
        chain_seed(page_tokens=2),
        chain_seed(salt=""),
        chain_seed(adapter=""),
        chain_seed(extra=("",)),
        chain_seed(extra=("", "")),
        chain_seed(extra=("1",)),
        chain_seed(extra=(1,)),
        chain_seed(salt="\ud800"),
        chain_seed(salt="?"),
    ]
    assert len(set(seeds)) == len(seeds)


texts = st.none() | st.text(max_size=4)
seeds = st.tuples(texts, texts, st.lists(st.text(max_size=3) | st.integers(-3, 300), max_size=3).map(tuple))


@given(one=seeds, other=seeds)
def test_scenario_11_different_salts_adapters_and_extras_never_meet(one: tuple, other: tuple) -> None:
    def seed(parts: tuple) -> bytes:
        return chain_seed(salt=parts[0], adapter=parts[1], extra=parts[2])

    assert (seed(one) == seed(other)) == (one == other)


@given(text=st.text(min_size=2, max_size=6), data=st.data())
def test_scenario_11_moving_a_boundary_between_two_fields_changes_the_key(text: str, data: st.DataObject) -> None:
    first, second = (data.draw(st.integers(0, len(text))) for _ in range(2))
    assume(first != second)

    def split(at: int) -> tuple[bytes, bytes, bytes]:
        left, right = text[:at], text[at:]
        namespace = Namespace(left, right, "d", "l", 1)
        return chain_seed(salt=left, adapter=right), chain_seed(extra=(left, right)), namespace.digest

    assert not set(split(first)) & set(split(second))


def test_scenario_11_a_bc_and_ab_c_never_meet() -> None:
    assert chain_seed(salt="a", adapter="bc") != chain_seed(salt="ab", adapter="c")


tokens_lists = st.lists(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 3), min_size=1, max_size=4)


@given(one=tokens_lists, other=tokens_lists)
def test_pages_of_different_tokens_never_meet(one: list[int], other: list[int]) -> None:
    seed = chain_seed()
    assert (page_key(seed, one) == page_key(seed, other)) == (one == other)


def test_chains_depend_on_all_that_came_before_and_leave_out_a_partial_page() -> None:
    seed = chain_seed(page_tokens=2)
    keys = page_keys([1, 2, 3, 4, 5], 2, seed)
    assert keys == (page_key(seed, [1, 2]), page_key(page_key(seed, [1, 2]), [3, 4]))
    assert page_keys([9, 2, 3, 4], 2, seed)[1] != keys[1]
    assert page_keys([1], 2, seed) == ()


@pytest.mark.parametrize("tokens", [(1.5,), (1 << 63,), ("a", "b")])
def test_tokens_that_are_no_64_bit_numbers_are_refused(tokens: tuple) -> None:
    with pytest.raises(KeyFormatError, match="whole numbers of 64 bits"):
        page_key(chain_seed(), tokens)


def test_malformed_keys_and_sizes_are_refused() -> None:
    with pytest.raises(KeyFormatError, match="32 bytes and 1 token or more"):
        page_key(b"short", (1,))
    with pytest.raises(KeyFormatError, match="32 bytes and 1 token or more"):
        page_key(chain_seed(), ())
    with pytest.raises(KeyFormatError, match="page_tokens 0"):
        chain_seed(page_tokens=0)
    with pytest.raises(KeyFormatError, match="page_tokens 0"):
        page_keys([1], 0, chain_seed())
    with pytest.raises(KeyFormatError, match="32 bytes, not 3"):
        NAMESPACE.storage_key(b"key")
    with pytest.raises(KeyFormatError, match="tensor rank 2 of 2"):
        attrs.evolve(NAMESPACE, ranks=(("tensor", 2, 2),))


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"weights": "other"},
        {"dtype": "float8_e4m3fn"},
        {"layout": "layer-first"},
        {"page_bytes": 8192},
        {"ranks": (("tensor", 1, 2),)},
        {"ranks": (("tensor", 0, 4),)},
        {"ranks": (("pipeline", 0, 2),)},
        {"ranks": (("tensor", 0, 2), ("data", 0, 1))},
        {"ranks": ()},
    ],
)
def test_scenario_13_any_field_of_a_namespace_that_differs_is_a_miss(change: dict) -> None:
    key = page_key(chain_seed(), (1,))
    held = {NAMESPACE.storage_key(key): b"bytes of the first"}
    assert attrs.evolve(NAMESPACE, **change).storage_key(key) not in held
    assert attrs.evolve(NAMESPACE).storage_key(key) in held


def test_scenario_14_shards_are_apart_and_replicas_are_shared_on_purpose() -> None:
    key = page_key(chain_seed(), (1,))
    shards = {attrs.evolve(NAMESPACE, ranks=(("tensor", rank, 4),)).storage_key(key) for rank in range(4)}
    replicas = {attrs.evolve(NAMESPACE, ranks=()).storage_key(key) for _ in range(4)}
    assert (len(shards), len(replicas)) == (4, 1)


def test_pools_of_a_page_are_apart() -> None:
    key = page_key(chain_seed(), (1,))
    keys = {NAMESPACE.storage_key(key, pool) for pool in (None, "", "kv", "swa")}
    assert len(keys) == 4


def test_router_keys_are_shared_by_namespaces_but_never_by_salts() -> None:
    plain, salted = (page_key(chain_seed(salt=salt), (1,)) for salt in (None, "a"))
    assert router_key(plain) != router_key(salted)
    assert 0 <= router_key(plain) < 1 << 64


def test_layouts_that_differ_in_bytes_have_different_names() -> None:
    layout = CacheLayout((PoolSpec("kv", 2, 64), PoolSpec("swa", 2, 64)), page_tokens=16)
    assert layout_name(layout) == "page-first/16/kv:2x64,swa:2x64"
    policy_only = CacheLayout((PoolSpec("kv", 2, 64, AllPages()), PoolSpec("swa", 2, 64, TrailingPages(2))), 16)
    assert layout_name(policy_only) == layout_name(layout)


def test_the_default_adapter_converts_both_ways_where_a_way_exists() -> None:
    adapter: KeyAdapter[str] = PageKeyAdapter()
    key = page_key(chain_seed(), (1,))
    assert adapter.encode_to_framework(key) == CHAIN[0]
    assert adapter.decode_from_framework(CHAIN[0]) == key
    assert adapter.encode_to_router(key) == router_key(key)
    with pytest.raises(KeyFormatError, match="has no inverse"):
        adapter.decode_from_router(router_key(key))


def test_routers_are_told_the_form_chosen_and_whole_keys_come_back() -> None:
    key = bytes(range(32))
    forms: dict[RouterForm, RouterKey] = {
        RouterForm.FIRST_64: 0x0001020304050607,
        RouterForm.LAST_64: 0x18191A1B1C1D1E1F,
        RouterForm.WHOLE: key,
        RouterForm.HEX: key.hex(),
    }
    assert set(forms) == set(RouterForm)
    for form, told in forms.items():
        adapter = PageKeyAdapter(form)
        assert adapter.encode_to_router(key) == told
        if isinstance(told, int):
            with pytest.raises(KeyFormatError, match="has no inverse"):
                adapter.decode_from_router(told)
        else:
            assert adapter.decode_from_router(told) == key
    with pytest.raises(KeyFormatError, match="has 8 bytes, not 32"):
        PageKeyAdapter().decode_from_router(key[:8])


@pytest.mark.parametrize("text", ["", "zz", CHAIN[0].upper(), CHAIN[0][:-2], " " + CHAIN[0]])
def test_a_framework_key_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(KeyFormatError, match="framework key"):
        PageKeyAdapter().decode_from_framework(text)
