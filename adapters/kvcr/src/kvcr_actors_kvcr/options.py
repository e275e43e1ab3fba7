"""Every option of the store: default, meaning, check. The documentation's table is made from this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import attrs

from kvcr_actors import ConfigError
from kvcr_actors.stores import boolean, check_known

STORE = "kvcr"
LOOPBACK = ("127.0.0.1", "localhost")
BLOCKS_A_CALL = 64
"""More keys than this in one call of the runner hold its owner thread, and the runner's lock, for milliseconds."""

_Check = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _refuse(name: str, value: object, instead: str) -> ConfigError:
    return ConfigError(f"store {STORE}: option {name}={value!r}; {instead}")


def _field(default: Any, kind: str, check: _Check, meaning: str) -> Any:
    return attrs.field(default=default, validator=check, metadata={"kind": kind, "meaning": meaning})


def _switch(meaning: str, *, default: bool) -> bool:
    """The one check of every option that is on or off."""

    def check(_options: object, field: attrs.Attribute[bool], value: object) -> None:
        if type(value) is not bool:
            raise _refuse(field.name, value, f"write {field.name}=true or {field.name}=false")

    return _field(default, "switch", check, meaning)


def _whole(meaning: str, *, default: int, least: int, most: int = 1 << 62) -> int:
    def check(_options: object, field: attrs.Attribute[int], value: object) -> None:
        if type(value) is not int or not least <= value <= most:
            raise _refuse(field.name, value, f"give a whole number from {least} to {most}")

    return _field(default, "whole", check, meaning)


def _text(meaning: str, *, default: str) -> str:
    def check(_options: object, field: attrs.Attribute[str], value: object) -> None:
        if not isinstance(value, str):
            raise _refuse(field.name, value, "give text")

    return _field(default, "text", check, meaning)


