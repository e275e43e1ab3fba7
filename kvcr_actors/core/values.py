"""What the fields of an order may hold, checked and copied where the order is made.

An order crosses to another thread and is read there later, so it must be a value: lists and arrays are copied into
tuples, and what an actor could not handle (an id that equals another of a second type, a page number of no pool, a key
of another length) is refused here, in words that name the order, the field and what it held. What is in order already
passes a few calls that run in C, since orders are made on the engine's thread.
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Hashable, Sequence
from itertools import chain
from numbers import Integral
from typing import Any, NoReturn, Protocol, TypeAlias, cast

from kvcr_actors.errors import ConfigError, InvalidNodeError

PageKey: TypeAlias = bytes
"""A page's name: 32 bytes, chained from the root (see `core.keys`)."""

KEY_BYTES = 32

RequestId: TypeAlias = Hashable
"""A request's name. An order takes a str, an int, bytes or a tuple of these, of these very types: 1, True and 1.0 are
equal in a table, and would be one request."""

NodeId: TypeAlias = int

NO_SLOT = -1
"""In a component list: this pool keeps nothing for that page."""


class PageArray(Protocol):
    """A one-dimensional array of whole numbers in the CPU's memory, such as a numpy array or a torch tensor."""

    def tolist(self) -> Any:
        """Its numbers as a list."""
        ...

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Where its memory is."""
        ...


PageList: TypeAlias = Sequence[int] | PageArray
"""Page numbers as an order takes them: a list, tuple, range, `array.array`, numpy array or torch tensor on the CPU."""

Components: TypeAlias = tuple[Sequence[int], ...]
"""For each pool of the layout, one device page (or host slot) a page, `NO_SLOT` where the pool keeps nothing."""

MOST_SECONDS = 1e8
"""The longest time that is taken, three years: sums of such times still fit what threads and loops can wait."""

_INTS = frozenset({int})
_BYTES = frozenset({bytes})
_TUPLES = frozenset({tuple})
_LISTS = (list, tuple, range, array)
_ID_TYPES = frozenset({str, int, bytes})
_KEY_LENGTHS = frozenset({KEY_BYTES})
_ID_BITS = 128
_MOST = (1 << 63) - 1
_IN_CPU_MEMORY = (1, 3)
"""DLPack's numbers for host memory, pageable and pinned."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 100


def shown(value: object) -> str:
    """A value for an error's words: short, also of one that cannot show itself."""
    try:
        return _repr.repr(value)
    except Exception:  # noqa: BLE001 - the words of another error must not fail
        return f"a {type(value).__name__}"


def named(value: object) -> str:
    """An id for an error's words, a str without quotes."""
    return value if type(value) is str and len(value) <= _repr.maxstring else shown(value)


def check_request_id(request_id: object, field: str = "request_id") -> None:
    """InvalidNodeError for what cannot name a request."""
    kind = type(request_id)
    if kind is str or kind is bytes:
        return
    parts = cast("tuple[object, ...]", request_id) if kind is tuple else (request_id,)
    if not _ID_TYPES.issuperset(map(type, parts)):
        raise InvalidNodeError(
            f"{field}: {shown(request_id)} is not a request's name; use a str, an int, bytes or a tuple of these"
        )
    if any(type(part) is int and part.bit_length() > _ID_BITS for part in parts):
        raise InvalidNodeError(f"{field}: {shown(request_id)} has a number of more than {_ID_BITS} bits")


def check_node_id(node_id: object) -> None:
    """InvalidNodeError for what cannot name a node."""
    if type(node_id) is not int or node_id.bit_length() > _ID_BITS:
        raise InvalidNodeError(f"node_id: {shown(node_id)} is not a node's name; use an int of at most {_ID_BITS} bits")


def check_count(what: str, field: str, value: object) -> None:
    """InvalidNodeError for what is not a whole number from 0 on, of 63 bits."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise InvalidNodeError(f"{what}: {field} {shown(value)} is not a whole number from 0 to 2^63 - 1")


def check_key(what: str, field: str, key: object) -> None:
    """InvalidNodeError for what is not a page's key."""
    if type(key) is not bytes:
        raise InvalidNodeError(f"{what}: {field} {shown(key)} is a {type(key).__name__}, not bytes; use page_keys")
    if len(key) != KEY_BYTES:
        raise InvalidNodeError(f"{what}: {field} {shown(key)} has {len(key)} bytes, not {KEY_BYTES}; use page_keys")


def checked_keys(what: str, keys: object) -> tuple[PageKey, ...]:
    """A path's keys as a tuple; InvalidNodeError for others than keys, or one twice."""
    path = cast("tuple[PageKey, ...]", keys if type(keys) is tuple else _copied(what, "keys", keys))
    if not (_BYTES.issuperset(map(type, path)) and _KEY_LENGTHS.issuperset(map(len, path))):
        check_key(what, "key", next(key for key in path if type(key) is not bytes or len(key) != KEY_BYTES))
    if len(path) > 1 and len(set(path)) != len(path):
        raise InvalidNodeError(f"{what}: it names a key twice; a path has each key once")
    return path


