"""A cache controller for LLM inference engines: actors that move KV-cache pages between device, host and store.

`CacheController` serves a synchronous scheduler loop, `open_controller` asynchronous code. Importing this package does
not import torch; devices live in `kvcr_actors.devices`, stores in `kvcr_actors.stores`.
"""

from kvcr_actors import _platform as _platform  # first: what follows imports what only Linux has
from kvcr_actors.aio import AsyncController, open_controller
from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.errors import KvcrActorsError, UnsupportedPlatformError
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    ControllerFailed,
    DepositFailed,
    PrefetchCancelled,
    PrefetchReady,
    RestoreFinished,
)
from kvcr_actors.types import (
    NO_SLOT,
    AllPages,
    BackupNode,
    BlockGroups,
    CacheLayout,
    MissReason,
    PageKey,
    PoolSpec,
    PrefetchRequest,
    RestoreOrder,
    SkipReason,
    Tier,
    TrailingPages,
    WritePolicy,
)

__all__ = [
    "NO_SLOT",
    "AllPages",
    "AsyncController",
    "BackupAck",
    "BackupNode",
    "BlockGroups",
    "CacheController",
    "CacheLayout",
    "Completion",
    "ControllerConfig",
    "ControllerFailed",
    "DepositFailed",
    "KvcrActorsError",
    "MissReason",
    "PageKey",
    "PoolSpec",
    "PrefetchCancelled",
    "PrefetchReady",
    "PrefetchRequest",
    "RestoreFinished",
    "RestoreOrder",
    "SkipReason",
    "Tier",
    "TrailingPages",
    "UnsupportedPlatformError",
    "WritePolicy",
    "open_controller",
]
