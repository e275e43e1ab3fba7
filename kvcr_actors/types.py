"""The words of the domain: tiers, pools, pages, nodes and the orders an engine gives."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import attrs

from kvcr_actors.core.values import KEY_BYTES as KEY_BYTES
from kvcr_actors.core.values import NO_SLOT as NO_SLOT
from kvcr_actors.core.values import Components as Components
from kvcr_actors.core.values import NodeId as NodeId
from kvcr_actors.core.values import PageKey as PageKey
from kvcr_actors.core.values import PageList as PageList
from kvcr_actors.core.values import RequestId as RequestId
from kvcr_actors.core.values import (
    check_count,
    check_key,
    check_node_id,
    check_request_id,
    checked_components,
    checked_keys,
    checked_tokens,
    named,
    shown,
)
from kvcr_actors.errors import ConfigError, InvalidNodeError


class Tier(enum.StrEnum):
    """Where a copy of a page lives."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


class WritePolicy(enum.StrEnum):
    """When an engine hands a node to the host tier."""

    WRITE_THROUGH = "write-through"
    SELECTIVE = "selective"
    WRITE_BACK = "write-back"


class StopPolicy(enum.StrEnum):
    """How long a prefetch goes on. Its deadline bounds each of them, and what has arrived by the end is used."""

    BEST_EFFORT = "best-effort"
    """Until the engine wants to run the request and says so with `stop_prefetch`."""
    WAIT_COMPLETE = "wait-complete"
    """Until everything is there; `stop_prefetch` is ignored."""
    TIMEOUT = "timeout"
    """As best effort, and no longer than the store declares that so many pages may take."""


class Eviction(enum.StrEnum):
    """Which page of a full tier leaves next; leaves only, always."""

    LRU = "lru"
    LFU = "lfu"
    """Least frequently used, with ageing."""
    SIEVE = "sieve"
    S3_FIFO = "s3fifo"
    TWO_QUEUES = "2q"
    TAIL_LRU = "tlru"
    """The last pages of conversations first, then LRU: for the slowest answers."""
    SESSION = "session"
    """LRU that keeps what was asked for again, for a time."""


class MissReason(enum.StrEnum):
    """Why a page that was asked for was not used from a tier; the set is closed."""

    ABSENT = "absent"
    TIER_OFF = "tier_off"
    INCOMPLETE = "incomplete"
    BELOW_THRESHOLD = "below_threshold"
    NO_HOST_MEMORY = "no_host_memory"
    QUEUE_FULL = "queue_full"
    READ_FAILED = "read_failed"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    RANKS_DISAGREED = "ranks_disagreed"
    RANK_WITHOUT_STORE = "rank_without_store"
    """This rank's store has the page, and another rank has no store at all."""
    NOT_RESTORED = "not_restored"
    RESTORE_FAILED = "restore_failed"
    RESET = "reset"
    """It was computed before a reset, or asked for before one."""
    STOPPED = "stopped"


class SkipReason(enum.StrEnum):
    """Why a node was not backed up, or a page not deposited; the set is closed."""

    TIER_OFF = "tier_off"
    QUEUE_FULL = "queue_full"
    NO_HOST_MEMORY = "no_host_memory"
    PARENT_ABSENT = "parent_absent"
    COPY_FAILED = "copy_failed"
    RANKS_DISAGREED = "ranks_disagreed"
    STORE_FULL = "store_full"
    STORE_FAILED = "store_failed"
    RESET = "reset"
    """It was computed before a reset."""
    STOPPED = "stopped"


@attrs.frozen
class AllPages:
    """A prefix can be restored only if the pool has each of its pages."""


@attrs.frozen
class TrailingPages:
    """A prefix can be restored if the pool has its last `count` pages (all of them if it is shorter)."""

    count: int = attrs.field(validator=attrs.validators.ge(1))


@attrs.frozen
class BlockGroups:
    """Pages count in groups of `size`; a prefix ends only where a whole group that the pool has ends."""

    size: int = attrs.field(validator=attrs.validators.ge(1))


HitPolicy: TypeAlias = AllPages | TrailingPages | BlockGroups


@attrs.frozen
class PoolSpec:
    """One kind of pages. A page has `planes` planes (a layer's K or V, or a state tensor) of `plane_bytes` each."""

    name: str
    planes: int
    plane_bytes: int
    policy: HitPolicy = AllPages()

    def __attrs_post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"pool name {self.name!r}: use letters, digits and underscores")
        if self.planes < 1 or self.plane_bytes < 1:
            raise ConfigError(f"pool {self.name}: planes and plane_bytes must be 1 or more")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this pool: all of its planes."""
        return self.planes * self.plane_bytes


@attrs.frozen
class CacheLayout:
    """The pools of a model, in a fixed order; a component list is indexed by that order."""

    pools: tuple[PoolSpec, ...]
    page_tokens: int = 1

    def __attrs_post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"pools {names}: name at least one pool, and each only once")
        if self.page_tokens < 1:
            raise ConfigError("page_tokens must be 1 or more")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all pools."""
        return sum(pool.page_bytes for pool in self.pools)


def _pages(pages: Iterable[PageList]) -> Components:
    """For the type checker: `__attrs_post_init__` checks and copies, in words that name the order."""
    return cast("Components", pages)


def _keys(keys: Sequence[PageKey]) -> tuple[PageKey, ...]:
    return cast("tuple[PageKey, ...]", keys)