def checked_components(what: str, count: int | None, components: object) -> Components:
    """An order's page lists as tuples of int, each of `count` pages (None: as many as the first has).

    InvalidNodeError names the pool and the page that is none.
    """
    lists = cast("tuple[tuple[object, ...], ...]", components)
    given: object = components
    if type(components) is not tuple or not _TUPLES.issuperset(map(type, lists)):
        pools = _copied(what, "pages", given)
        lists = tuple(_copied(what, f"pages of pool {pool}", pages) for pool, pages in enumerate(pools))
    if count is None:
        count = len(lists[0]) if lists else 0
    for pool, pages in enumerate(lists):
        if len(pages) != count:
            raise InvalidNodeError(f"{what}: pool {pool} lists {len(pages)} pages for {count} {_of(what)}")
    flat = cast("tuple[int, ...]", tuple(chain.from_iterable(lists)))
    if not _INTS.issuperset(map(type, flat)):
        lists = tuple(_whole_numbers(what, pool, pages) for pool, pages in enumerate(lists))
        flat = tuple(chain.from_iterable(lists))
    if flat and (min(flat) < NO_SLOT or max(flat) > _MOST):
        wrong = next(page for page in flat if not NO_SLOT <= page <= _MOST)
        raise InvalidNodeError(f"{what}: page {shown(wrong)} is not a page of any pool, nor NO_SLOT ({NO_SLOT})")
    return cast("Components", lists)


def checked_tokens(tokens: object) -> Sequence[int]:
    """Tokens as a copy that costs 4 or 8 bytes each, or the bytes or range given; InvalidNodeError for others."""
    if type(tokens) is bytes:
        return tokens
    if type(tokens) is range:
        if tokens and not -_MOST <= min(tokens[0], tokens[-1]) <= max(tokens[0], tokens[-1]) <= _MOST:
            raise InvalidNodeError(f"tokens: {shown(tokens)} has numbers of more than 64 bits")
        return tokens
    whole: object = tokens
    given = cast("array[int]", tokens) if type(tokens) is array else _copied("context", "tokens", whole)
    for code in ("I", "q"):
        try:
            return array(code, cast("Sequence[int]", given))  # an array is copied at once
        except (OverflowError, TypeError, ValueError):
            continue
    raise InvalidNodeError(f"tokens: {shown(whole)} are not whole numbers of 64 bits")


def checked_seconds(field: str, value: object) -> float:
    """A time to wait for; ConfigError for what is no number, not finite or longer than `MOST_SECONDS`."""
    if type(value) is bool or not isinstance(value, int | float) or not -MOST_SECONDS <= value <= MOST_SECONDS:
        raise ConfigError(f"{field}: {shown(value)} is not a number of seconds, at most {MOST_SECONDS:g}")
    return value


def _copied(what: str, field: str, values: object) -> tuple[object, ...]:
    """A list or array as a tuple. One on a GPU is refused: to read it waits for the GPU."""
    try:
        if issubclass(type(values), _LISTS):
            return tuple(cast("Sequence[object]", values))
        source = cast("PageArray", values)
        device, _ = source.__dlpack_device__()
        listed: object = source.tolist() if device in _IN_CPU_MEMORY else None
    except AttributeError:
        listed = ()
        device = None
    except Exception as error:
        raise InvalidNodeError(f"{what}: {field} {shown(values)} cannot be read: {shown(error)}") from error
    if device is None or not isinstance(listed, list | None):
        raise InvalidNodeError(
            f"{what}: {field}: {shown(values)} is a {type(values).__name__}, "
            "not a list, tuple or array of one dimension"
        )
    if listed is None:
        raise InvalidNodeError(f"{what}: {field} lie in a device's memory; give a copy on the CPU")
    return tuple(cast("list[object]", listed))


def _whole_numbers(what: str, pool: int, pages: Sequence[object]) -> tuple[int, ...]:
    """Pages that are whole numbers of other types, such as numpy's, as int."""
    numbers: list[int] = []
    for page in pages:
        try:
            if type(page) is bool or not isinstance(page, Integral):
                _refuse_page(what, pool, page)
            numbers.append(int(page))
        except InvalidNodeError:
            raise
        except Exception:  # noqa: BLE001 - whatever a stranger's number does
            _refuse_page(what, pool, page)
    return tuple(numbers)


def _refuse_page(what: str, pool: int, page: object) -> NoReturn:
    raise InvalidNodeError(
        f"{what}: pages of pool {pool}: {shown(page)} is a {type(page).__name__}, not a whole number"
    )


def _of(what: str) -> str:
    return "pages of the first pool" if what.startswith("restore") else "keys"
