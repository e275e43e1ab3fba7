"""A cache controller for LLM inference engines: actors that move KV-cache pages between device, host and store.

All that an engine needs is here (`docs/api.md` lists it): `CacheController` serves a synchronous scheduler loop,
`open_controller` asynchronous code. Importing this package does not import torch: names that need it, or another large
package, come with their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcr_actors import _platform as _platform  # first: what follows imports what only Linux has
from kvcr_actors.aio import AsyncController, open_controller
from kvcr_actors.aio_store import AsyncStoreClient, open_store_client
from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.core.accounting import RequestAccount, TierAccount
from kvcr_actors.core.copy_plan import Direction
from kvcr_actors.core.inventory import (
    BlocksRemoved,
    BlocksStored,
    InventoryEvent,
    InventoryIndex,
    Ownership,
    TierCleared,
)
from kvcr_actors.core.keys import (
    KeyAdapter,
    Namespace,
    PageKeyAdapter,
    RouterForm,
    chain_seed,
    layout_name,
    page_key,
    page_keys,
    router_key,
)
from kvcr_actors.core.stats import ControllerStats
from kvcr_actors.errors import (
    ActorEscalatedError,
    CheckpointError,
    ConfigError,
    ControllerClosedError,
    DeadlineError,
    DeviceError,
    EventEndpointError,
    InvalidNodeError,
    KeyFormatError,
    KvcrActorsError,
    NoHostMemoryError,
    StoreError,
    StoreFormatError,
    StoreLockedError,
    UnsupportedPlatformError,
)
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.host_buffers import HostBuffers
from kvcr_actors.logs import configure_logging
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    ControllerFailed,
    DepositFailed,
    PrefetchCancelled,
    PrefetchReady,
    ResetFinished,
    RestoreFinished,
)
from kvcr_actors.ports import Device, EventSink, HostMemory, Ranks, RunningEventSink, Store, StoreTraits
from kvcr_actors.ranks.single import SingleRank
from kvcr_actors.store_client import StoreClient
from kvcr_actors.store_slot import HostCleared
from kvcr_actors.stores.registry import open_store, store_names
from kvcr_actors.types import (
    NO_SLOT,
    AllPages,
    BackupNode,
    BlockGroups,
    CacheLayout,
    Components,
    Eviction,
    HitPolicy,
    MissReason,
    NodeId,
    PageContext,
    PageKey,
    PoolSpec,
    PrefetchRequest,
    RequestId,
    RestoreOrder,
    SkipReason,
    StopPolicy,
    Tier,
    TrailingPages,
    WritePolicy,
)

if TYPE_CHECKING:
    from kvcr_actors.devices.cpu import CpuDevice, CpuFence
    from kvcr_actors.devices.cuda import CudaDevice
    from kvcr_actors.devices.cuda_runtime import CudaRuntime
    from kvcr_actors.devices.foreign_host import ForeignHostPools
    from kvcr_actors.devices.host_memory import HostPools
    from kvcr_actors.events.zmq import ZmqEventSink
    from kvcr_actors.metrics import Gauges, Metrics
    from kvcr_actors.movers.mover import PageMover
    from kvcr_actors.movers.orders import MoveAck, Moved, MoveFailure, MoveOrder, MoverFailed
    from kvcr_actors.ranks.torch_distributed import TorchDistributedRanks

_AT_FIRST_USE = {
    "CpuDevice": "kvcr_actors.devices.cpu",
    "CpuFence": "kvcr_actors.devices.cpu",
    "CudaDevice": "kvcr_actors.devices.cuda",
    "CudaRuntime": "kvcr_actors.devices.cuda_runtime",
    "ForeignHostPools": "kvcr_actors.devices.foreign_host",
    "Gauges": "kvcr_actors.metrics",
    "HostPools": "kvcr_actors.devices.host_memory",
    "Metrics": "kvcr_actors.metrics",
    "MoveAck": "kvcr_actors.movers.orders",
    "MoveFailure": "kvcr_actors.movers.orders",
    "MoveOrder": "kvcr_actors.movers.orders",
    "Moved": "kvcr_actors.movers.orders",
    "MoverFailed": "kvcr_actors.movers.orders",
    "PageMover": "kvcr_actors.movers.mover",
    "TorchDistributedRanks": "kvcr_actors.ranks.torch_distributed",
    "ZmqEventSink": "kvcr_actors.events.zmq",
}
"""Where the names are whose modules import torch, numpy, ZeroMQ or Prometheus."""

__all__ = [
    "NO_SLOT",
    "ActorEscalatedError",
    "AllPages",
    "AsyncController",
    "AsyncStoreClient",
    "BackupAck",
    "BackupNode",
    "BlockGroups",
    "BlocksRemoved",
    "BlocksStored",
    "CacheController",
    "CacheLayout",
    "CheckpointError",
    "Completion",
    "Components",
    "ConfigError",
    "ContextTable",
    "ControllerClosedError",
    "ControllerConfig",
    "ControllerFailed",
    "ControllerStats",
    "CpuDevice",
    "CpuFence",
    "CudaDevice",
    "CudaRuntime",
    "DeadlineError",
    "DepositFailed",
    "Device",
    "DeviceError",
    "Direction",
    "EventEndpointError",
    "EventSink",
    "EventsConfig",
    "Eviction",
    "ForeignHostPools",
    "Gauges",
    "HitPolicy",
    "HostBuffers",
    "HostCleared",
    "HostMemory",
    "HostPools",
    "InvalidNodeError",
    "InventoryEvent",
    "InventoryIndex",
    "KeyAdapter",
    "KeyFormatError",
    "KvcrActorsError",
    "Metrics",
    "MissReason",
    "MoveAck",
    "MoveFailure",
    "MoveOrder",
    "Moved",
    "MoverFailed",
    "Namespace",
    "NoHostMemoryError",
    "NodeId",
    "Ownership",
    "PageContext",
    "PageKey",
    "PageKeyAdapter",
    "PageMover",
    "PoolSpec",
    "PrefetchCancelled",
    "PrefetchReady",
    "PrefetchRequest",
    "Ranks",
    "RequestAccount",
    "RequestId",
    "ResetFinished",
    "RestoreFinished",
    "RestoreOrder",
    "RouterForm",
    "RunningEventSink",
    "SingleRank",
    "SkipReason",
    "StopPolicy",
    "Store",
    "StoreClient",
    "StoreError",
    "StoreFormatError",
    "StoreLockedError",
    "StoreTraits",
    "Tier",
    "TierAccount",
    "TierCleared",
    "TorchDistributedRanks",
    "TrailingPages",
    "UnsupportedPlatformError",
    "WritePolicy",
    "ZmqEventSink",
    "chain_seed",
    "configure_logging",
    "layout_name",
    "open_controller",
    "open_store",
    "open_store_client",
    "page_key",
    "page_keys",
    "router_key",
    "store_names",
]


def __getattr__(name: str) -> Any:
    try:
        module = _AT_FIRST_USE[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