@attrs.frozen(kw_only=True)
class KvcrOptions:
    """What a KVCR store does. Building one checks each value and how they go together; ConfigError names the option."""

    publish_inventory: bool = _switch("Publish what is stored and evicted as inventory events.", default=True)
    verify_transfer_bytes: bool = _switch(
        "Keep a digest of every page with its bytes, here and for peers; a page whose digest differs is a miss. "
        "Peers must agree on it.",
        default=False,
    )
    align_storage_prefix: bool = _switch(
        "Refresh a prefix's parents before and after a deposit, so that tails are evicted before heads.", default=True
    )
    diagnostic_telemetry: bool = _switch("Log one record for each read and write.", default=False)
    combine_page_reads: bool = _switch("Read all pools of a page in one operation, not one for each.", default=True)
    combine_page_writes: bool = _switch(
        "Store all pools of a page as one block, evicted together. Peers must agree on it.", default=True
    )
    share_replicated_mla: bool = _switch(
        "Replicated pages are written by their owner rank alone; other ranks read their own copy, else the owner's.",
        default=False,
    )
    move_hints: bool = _switch(
        "Accept hints that move pages. KVCR 0.1.1 refuses them, so they give no remote read, counted.", default=False
    )
    required: bool = _switch(
        "A store that cannot start keeps the controller from starting. false: this rank goes on without it, and the "
        "others learn of it.",
        default=True,
    )
    calm_progress_thread: bool = _switch("Let NIXL's progress thread sleep between polls, not spin.", default=True)
    huge_pages: bool = _switch(
        "Use transparent huge pages for the pool: faster deposits, coarser memory.", default=False
    )

    control_port: int = _whole("The base port for peers; 0 for none.", default=0, least=0, most=65_535)
    control_offset: int = _whole(
        "This rank's distance from the base port; negative ones are allowed.", default=0, least=-65_535, most=65_535
    )
    group_offsets: str = _text(
        "The distances of all ranks of the group, with commas; all are checked on every rank.", default=""
    )
    shard_offset: int = _whole(
        "This rank's distance from the first shard of its data-parallel rank, which hints name: added to their ports.",
        default=0,
        least=-65_535,
        most=65_535,
    )
    bind_host: str = _text("The address that the control socket binds.", default="127.0.0.1")
    advertise_host: str = _text("The host under which peers dial this store; default: bind_host.", default="")
    allowed_hint_hosts: str = _text("Hosts that hints may name, with commas.", default=",".join(LOOPBACK))
    owner_endpoint: str = _text(
        "With share_replicated_mla: the owner's endpoint, tcp://host:port. Empty: this rank is the owner.", default=""
    )
    sharded_pools: str = _text(
        "With share_replicated_mla: pools of which each rank has a shard of its own, and writes it; with commas.",
        default="",
    )

    policy: str = _text("lru, fifo, or the dotted path of a policy class of KVCR's.", default="lru")
    spans: str = _text("Pools whose pages are several spans, such as kv:2 for K and V; with commas.", default="")
    disk_path: str = _text("A folder for KVCR's disk tier; empty for none.", default="")
    disk_blocks: int = _whole("Pages that the disk tier holds.", default=0, least=0)

    request_pages: int = _whole(
        "The most pages of a request; a host tier that cannot hold them is refused. 0: not checked.", default=0, least=0
    )
    operation_timeout_ms: int = _whole("The runner's deadline for an operation.", default=10_000, least=100)
    abandon_timeout_ms: int = _whole(
        "When the runner gives up a peer; twice the former or more.", default=20_000, least=200
    )
    remote_wait_ms: int = _whole(
        "When a request stops waiting for a peer; its slots are kept until the runner reports them quiet. "
        "operation_timeout_ms or more.",
        default=10_000,
        least=100,
    )
    close_wait_ms: int = _whole("How long the runner may take to close.", default=15_000, least=1_000)
    idle_poll_ms: int = _whole("How often an idle runner is polled; peers wait for it.", default=15, least=1, most=50)
    chunk_bytes: int = _whole("The most bytes of one operation of the runner.", default=64 << 20, least=1)
    quarantine_bytes: int = _whole(
        "Host memory that peers may still write after a failure; beyond it remote reads stop.",
        default=256 << 20,
        least=0,
    )

    def __attrs_post_init__(self) -> None:
        self._check_deadlines()
        self._check_disk()
        self._check_sharing()

    def _check_deadlines(self) -> None:
        if self.abandon_timeout_ms < 2 * self.operation_timeout_ms:
            least = 2 * self.operation_timeout_ms
            raise _refuse("abandon_timeout_ms", self.abandon_timeout_ms, f"give {least} or more: twice the operation's")
        if self.remote_wait_ms < self.operation_timeout_ms:
            raise _refuse(
                "remote_wait_ms",
                self.remote_wait_ms,
                f"the runner itself waits {self.operation_timeout_ms}; give that or more, or a shorter deadline",
            )

    def _check_disk(self) -> None:
        if bool(self.disk_path) != bool(self.disk_blocks):
            raise _refuse("disk_blocks", self.disk_blocks, "the disk tier needs a folder and a size: give both or none")
        if self.disk_path and self.verify_transfer_bytes and self.control_port:
            raise _refuse(
                "verify_transfer_bytes",
                self.verify_transfer_bytes,
                "a disk tier takes one pool: no digests for peers",
            )

    def _check_sharing(self) -> None:
        if self.owner_endpoint and not self.share_replicated_mla:
            raise _refuse("owner_endpoint", self.owner_endpoint, "it is for share_replicated_mla=true")
        if self.sharded_pools and not self.share_replicated_mla:
            raise _refuse("sharded_pools", self.sharded_pools, "it is for share_replicated_mla=true")
        if self.owner_endpoint and not self.control_port:
            raise _refuse("control_port", self.control_port, "reading the owner's copy needs one")

    @property
    def hint_hosts(self) -> frozenset[str]:
        """The hosts that hints may name."""
        return _names(self.allowed_hint_hosts)

    @property
    def shard_names(self) -> frozenset[str]:
        """The pools of which each rank has a shard."""
        return _names(self.sharded_pools)

    @property
    def span_counts(self) -> dict[str, int]:
        """Spans of the pools that have several."""
        counts: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in self.spans.split(","))):
            pool, _, count = item.partition(":")
            if not count.isdecimal() or int(count) < 1 or pool in counts:
                raise _refuse("spans", self.spans, "write POOL:COUNT, each pool once, such as kv:2,indexer:1")
            counts[pool] = int(count)
        return counts

    @property
    def offsets(self) -> tuple[int, ...]:
        """The distances of all ranks of the group; this rank's alone if none are given."""
        if not self.group_offsets:
            return (self.control_offset,)
        try:
            return tuple(int(part) for part in self.group_offsets.split(","))
        except ValueError:
            raise _refuse(
                "group_offsets", self.group_offsets, "write whole numbers with commas, such as 0,1,-2"
            ) from None


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def parse_options(options: Mapping[str, str]) -> KvcrOptions:
    """Read options from text; an unknown name, or a value that is not exactly of its kind, is a ConfigError."""
    fields = attrs.fields_dict(KvcrOptions)
    check_known(STORE, options, fields)
    values: dict[str, Any] = {}
    for name, text in options.items():
        match fields[name].metadata["kind"]:
            case "switch":
                values[name] = boolean(STORE, options, name, default=False)
            case "whole":
                values[name] = _parse_whole(name, text)
            case _:
                values[name] = text
    return KvcrOptions(**values)


def _parse_whole(name: str, text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdecimal():
        raise _refuse(name, text, "give a whole number")
    return int(text)


def options_table() -> str:
    """Every option with its default and meaning, as a Markdown table."""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, field in attrs.fields_dict(KvcrOptions).items():
        default = cast("object", field.default)
        shown = str(default).lower() if isinstance(default, bool) else default
        rows.append(f"| `{name}` | {f'`{shown}`' if shown != '' else 'none'} | {field.metadata['meaning']} |")
    return "\n".join(rows) + "\n"
