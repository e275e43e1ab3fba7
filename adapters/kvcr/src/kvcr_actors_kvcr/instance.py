"""One runner: its memory, its bindings, how it is made and unmade. On the owner thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue

from kvcr import KVCR, KVCRBindings
from kvcr.config import G3Options, KVCRBackendConfigs, KVCRConfig, LocalDramOptions
from kvcr.control_channels import ZmqPeerControlChannel
from kvcr.policy import FIFOPolicy, G3FIFOPolicy, G3LRUPolicy, KVCachePolicy, LRUPolicy
from kvcr.types import BlockKey, InventoryEvent, PinHandle, PinRequestId, PinResult

from kvcr_actors import CacheLayout, ConfigError, StoreError
from kvcr_actors.ports import HostMemory
from kvcr_actors_kvcr.block_keys import BlockKeyAdapter
from kvcr_actors_kvcr.calm import calm_progress
from kvcr_actors_kvcr.hints import parse_endpoint
from kvcr_actors_kvcr.options import BLOCKS_A_CALL, KvcrOptions
from kvcr_actors_kvcr.page_layout import PageLayout
from kvcr_actors_kvcr.pool_memory import PoolMemory
from kvcr_actors_kvcr.records import StoreCounters
from kvcr_actors_kvcr.transfers import Transfers

_DIGEST_SLOTS = BLOCKS_A_CALL * 64
_DISK_PAGE = 4_096


class _NoPins:
    """The engine's side of pinning: host slots are lent to peers by nobody, so every pin request is a miss."""

    def __init__(self) -> None:
        self._asked = 0
        self._answers: SimpleQueue[tuple[PinRequestId, PinResult]] = SimpleQueue()

    def request_pin(self, keys: Collection[BlockKey]) -> PinRequestId:
        del keys
        self._asked += 1
        request = PinRequestId(self._asked)
        self._answers.put((request, None))
        return request

    def poll_pin_results(self) -> Iterable[tuple[PinRequestId, PinResult]]:
        answers: list[tuple[PinRequestId, PinResult]] = []
        while True:
            try:
                answers.append(self._answers.get_nowait())
            except Empty:
                return answers

    def release_pin(self, handle: PinHandle) -> bool:
        del handle
        return True


