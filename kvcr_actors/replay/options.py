"""Every option of the replay: defaults for a first run, checks, and where each value came from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import attrs

from kvcr_actors.errors import ConfigError
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.wire import DIALECTS
from kvcr_actors.replay.outputs import check_output, is_same_file, is_within
from kvcr_actors.replay.trace import BLOCK_TOKENS, TraceRequest, shipped_trace
from kvcr_actors.stores.registry import store_names
from kvcr_actors.types import AllPages, CacheLayout, HitPolicy, PoolSpec, TrailingPages, WritePolicy

NO_STORE: Final = "none"
POOL_POLICIES: Final[Mapping[str, HitPolicy]] = {"kv": AllPages(), "swa": TrailingPages(4), "mamba": TrailingPages(1)}
LOOPS: Final = ("asyncio", "trio")
PLOT_SUFFIXES: Final = (".png", ".svg", ".pdf")

_PLANES = (8, 4, 2, 1)
_GIB = 1 << 30
_MOST = (1 << 63) - 1
_MOST_BLOCK_TOKENS = 1 << 16


def option_name(field: str) -> str:
    """Spell a field as its command-line option; `trace` is an argument."""
    return "TRACE" if field == "trace" else f"--{field.replace('_', '-')}"


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _whole(least: int, most: int = _MOST) -> Callable[[object, attrs.Attribute[Any], object], None]:
    def check(options: object, field: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not int or value < least:
            raise ConfigError(f"{option_name(field.name)}: {_cut(value)} is not a whole number of {least} or more")
        if value > most:
            raise ConfigError(f"{option_name(field.name)}: {_cut(value)} is too large; the most is {most}")

    return check


def _one_of(*choices: str) -> Callable[[object, attrs.Attribute[Any], object], None]:
    def check(options: object, field: attrs.Attribute[Any], value: object) -> None:
        if value not in choices:
            raise ConfigError(f"{option_name(field.name)}: {str(value)!r} is not known; use {', '.join(choices)}")

    return check


def _check_pools(options: object, field: attrs.Attribute[Any], value: tuple[str, ...]) -> None:
    for name in value:
        if name not in POOL_POLICIES:
            raise ConfigError(f"--pools: {name!r} is not known; use {', '.join(POOL_POLICIES)}, separated by commas")
    if "kv" not in value or len(set(value)) != len(value):
        raise ConfigError(f"--pools: {','.join(value)!r} must name kv, and no pool twice; try kv,swa,mamba")


def _write_policy(value: str) -> WritePolicy:
    if value not in tuple(WritePolicy):
        raise ConfigError(f"--write-policy: {value!r} is not known; use {', '.join(WritePolicy)}")
    return WritePolicy(value)


@attrs.frozen
class ReplayOptions:
    """What one replay does. Sizes of tiers are in blocks; 0 means that the tier does not exist.

    Building one checks each value and how they go together; ConfigError names the option and what to do. Nothing is
    created or opened.
    """

    trace: Path | None = None
    """The trace; None is the one that ships with the package."""
    limit: int | None = attrs.field(default=None, validator=attrs.validators.optional(_whole(1)))
    """Requests to replay from the start of the trace; None is all."""
    block_tokens: int = attrs.field(default=BLOCK_TOKENS, validator=_whole(1, _MOST_BLOCK_TOKENS))
    """Tokens for which the trace has one id; its lengths must fit it."""
    sequential: bool = False
    """Each request waits until every actor is quiet: hits are then exactly those of an LRU a tier."""
    concurrency: int = attrs.field(default=16, validator=_whole(1))
    """The most requests that run at a time; sequential replays ignore it."""
    device_blocks: int = attrs.field(default=512, validator=_whole(1))
    host_blocks: int = attrs.field(default=1024, validator=_whole(0))
    store: str = "memory"
    """`none`, or a name of the entry-point group `kvcr_actors.stores`."""
    store_blocks: int = attrs.field(default=4096, validator=_whole(0))
    store_path: Path | None = None
    """The folder of a store that keeps one."""
    store_option: Mapping[str, str] = attrs.field(factory=dict[str, str])
    """Further options of the store, as text; the store checks them."""
    page_bytes: int = attrs.field(default=16_384, validator=_whole(1))
    """A page's bytes over all pools."""
    pools: tuple[str, ...] = attrs.field(default=("kv",), validator=_check_pools)
    write_policy: WritePolicy = attrs.field(default=WritePolicy.WRITE_THROUGH, converter=_write_policy)
    loop: str = attrs.field(default="asyncio", validator=_one_of(*LOOPS))
    events: str | None = None
    """Where KV events are published while the replay runs."""
    events_replay: str | None = None
    """Where readers that missed some ask for them."""
    dialect: str = attrs.field(default="dynamo", validator=_one_of(*DIALECTS))
    json: Path | None = None
    plot: Path | None = None
    progress: bool = True
    seed: int = attrs.field(default=0, validator=_whole(0))
    """Makes page contents differ from another run's."""

    def __attrs_post_init__(self) -> None:
        self._check_store()
        if self.page_bytes < len(self.pools):
            raise ConfigError(
                f"--page-bytes: {self.page_bytes} is less than a byte a pool; give {len(self.pools)} or more"
            )
        self._check_events()
        self._check_outputs()

    def _check_events(self) -> None:
        if self.events is None:
            if self.events_replay is not None:
                raise ConfigError("--events-replay: there are no events; leave it out, or give --events too")
            return
        try:
            EventsConfig(self.events, self.events_replay, self.dialect)
        except ConfigError as error:
            raise ConfigError(f"--events: {error}") from error

    def _check_store(self) -> None:
        names = store_names()
        if self.store != NO_STORE and self.store not in names:
            known = ", ".join((NO_STORE, *names))
            raise ConfigError(f"--store: {self.store!r} is not installed; use {known}, or install its distribution")
        if self.has_store and not self.host_blocks:
            raise ConfigError("--host-blocks: 0 leaves the store unreachable; give host blocks, or --store none")
        if self.store in (NO_STORE, "memory") and self.store_path is not None:
            raise ConfigError(
                f"--store-path: the store {self.store!r} keeps no folder; leave it out, or use --store disk"
            )
        if self.store == NO_STORE and self.store_option:
            raise ConfigError("--store-option: there is no store; leave it out, or name one with --store")
        if self.store_path is not None and self.store_path.exists() and not self.store_path.is_dir():
            raise ConfigError(f"--store-path: {self.store_path} is not a folder; name a folder, or one to be made")

    def _check_outputs(self) -> None:
        if self.plot is not None and self.plot.suffix.lower() not in PLOT_SUFFIXES:
            raise ConfigError(f"--plot: {self.plot} has no picture's suffix; end it in {', '.join(PLOT_SUFFIXES)}")
        if self.json is not None and self.plot is not None and is_same_file(self.json, self.plot):
            raise ConfigError(f"--plot: {self.plot} is the --json file too; give each a file of its own")
        for name, path in (("--json", self.json), ("--plot", self.plot)):
            if path is not None:
                self._check_is_no_input(name, path)
                check_output(name, path)

    def _check_is_no_input(self, name: str, path: Path) -> None:
        if is_same_file(path, shipped_trace() if self.trace is None else self.trace):
            raise ConfigError(f"{name}: {path} is the trace; name another file")
        if self.store_path is not None and is_within(path, self.store_path):
            raise ConfigError(f"{name}: {path} is in the folder of the store; name a file elsewhere")

    @property
    def has_store(self) -> bool:
        """Whether there is a third tier."""
        return self.store != NO_STORE and self.store_blocks > 0

    @property
    def running_limit(self) -> int:
        """The most requests that run at a time."""
        return 1 if self.sequential else self.concurrency

    def layout(self) -> CacheLayout:
        """Share a page's bytes among the pools, evenly; the first takes what is left over."""
        share, rest = divmod(self.page_bytes, len(self.pools))
        sizes = [share + rest, *[share] * (len(self.pools) - 1)]
        return CacheLayout(tuple(map(_pool, self.pools, sizes)))

    def check_capacities(self, requests: Sequence[TraceRequest]) -> None:
        """Refuse a tier that exists but cannot hold the largest request, and tiers that outgrow memory."""
        self._check_memory()
        largest = max(len(request.hash_ids) for request in requests)
        tiers = {"device_blocks": self.device_blocks, "host_blocks": self.host_blocks}
        if self.has_store:
            tiers["store_blocks"] = self.store_blocks
        for field, blocks in tiers.items():
            if 0 < blocks < largest:
                off = "" if field == "device_blocks" else ", or 0 for no such tier"
                raise ConfigError(
                    f"{option_name(field)}: {blocks} cannot hold the largest request; give {largest} or more{off}"
                )

    def _check_memory(self) -> None:
        needed = (self.device_blocks + self.host_blocks) * self.page_bytes
        present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > present:
            sizes = f"the device and host tiers take {needed / _GIB:,.1f} GiB of this machine's {present / _GIB:,.1f}"
            raise ConfigError(f"--page-bytes: {sizes}; give fewer bytes a page, or fewer blocks")

    def to_json(self) -> dict[str, Any]:
        """Give every option as a plain value, as a report keeps it; a store without a folder of its own has null."""
        trace = shipped_trace() if self.trace is None else self.trace
        return {**attrs.asdict(self, recurse=False, value_serializer=_plain), "trace": str(trace)}

    def effective(self, given: frozenset[str] = frozenset()) -> dict[str, tuple[str, str]]:
        """Give each option's value as text and its source: `command line` for the fields in `given`, else `default`."""
        return {
            field.name: (_text(value), "command line" if field.name in given else "default")
            for field, value in zip(attrs.fields(type(self)), attrs.astuple(self, recurse=False), strict=True)
        }


def _pool(name: str, size: int) -> PoolSpec:
    planes = next(count for count in _PLANES if size % count == 0)
    return PoolSpec(name, planes, size // planes, POOL_POLICIES[name])


def _plain(options: object, field: attrs.Attribute[Any] | None, value: object) -> object:
    match value:
        case Path():
            return str(value)
        case tuple():
            return list(cast("tuple[object, ...]", value))
        case Mapping():
            return dict(cast("Mapping[str, str]", value))
        case _:
            return value


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case tuple():
            return ",".join(map(str, cast("tuple[object, ...]", value)))
        case Mapping():
            pairs = cast("Mapping[str, str]", value)
            return ",".join(f"{key}={text}" for key, text in pairs.items()) or "-"
        case _:
            return str(value)
