"""An order holds values: lists and arrays are copied, what no actor could handle is refused by field and value."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, Ownership, TierCleared, check_event
from kvcr_actors.core.values import MOST_SECONDS, checked_seconds, named, shown
from kvcr_actors.errors import ConfigError, InvalidNodeError
from kvcr_actors.types import BackupNode, PageContext, PrefetchRequest, RestoreOrder, StopPolicy, Tier

KEYS = (b"a" * 32, b"b" * 32)
PAGES = ((1, 2), (3, -1))


class Two(IntEnum):
    """A whole number of a type of its own."""

    TWO = 2


class Broken:
    """A stranger that raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise ValueError("no words")

    def __dlpack_device__(self) -> tuple[int, int]:
        raise BufferError("no memory")


class Raising(int):
    """A whole number that cannot be made an int."""

    def __int__(self) -> int:
        raise ValueError("not today")


class OnDevice:
    """An array in the memory of a GPU; to list it would wait for the GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def tolist(self) -> list[int]:
        raise AssertionError("it was read")


@pytest.mark.parametrize(
    "one",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        array("i", [1, 2]),
        np.array([1, 2], dtype=np.uint8),
        torch.tensor([1, 2], dtype=torch.int32),
        [np.int64(1), Two.TWO],
    ],
    ids=lambda one: type(one).__name__,
)
def test_page_lists_of_any_kind_become_tuples_of_int(one: Any) -> None:
    for order in (BackupNode(1, KEYS, (one, one)), RestoreOrder("r", 0, [one, one])):  # type: ignore[arg-type]
        assert order.pages == ((1, 2), (1, 2))
        assert {type(page) for pages in order.pages for page in pages} == {int}


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_what_becomes_of_a_list_afterwards_changes_no_order(form: Callable[[list[int]], Any]) -> None:
    pages, keys, tokens = form([1, 2]), list(KEYS), form([7, 8])
    node = BackupNode(1, keys, (pages,), context=PageContext(tokens, 1))  # type: ignore[arg-type]
    restore = RestoreOrder("r", 0, (pages,))
    pages[0] = tokens[0] = 9
    keys.reverse()
    assert node.pages == restore.pages == ((1, 2),)
    assert node.keys == KEYS
    assert node.context is not None
    assert list(node.context.tokens) == [7, 8]
    tokens = array("I", [1])
    context = PageContext(tokens, 1)
    tokens[0] = 2
    assert context.tokens[0] == 1


@pytest.mark.parametrize("wrong", [None, True, 1.0, 1.5, [1], {}, Broken(), 1 << 128, (1, True), (1, (2,))])
def test_ids_that_equal_others_or_cannot_be_hashed_are_refused(wrong: Any) -> None:
    for make in (lambda: PrefetchRequest(wrong, KEYS), lambda: RestoreOrder(wrong, 0, PAGES)):
        with pytest.raises(InvalidNodeError, match="request_id: "):
            make()
    with pytest.raises(InvalidNodeError, match="node_id: "):
        BackupNode(wrong, KEYS, PAGES)


@pytest.mark.parametrize("right", ["r", 1, b"r", ("r", 1, b"r"), ()])
def test_the_ids_of_engines_are_taken(right: Any) -> None:
    assert PrefetchRequest(right, KEYS).request_id == right


@pytest.mark.parametrize(
    ("field", "wrong", "words"),
    [
        ("keys", None, "keys: None is a NoneType"),
        ("keys", KEYS[0], "is a bytes, not a list"),
        ("keys", ("a" * 32, KEYS[1]), "is a str, not bytes"),
        ("keys", (bytearray(32), KEYS[1]), "is a bytearray, not bytes"),
        ("keys", (memoryview(KEYS[0]), KEYS[1]), "is a memoryview, not bytes"),
        ("keys", (KEYS[0], 5), "key 5 is a int, not bytes; use page_keys"),
        ("pages", 5, "pages: 5 is a int"),
        ("pages", (5, 6), "pages of pool 0: 5 is a int"),
        ("pages", ("12", "34"), "pages of pool 0: '12' is a str"),
        ("pages", ((1, None), (2, 3)), "pages of pool 0: None is a NoneType"),
        ("pages", ((1, 2), (2, True)), "pages of pool 1: True is a bool"),
        ("keys", (KEYS[0], KEYS[0]), "names a key twice"),
        ("pages", ((1, 2), (2, Raising(3))), "3 is a Raising"),
        ("pages", ((1, 2), (2, 1.5)), "pages of pool 1: 1.5 is a float"),
        ("pages", ((1, 2), (2, 1 << 63)), "page 9223372036854775808 is not a page"),
        ("pages", ((1, -2), (2, 3)), "page -2 is not a page"),
        ("pages", (np.array([1.0, 2.0]),), "1.0 is a float"),
        ("pages", (np.array([[1, 2], [3, 4]]),), r"\[1, 2\] is a list"),
        ("pages", (np.array(1),), "not a list, tuple or array of one dimension"),
        ("pages", (np.array([True, False]),), "True is a bool"),
        ("pages", (OnDevice(),), "give a copy on the CPU"),
        ("pages", (Broken(),), "cannot be read"),
        ("parent", "x" * 32, "parent 'x+' is a str"),
        ("parent", b"x", "parent b'x' has 1 bytes"),
        ("parent", KEYS[1], "is one of its own keys"),
        ("context", 5, "context 5 is neither"),
    ],
)
def test_a_field_of_a_node_is_refused_by_name_and_value(field: str, wrong: Any, words: str) -> None:
    fields: dict[str, Any] = {"node_id": 7, "keys": KEYS, "pages": PAGES, field: wrong}
    with pytest.raises(InvalidNodeError, match=f"node 7: .*{words}"):
        BackupNode(**fields)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PrefetchRequest("r", KEYS, device_pages=True), "request r: device_pages True of 2"),
        (lambda: PrefetchRequest("r", KEYS, device_pages=1.0), "device_pages 1.0"),  # type: ignore[arg-type]
        (lambda: PrefetchRequest("r", None), "request r: keys: None"),  # type: ignore[arg-type]
        (lambda: PrefetchRequest("r", KEYS, stop="x"), "stop 'x' is neither"),  # type: ignore[arg-type]
        (lambda: PrefetchRequest("r" * 200, KEYS, 3), r"request 'r+\.\.\.r+': device_pages"),
        (lambda: RestoreOrder("r", True, PAGES), "restore of r: first True"),
        (lambda: RestoreOrder("r", 1 << 63, PAGES), "first 9223372036854775808"),
        (lambda: RestoreOrder("r", 0, ((1, 2), (3,))), "pool 1 lists 1 pages for 2 pages of the first pool"),
        (lambda: RestoreOrder("r", 0, None), "pages: None"),  # type: ignore[arg-type]
        (lambda: PageContext(5, 1), "tokens: 5 is a int"),  # type: ignore[arg-type]
        (lambda: PageContext([1.5], 1), "not whole numbers of 64 bits"),  # type: ignore[list-item]
        (lambda: PageContext([1 << 63], 1), "not whole numbers of 64 bits"),
        (lambda: PageContext(range(1 << 70, (1 << 70) + 1), 1), "more than 64 bits"),
        (lambda: PageContext([1], True), "page_tokens True"),
        (lambda: PageContext([1], 0), "not whole pages"),
        (lambda: PageContext([1], 1, salt=b"x"), "salt b'x'"),  # type: ignore[arg-type]
        (lambda: PageContext([1], 1, adapter=1), "adapter 1"),  # type: ignore[arg-type]
    ],
)
def test_other_fields_are_refused_by_name_and_value(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InvalidNodeError, match=words):
        make()


def test_well_formed_orders_of_every_field_are_taken() -> None:
    context = PageContext(range(4), 2, adapter="a", salt="")
    assert BackupNode(1, KEYS, PAGES, b"p" * 32, context).context is context
    assert context.tokens == range(4)
    assert PageContext(b"ab", 1).tokens == b"ab"
    assert list(PageContext([-1, 1 << 62], 1).tokens) == [-1, 1 << 62]
    assert PrefetchRequest("r", list(KEYS), stop=StopPolicy.TIMEOUT).keys == KEYS  # type: ignore[arg-type]
    assert RestoreOrder("r", 0, ()).count == 0
    assert PrefetchRequest("r", ()).keys == ()


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (5, "5 is a int; give an inventory event"),
        (TierCleared("device"), "TierCleared: tier 'device' is not a Tier"),  # type: ignore[arg-type]
        (TierCleared(Tier.DEVICE, None), "ownership None"),  # type: ignore[arg-type]
        (BlocksRemoved(Tier.DEVICE, (b"x",)), "key b'x' has 1 bytes"),
        (BlocksRemoved(Tier.DEVICE, list(KEYS)), "not a tuple"),  # type: ignore[arg-type]
        (BlocksStored(Tier.DEVICE, KEYS, [None, None]), "parents .* is not a tuple"),  # type: ignore[arg-type]
        (BlocksStored(Tier.DEVICE, KEYS, (None, 5)), "parent 5 is a int"),  # type: ignore[arg-type]
    ],
)
def test_a_malformed_event_is_refused_by_name_and_value(event: Any, words: str) -> None:
    with pytest.raises(InvalidNodeError, match=words):
        check_event(event)


def test_well_formed_events_are_taken() -> None:
    check_event(TierCleared(Tier.DEVICE, Ownership.STORE))
    check_event(BlocksRemoved(Tier.DEVICE, KEYS))
    check_event(BlocksStored(Tier.DEVICE, KEYS, (None, KEYS[0])))


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan"), True, "1", None, MOST_SECONDS * 2])
def test_a_time_that_is_no_number_or_has_no_end_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s: .* is not a number of seconds"):
        checked_seconds("timeout_s", wrong)


def test_times_are_whole_or_broken_and_may_be_over() -> None:
    assert [checked_seconds("t", one) for one in (1, 0.5, -3.0, np.float64(2))] == [1, 0.5, -3.0, 2.0]


def test_the_words_of_an_error_are_short_and_never_fail() -> None:
    assert len(shown("x" * 1000)) < 200
    assert shown(10**5000) == "a int"
    assert "Broken" in shown(Broken())
    assert (named("r"), named(1), named(b"r")) == ("r", "1", "b'r'")