@attrs.frozen
class PageContext:
    """What a run of pages was computed from, as routers need it: `page_tokens` tokens a page, root to tail.

    `tokens` are copied, into an array of 4 bytes each where they fit. `adapter` and `salt` are those of the pages'
    chain seed (see `core.keys`).
    """

    tokens: Sequence[int] = attrs.field(repr=False)
    page_tokens: int
    adapter: str | None = None
    salt: str | None = None

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "tokens", checked_tokens(self.tokens))
        check_count("context", "page_tokens", self.page_tokens)
        for field, value in (("adapter", self.adapter), ("salt", self.salt)):
            if value is not None and type(value) is not str:
                raise InvalidNodeError(f"context: {field} {shown(value)} is neither a str nor None")
        if self.page_tokens < 1 or not self.tokens or len(self.tokens) % self.page_tokens:
            raise InvalidNodeError(f"{len(self.tokens)} tokens are not whole pages of {self.page_tokens} tokens")

    @property
    def pages(self) -> int:
        """How many pages it describes."""
        return len(self.tokens) // self.page_tokens

    def page(self, index: int) -> Sequence[int]:
        """The tokens of one page."""
        return self.tokens[index * self.page_tokens : (index + 1) * self.page_tokens]


@attrs.frozen
class BackupNode:
    """A run of pages of the engine's prefix tree, to be copied from the device.

    `keys` are root to tail, one a page; `parent` is the key before the first, None at the root. Lists and arrays are
    copied. The engine keeps the device pages unchanged until the node's ack. InvalidNodeError names the field that is
    malformed.
    """

    node_id: NodeId
    keys: tuple[PageKey, ...] = attrs.field(converter=_keys)
    pages: Components = attrs.field(converter=_pages)
    parent: PageKey | None = None
    context: PageContext | None = None
    """What the pages were computed from, for the events about them (see `events.contexts`)."""

    def __attrs_post_init__(self) -> None:
        check_node_id(self.node_id)
        what = f"node {self.node_id}"
        keys = checked_keys(what, self.keys)
        if not keys:
            raise InvalidNodeError(f"{what}: it has no pages")
        pages = checked_components(what, len(keys), self.pages)
        if keys is not self.keys:
            object.__setattr__(self, "keys", keys)
        if pages is not self.pages:
            object.__setattr__(self, "pages", pages)
        if self.parent is not None:
            check_key(what, "parent", self.parent)
            if self.parent in keys:
                raise InvalidNodeError(f"{what}: its parent {shown(self.parent)} is one of its own keys")
        if self.context is not None:
            self._check_context(what, self.context)
        if all(NO_SLOT in pages for pages in pages):
            for index, page in enumerate(zip(*pages, strict=True)):
                if all(one == NO_SLOT for one in page):
                    raise InvalidNodeError(f"{what}: no pool keeps anything for its page {index}")

    def _check_context(self, what: str, context: object) -> None:
        if not isinstance(context, PageContext):
            raise InvalidNodeError(f"{what}: context {shown(context)} is neither a PageContext nor None")
        if context.pages != len(self.keys):
            raise InvalidNodeError(f"{what}: its context describes {context.pages} pages, it has {len(self.keys)}")


@attrs.frozen
class PrefetchRequest:
    """The prefix that a request may reuse: `keys` root to tail, of which the device has the first `device_pages`.

    InvalidNodeError names the field that is malformed.
    """

    request_id: RequestId
    keys: tuple[PageKey, ...] = attrs.field(converter=_keys)
    device_pages: int = 0
    hints: object | None = attrs.field(default=None, eq=False, repr=False)
    """What a router says of where the prefix lies; the store alone reads it, and only while it serves this request."""
    stop: StopPolicy | None = None
    """How long to go on; None is the configuration's `prefetch_stop_policy`."""

    def __attrs_post_init__(self) -> None:
        check_request_id(self.request_id)
        what = f"request {named(self.request_id)}"
        keys = checked_keys(what, self.keys)
        if keys is not self.keys:
            object.__setattr__(self, "keys", keys)
        if type(self.device_pages) is not int or not 0 <= self.device_pages <= len(keys):
            raise InvalidNodeError(f"{what}: device_pages {shown(self.device_pages)} of {len(keys)}")
        if self.stop is not None and type(self.stop) is not StopPolicy:
            raise InvalidNodeError(f"{what}: stop {shown(self.stop)} is neither a StopPolicy nor None")


@attrs.frozen
class RestoreOrder:
    """Copy a ready prefetch's pages `[first, first + n)` into the device pages given, n a pool.

    The device has the `first` pages before, so that it could go on from there: no more than the prefetch said, or than
    `device_pages` says where the device has gained some meanwhile. A pool's device page is `NO_SLOT` where it needs
    none, such as before a window. What is restored ends where every pool's policy can be kept (`RestoreFinished`).
    Lists and arrays are copied. InvalidNodeError names the field that is malformed.
    """

    request_id: RequestId
    first: int
    pages: Components = attrs.field(converter=_pages)
    device_pages: int | None = None
    """How many pages of the prefix the device has by now; None: no more than its prefetch said."""

    @property
    def count(self) -> int:
        """Pages to restore."""
        return len(self.pages[0]) if self.pages else 0

    def __attrs_post_init__(self) -> None:
        check_request_id(self.request_id)
        what = f"restore of {named(self.request_id)}"
        check_count(what, "first", self.first)
        if self.device_pages is not None:
            check_count(what, "device_pages", self.device_pages)
            if self.first > self.device_pages:
                raise InvalidNodeError(
                    f"{what}: first {self.first} is beyond the {self.device_pages} pages that the device has; begin "
                    "there or before"
                )
        object.__setattr__(self, "pages", checked_components(what, None, self.pages))