class Instance:
    """What one incarnation of the runner consists of. Its memory is freed by `close` only, once the runner is quiet."""

    def __init__(
        self,
        options: KvcrOptions,
        layout: CacheLayout,
        host: HostMemory,
        capacity_pages: int,
        agent: str,
        endpoint: str | None,
        adapter: BlockKeyAdapter,
    ) -> None:
        self.calm = False
        self._options = options
        self._capacity = capacity_pages
        self._agent = agent
        self._endpoint = endpoint
        self._adapter = adapter
        self._digests = _DIGEST_SLOTS if options.verify_transfer_bytes and not options.disk_path else 0
        self.layout = PageLayout(layout, host, agent, counts=options.span_counts, digests=self._digests)
        self._check(layout, host)
        self._pools: dict[str, PoolMemory] = {}
        self._disk_file = Path(options.disk_path) / f"{agent}.kvcr" if options.disk_path else None

    def transfers(self, kvcr: Callable[[], KVCR], counters: StoreCounters) -> Transfers:
        """The steps of jobs over this instance."""
        options = self._options
        return Transfers(
            kvcr,
            self.layout,
            counters,
            verify=options.verify_transfer_bytes or bool(options.disk_path),
            records=options.diagnostic_telemetry,
            digest_slots=self._digests,
        )

    def start(self, inventory: Callable[[InventoryEvent], None], notice: Callable[[Exception], None]) -> KVCR:
        """Map the pools and start the runner; it takes about half a second."""
        options = self._options
        for name, size in self.layout.sizes_for(self._capacity).items():
            self._pools[name] = PoolMemory(size, huge_pages=options.huge_pages)
        self.layout.attach(self._pools)
        config = KVCRConfig(
            nixl_agent_name=self._agent,
            pool_layouts=self.layout.pool_layouts,
            nixl_listen_port=0,
            operation_timeout_ms=options.operation_timeout_ms,
            abandon_timeout_ms=options.abandon_timeout_ms,
        )
        backends = KVCRBackendConfigs(
            framework_regions=self.layout.framework_regions(),
            local_dram=LocalDramOptions(
                pools=[(name, pool.address, pool.size) for name, pool in self._pools.items()], backend="UCX"
            ),
            g3=self._disk(),
        )
        with calm_progress(enabled=options.calm_progress_thread) as self.calm:
            try:
                return KVCR(config, self._bindings(inventory, notice), backends)
            finally:
                if self._disk_file is not None:
                    # The runner has it open; nothing of it stays behind, however the process ends.
                    self._disk_file.unlink(missing_ok=True)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the pools, until they are unmapped."""
        return sum(pool.size for pool in self._pools.values() if pool.is_mapped)

    def close(self) -> None:
        """Unmap the pools; the runner is closed and quiet."""
        for pool in self._pools.values():
            pool.close()

    def _bindings(
        self, inventory: Callable[[InventoryEvent], None], notice: Callable[[Exception], None]
    ) -> KVCRBindings:
        pins = _NoPins()
        control = None
        address = parse_endpoint(self._endpoint)
        if address is not None:
            control = ZmqPeerControlChannel(self._options.bind_host, address[1], address[0])
        return KVCRBindings(
            request_pin=pins.request_pin,
            poll_pin_results=pins.poll_pin_results,
            release_pin=pins.release_pin,
            framework_control=control,
            key_adapter=self._adapter,
            inventory_sink=inventory,
            policy=_policy(self._options.policy, disk=bool(self._options.disk_path)),
            on_resilience_event=notice,
        )

    def _disk(self) -> G3Options | None:
        if self._disk_file is None:
            return None
        self._disk_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        ((_, block_bytes),) = self.layout.pool_layouts
        size = self._options.disk_blocks * block_bytes
        return G3Options(paths=(self._disk_file,), capacity_bytes_per_file=size, backend="POSIX")

    def _check(self, layout: CacheLayout, host: HostMemory) -> None:
        """Refuse, before anything is made, what the runner would refuse late or with other words."""
        transports = os.environ.get("UCX_TLS", "all").split(",")
        if not {"all", "tcp"} & set(transports):
            raise StoreError(f"store kvcr: UCX_TLS={','.join(transports)}: add tcp, which the runner needs")
        if not host.slots:
            raise StoreError("store kvcr: the host tier has no slots: nothing could be read; give it some")
        if host.slots < self._options.request_pages:
            raise StoreError(
                f"store kvcr: the host tier has {host.slots} slots, and a request may have "
                f"{self._options.request_pages} pages (request_pages); give it that many or more"
            )
        if not self._options.disk_path:
            return
        if len(self.layout.pool_layouts) != 1 or len(self.layout.spans[0]) != 1:
            raise StoreError("store kvcr: option disk_path: the runner's disk tier takes one pool of one span only")
        if layout.page_bytes % _DISK_PAGE:
            raise StoreError(
                f"store kvcr: option disk_path: a page of {layout.page_bytes} bytes; give a multiple of {_DISK_PAGE}"
            )


def _policy(name: str, *, disk: bool) -> KVCachePolicy:
    """A policy by name or dotted path; with a disk tier the named ones spill to it."""
    named: dict[str, type[KVCachePolicy]] = {
        "lru": G3LRUPolicy if disk else LRUPolicy,
        "fifo": G3FIFOPolicy if disk else FIFOPolicy,
    }
    found: object = named.get(name)
    if found is None:
        module, _, attribute = name.rpartition(".")
        try:
            found = import_module(module).__dict__.get(attribute) if module else None
        except ImportError as error:
            raise ConfigError(f"store kvcr: option policy={name!r}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, KVCachePolicy):
        raise ConfigError(f"store kvcr: option policy={name!r}; give lru, fifo or the dotted path of a KVCachePolicy")
    return found()
