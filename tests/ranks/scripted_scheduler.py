"""A whole controller over real ranks, a CPU device and the memory store, and the scheduler loop that drives it."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from kvcr_actors.config import ControllerConfig
from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.core.rounds import RoundShape
from kvcr_actors.devices.cpu import CpuDevice, CpuFence
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.messages import BackupAck, Completion, DepositFailed, PrefetchCancelled, PrefetchReady, RestoreFinished
from kvcr_actors.ports import BatchOutcome, HostMemory, PageBatch, Store, StoreTraits
from kvcr_actors.ranks.torch_distributed import TorchDistributedRanks
from kvcr_actors.stores.bounded import BoundedBackend
from kvcr_actors.stores.memory import MemoryMedium, memory_backend
from kvcr_actors.stores.threaded import ThreadedStore
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.invariants import OrderBook
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.stores import FaultyStore
from kvcr_actors.types import BackupNode, PageKey, PrefetchRequest, RestoreOrder
from tests.actors.cluster import HYBRID, page_bytes
from tests.ranks.lives import AGREEMENT_S, Life

POOLS = len(HYBRID.pools)
CONFIG = {"poison_freed_pages": True, "host_reserve_fraction": 0.0, "agreement_deadline_s": AGREEMENT_S}
CONFIG |= {"drain_budget_s": 5.0, "restart_backoff_s": 0.01}


class TroubledBackend(BoundedBackend):
    """The memory store's backend on a slow medium, which loses pages just before its first read."""

    def __init__(self, pages: int, read_s: float, write_s: float, loses: Sequence[PageKey]) -> None:
        super().__init__(pages, MemoryMedium())
        self._read_s, self._write_s, self._loses = read_s, write_s, loses

    def read(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        time.sleep(self._read_s)
        loses, self._loses = self._loses, ()
        self.discard(loses)
        return super().read(batch, host)

    def write(self, batch: PageBatch, host: HostMemory) -> BatchOutcome:
        time.sleep(self._write_s)
        return super().write(batch, host)


def make_store(
    pages: int = 64,
    read_s: float = 0.0,
    write_s: float = 0.0,
    loses: Sequence[tuple[str, int]] = (),
    faults: Mapping[str, str] | None = None,
) -> Store:
    """The memory store, slow or not; with `faults` ("read 0": "late") the testing kit's, whose operations meet them."""
    traits = StoreTraits(batch_pages=4, read_budget_s=30.0, write_budget_s=30.0)
    if faults is None:
        lost = [chain(name, index + 1)[index] for name, index in loses]
        return ThreadedStore("memory", TroubledBackend(pages, read_s, write_s, lost), traits)
    plan = FaultPlan({(name.split()[0], int(name.split()[1])): Fault(fault) for name, fault in faults.items()})
    return FaultyStore(
        memory_backend(pages), plan, latency=lambda kind, _: read_s if kind == "read" else 0.0, traits=traits
    )


class HangError(Exception):
    """Something was not answered within the life's patience."""


class Scheduler:
    """The scheduler loop of one life: it gives orders, polls for completions, and notes how each operation ended."""

    def __init__(self, life: Life, store: dist.TCPStore, meetings: dist.TCPStore) -> None:
        self.life = life
        self.nodes: dict[int, str] = {}
        """How each node ended: `kept`, or why not."""
        self.lengths: dict[str, int | None] = {}
        """The length at which each prefetch stood ready, 0 for a miss, None where it was cancelled before."""
        self.endings: dict[str, list[Any]] = {}
        """How each request ended, and its reasons."""
        self.left_out = 0
        """Pages that stayed out of the store, counted each time."""
        self.trouble: list[str] = []
        self.orders = OrderBook()
        self.completions: list[Completion] = []
        self.index = InventoryIndex()
        self.device = CpuDevice(HYBRID, 4096, HostPools(HYBRID, life.host_slots, touch_threads=1))
        self.ranks = TorchDistributedRanks(
            life.rank,
            life.size,
            dist.PrefixStore(life.group, store),
            shape=RoundShape(*life.shape),
            start_deadline_s=30.0,
        )
        self.controller = CacheController(
            ControllerConfig.from_mapping({**CONFIG, **life.config}),
            device=self.device,
            store=None if life.store is None else make_store(**life.store),
            ranks=self.ranks,
            sinks=(self.index,),
            loop="trio" if life.loop == "trio" else "asyncio",
        )
        self._meetings = dist.PrefixStore(f"{life.group}/meetings", meetings)
        self._free_page = count()
        self._queued: list[BackupNode] = []
        self._keys: dict[str, tuple[PageKey, ...]] = {}
        self._ready: dict[str, int] = {}
        self._restored: dict[str, int] = {}
        self._steps: dict[str, Callable[..., None]] = {
            "write": self.write,
            "prefetch": self.prefetch,
            "cancel": self.controller.cancel,
            "flush": self.flush,
            "restore": self.restore,
            "answered": self.wait_for_answer,
            "ended": self.wait_for_end,
            "settle": self.settle,
            "quiet": lambda: self.controller.wait_quiet(life.patience_s),
            "empty host": lambda: self.controller.clear_host(life.patience_s),
            "sleep": time.sleep,
            "meet": self.meet,
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "freeze": self.freeze,
        }

    def follow_script(self) -> None:
        """Do everything, then let go of what stands ready, and wait until nothing is under way."""
        self.guard(self._follow)

    def guard(self, step: Callable[[], None]) -> None:
        """Take a step; the test reads what goes wrong."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - any is told
            self.trouble.append(f"{type(error).__name__}: {error}")
            traceback.print_exc()

    def _follow(self) -> None:
        for name, *arguments in self.life.script:
            self._steps[name](*arguments)
        self.flush()
        self.settle()
        for request_id in self._ready:
            self.controller.cancel(request_id)
        self.flush()
        self._wait_until(lambda: len(self.endings) == len(self.orders.requests), "the last cancels")
        self.controller.wait_quiet(self.life.patience_s)

    # The steps of a script.

    def write(self, node_id: int, name: str, first: int, pages: int) -> None:
        """Queue a node of pages `[first, first + pages)` of a path, in fresh device pages."""
        path = chain(name, first + pages)
        keys = path[first:]
        ids = tuple(next(self._free_page) for _ in keys)
        for pool in range(POOLS):
            content = bytearray(self._bytes(keys, pool))
            self.device.load(pool, ids, torch.frombuffer(content, dtype=torch.uint8).view(len(keys), -1))
        node = BackupNode(node_id, keys, (ids,) * POOLS, path[first - 1] if first else None)
        self.controller.write(node, flush=False)
        self._queued.append(node)

    def prefetch(self, request_id: str, name: str, pages: int) -> None:
        """Queue a prefetch of a path."""
        request = PrefetchRequest(request_id, chain(name, pages))
        self._keys[request_id] = request.keys
        self.orders.prefetch(request)
        self.controller.prefetch(request)

    def flush(self, held_s: float = 0.0) -> None:
        """End the step; its copies wait so long for the device."""
        fence = CpuFence() if held_s else None
        if fence is not None:
            threading.Timer(held_s, fence.set).start()
        self.orders.step(self.controller.flush_pending_backups(fence), self._queued)
        self._queued = []

    def restore(self, request_id: str) -> None:
        """Restore a prefix once it stands ready, and check its bytes; nothing if it never does."""
        self.wait_for_answer(request_id)
        pages = self._ready.pop(request_id, None)
        if pages is None:
            return
        ids = tuple(next(self._free_page) for _ in range(pages))
        order = RestoreOrder(request_id, 0, (ids,) * POOLS)
        self.orders.restore(order)
        self.controller.restore(order)
        self.flush()
        self.wait_for_end(request_id)
        came = self._restored.get(request_id, 0)  # none where a cancel came first
        for pool in range(POOLS):
            content = self.device.gather(pool, ids[:came]).numpy().tobytes()
            if content != self._bytes(self._keys[request_id][:came], pool):
                self.trouble.append(f"request {request_id}: wrong bytes in pool {pool}")

    def wait_for_answer(self, request_id: str) -> None:
        """Wait until a prefetch is ready or over."""
        self._wait_until(lambda: request_id in self.lengths, f"the prefetch of {request_id}")

    def wait_for_end(self, request_id: str) -> None:
        """Wait until a request holds nothing any more."""
        self._wait_until(lambda: request_id in self.endings, f"the end of {request_id}")

    def settle(self) -> None:
        """Wait until every node and every prefetch is answered."""
        wanted = {node for nodes in self.orders.steps.values() for node in nodes}
        self._wait_until(lambda: self.nodes.keys() >= wanted, f"the nodes {sorted(wanted)}")
        for request_id in self.orders.requests:
            self.wait_for_answer(str(request_id))

    def meet(self, place: str, ranks: int | None = None) -> None:
        """Wait until so many ranks (all of them) came here, without a collective."""
        self._meetings.add(place, 1)
        end = time.monotonic() + self.life.patience_s
        while self._meetings.add(place, 0) < (ranks or self.life.size):
            if time.monotonic() > end:
                raise HangError(f"the others did not come to {place}")
            time.sleep(0.002)

    def freeze(self, seconds: float) -> None:
        """Stop this whole process; the test wakes it after so many seconds."""
        print(json.dumps({"frozen": seconds}), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + self.life.patience_s
        while not is_over():
            if time.monotonic() > end:
                faulthandler.dump_traceback()
                raise HangError(f"{what} had no answer in {self.life.patience_s:g} s")
            self.controller.wait(0.2)
            self.take()

    def take(self) -> None:
        """Note what completed."""
        for completion in self.controller.take():
            self.completions.append(completion)
            match completion:
                case BackupAck():
                    self.nodes.update(dict.fromkeys(completion.node_ids, "kept"))
                    self.nodes.update({node: reason.value for node, reason in completion.failed})
                case PrefetchReady(account=None):
                    self._ready[str(completion.request_id)] = completion.pages
                    self.lengths[str(completion.request_id)] = completion.pages
                case PrefetchReady():
                    self.lengths[str(completion.request_id)] = 0
                    self._end("missed", completion)
                case PrefetchCancelled():
                    self.lengths.setdefault(str(completion.request_id), None)
                    self._ready.pop(str(completion.request_id), None)
                    self._end("cancelled", completion)
                case RestoreFinished():
                    self._restored[str(completion.request_id)] = completion.pages
                    self._end("restored" if completion.pages else "not restored", completion)
                case DepositFailed():
                    self.left_out += len(completion.keys)
                case _:
                    self.trouble.append(repr(completion))

    def _end(self, how: str, completion: Any) -> None:
        reasons = {reason.value: pages for reason, pages in completion.account.reasons.items()}
        self.endings[str(completion.request_id)] = [how, reasons]

    def _bytes(self, keys: Sequence[PageKey], pool: int) -> bytes:
        return b"".join(page_bytes(self.life.rank, key, pool) for key in keys)
