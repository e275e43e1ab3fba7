"""The words of the domain: tiers, pools, pages, nodes and the orders an engine gives."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from typing import TypeAlias

import attrs

from kvcr_actors.errors import ConfigError, InvalidNodeError

PageKey: TypeAlias = bytes
"""A page's name: 32 bytes, chained from the root (see `core.keys`)."""

KEY_BYTES = 32

RequestId: TypeAlias = Hashable
NodeId: TypeAlias = int

NO_SLOT = -1
"""In a component list: this pool keeps nothing for that page."""


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


Components: TypeAlias = tuple[Sequence[int], ...]
"""For each pool of the layout, one device page (or host slot) a page, `NO_SLOT` where the pool keeps nothing."""


def _check_components(what: str, count: int, components: Components) -> None:
    for pool, pages in enumerate(components):
        if len(pages) != count:
            raise InvalidNodeError(f"{what}: pool {pool} lists {len(pages)} pages for {count} keys")


def _check_keys(what: str, keys: Sequence[PageKey]) -> None:
    if not set(map(len, keys)) <= {KEY_BYTES}:
        wrong = next(key for key in keys if len(key) != KEY_BYTES)
        raise InvalidNodeError(f"{what}: key {wrong!r} has {len(wrong)} bytes, not {KEY_BYTES}; see core.keys")


@attrs.frozen
class PageContext:
    """What a run of pages was computed from, as routers need it: `page_tokens` tokens a page, root to tail.

    `tokens` is kept as it is given and must not change; an `array("I")` keeps it small. `adapter` and `salt` are those
    of the pages' chain seed (see `core.keys`).
    """

    tokens: Sequence[int] = attrs.field(repr=False)
    page_tokens: int
    adapter: str | None = None
    salt: str | None = None

    def __attrs_post_init__(self) -> None:
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

    `keys` are root to tail, one a page; `parent` is the key before the first, None at the root.
    The engine keeps the device pages unchanged until the node's ack.
    """

    node_id: NodeId
    keys: tuple[PageKey, ...]
    pages: Components
    parent: PageKey | None = None
    context: PageContext | None = None
    """What the pages were computed from, for the events about them (see `events.contexts`)."""

    def __attrs_post_init__(self) -> None:
        if not self.keys:
            raise InvalidNodeError(f"node {self.node_id}: it has no pages")
        if self.context is not None and self.context.pages != len(self.keys):
            raise InvalidNodeError(
                f"node {self.node_id}: its context describes {self.context.pages} pages, it has {len(self.keys)}"
            )
        if len(set(self.keys)) != len(self.keys):
            raise InvalidNodeError(f"node {self.node_id}: it names a key twice; a path has each key once")
        _check_keys(f"node {self.node_id}", self.keys)
        _check_components(f"node {self.node_id}", len(self.keys), self.pages)
        if all(NO_SLOT in pages for pages in self.pages):
            for index, page in enumerate(zip(*self.pages, strict=True)):
                if all(one == NO_SLOT for one in page):
                    raise InvalidNodeError(f"node {self.node_id}: no pool keeps anything for its page {index}")


@attrs.frozen
class PrefetchRequest:
    """The prefix that a request may reuse: `keys` root to tail, of which the device has the first `device_pages`."""

    request_id: RequestId
    keys: tuple[PageKey, ...]
    device_pages: int = 0
    hints: object | None = attrs.field(default=None, eq=False, repr=False)
    """What a router says of where the prefix lies; the store alone reads it, and only while it serves this request."""
    stop: StopPolicy | None = None
    """How long to go on; None is the configuration's `prefetch_stop_policy`."""

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.device_pages <= len(self.keys):
            raise InvalidNodeError(f"request {self.request_id}: device_pages {self.device_pages} of {len(self.keys)}")
        _check_keys(f"request {self.request_id}", self.keys)
        if len(set(self.keys)) != len(self.keys):
            raise InvalidNodeError(f"request {self.request_id}: it names a key twice; a path has each key once")


@attrs.frozen
class RestoreOrder:
    """Copy a ready prefetch's pages `[first, first + n)` into the device pages given, n a pool."""

    request_id: RequestId
    first: int
    pages: Components

    @property
    def count(self) -> int:
        """Pages to restore."""
        return len(self.pages[0]) if self.pages else 0

    def __attrs_post_init__(self) -> None:
        if self.first < 0:
            raise InvalidNodeError(f"restore of {self.request_id}: first {self.first} is below 0")
        _check_components(f"restore of {self.request_id}", self.count, self.pages)
