"""A controller inside a scheduler loop. Run it: no GPU, no model; the engine below only pretends to compute.

python examples/embed_in_a_loop.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import attrs
import torch

# README: begin
from kvcr_actors import (
    BackupAck,
    CacheController,
    ControllerConfig,
    ControllerFailed,
    DepositFailed,
    PrefetchCancelled,
    PrefetchReady,
    PrefetchRequest,
    ResetFinished,
    RestoreFinished,
)

# README: end
# isort: split
from kvcr_actors import (
    BackupNode,
    CacheLayout,
    CpuDevice,
    CpuFence,
    HostPools,
    Namespace,
    PageKey,
    PoolSpec,
    RequestId,
    RestoreOrder,
    Store,
    chain_seed,
    layout_name,
    open_store,
    page_keys,
)

PAGE_TOKENS = 4
LAYOUT = CacheLayout((PoolSpec("kv", planes=2, plane_bytes=64),), page_tokens=PAGE_TOKENS)


@attrs.define(eq=False)
class Request:
    """A prompt on its way through the engine. `pages` are device pages; the first `reused` were not computed."""

    id: int
    keys: tuple[PageKey, ...]
    device_hits: int = 0
    pages: list[int] = attrs.field(factory=list[int])
    reused: int = 0


class ToyEngine:
    """One request at a time; its pages go when they are backed up, so that the next one must get them back."""

    def __init__(self, device: CpuDevice, prompts: Sequence[Sequence[int]]) -> None:
        self._device = device
        self._free = list(range(16))
        keys = [page_keys(tokens, PAGE_TOKENS, chain_seed(page_tokens=PAGE_TOKENS)) for tokens in prompts]
        self._waiting = [Request(number, chain) for number, chain in enumerate(keys)]
        self._requests: dict[RequestId, Request] = {}
        self._to_compute: list[Request] = []
        self._finished: list[Request] = []
        self.is_running = True

    def arrivals(self) -> list[Request]:
        """The next request, once the engine has nothing else to do."""
        if self._requests:
            return []
        self.is_running = bool(self._waiting)
        arrived = self._waiting[:1]
        del self._waiting[:1]
        self._requests.update((request.id, request) for request in arrived)
        return arrived

    def device_hits(self, request_id: RequestId) -> int:
        """How many of a request's pages the device has already."""
        return self._requests[request_id].device_hits

    def restore_order(self, request_id: RequestId, pages: int) -> RestoreOrder:
        """Give device pages for what the controller holds ready."""
        request = self._requests[request_id]
        self._allocate(request, pages)
        return RestoreOrder(request_id, request.device_hits, (request.pages[request.device_hits :],))

    def start(self, request_id: RequestId, first_page_to_compute: int) -> None:
        """Let a request run: what comes before the page named is on the device."""
        request = self._requests[request_id]
        request.reused = first_page_to_compute
        self._allocate(request, len(request.keys))
        self._to_compute.append(request)

    def run_step(self) -> None:
        """Compute the pages that are missing, and read all of them, as attention would."""
        time.sleep(0.001)
        for request in self._to_compute:
            expected = torch.stack([_content(key) for key in request.keys])
            self._device.load(0, request.pages[request.reused :], expected[request.reused :])
            if not torch.equal(self._device.gather(0, request.pages), expected):
                raise RuntimeError(f"request {request.id} got wrong bytes")
            print(f"request {request.id}: {request.reused} pages reused, {len(request.keys) - request.reused} computed")
        self._finished, self._to_compute = self._to_compute, []

    def finished_nodes(self) -> list[BackupNode]:
        """What the step computed, below the page that it continues; what was reused whole has nothing to back up."""
        nodes: list[BackupNode] = []
        for request in self._finished:
            first = request.reused
            if first == len(request.keys):
                self._let_go(request)
                continue
            parent = request.keys[first - 1] if first else None
            nodes.append(BackupNode(request.id, request.keys[first:], (request.pages[first:],), parent))
        self._finished = []
        return nodes

    def fence(self) -> CpuFence:
        """What the copies must wait for: here the pages are written when `run_step` returns."""
        fence = CpuFence()
        fence.set()
        return fence

    def may_change_pages_of(self, node_ids: Sequence[int]) -> None:
        """Let the requests go whose pages are backed up, or for which there was no room."""
        for request_id in node_ids:
            self._let_go(self._requests[request_id])

    def warn(self, text: str) -> None:
        """A real engine would log it."""
        print(text)

    def stop(self, error: str) -> None:
        """Nothing can be cached any more."""
        raise RuntimeError(error)

    def _let_go(self, request: Request) -> None:
        """Free a request's pages, overwritten: from now on only host and store have them."""
        del self._requests[request.id]
        self._device.poison(0, request.pages)
        self._free.extend(request.pages)

    def _allocate(self, request: Request, pages: int) -> None:
        missing = pages - len(request.pages)
        request.pages += self._free[:missing]
        del self._free[:missing]


def _content(key: PageKey) -> torch.Tensor:
    """The bytes of a page: its key, over and over."""
    repeats = LAYOUT.page_bytes // len(key)
    return torch.frombuffer(bytearray(key * repeats), dtype=torch.uint8)


def serve(engine: ToyEngine, device: CpuDevice, store: Store) -> None:
    """The scheduler loop."""
    # README: begin
    with CacheController(ControllerConfig(), device=device, store=store) as cache:
        while engine.is_running:
            for completion in cache.take():
                match completion:
                    case PrefetchReady(request_id, pages, account=None):
                        cache.restore(engine.restore_order(request_id, pages))
                    case PrefetchReady(request_id, pages) | RestoreFinished(request_id, pages):
                        engine.start(request_id, first_page_to_compute=pages)
                    case PrefetchCancelled(request_id):
                        engine.start(request_id, first_page_to_compute=engine.device_hits(request_id))
                    case BackupAck(_, node_ids, failed):
                        engine.may_change_pages_of([*node_ids, *(node_id for node_id, _ in failed)])
                    case DepositFailed(keys, reason):
                        engine.warn(f"{len(keys)} pages stay out of the store: {reason}")
                    case ResetFinished(label, host_pages):
                        engine.warn(f"{label}: {host_pages} pages are forgotten")
                    case ControllerFailed(error):
                        engine.stop(error)
            for request in engine.arrivals():
                cache.prefetch(PrefetchRequest(request.id, request.keys, device_pages=request.device_hits))
            engine.run_step()
            for node in engine.finished_nodes():
                cache.write(node, flush=False)
            cache.flush_pending_backups(engine.fence())
    # README: end


def main() -> None:
    """Serve three prompts: the second continues the first, the third is the first again."""
    device = CpuDevice(LAYOUT, 16, HostPools(LAYOUT, slots=32))
    space = Namespace("toy", "1", "uint8", layout_name(LAYOUT), LAYOUT.page_bytes)
    store = open_store("memory", {}, 64, None, space)
    prompt = list(range(24))
    serve(ToyEngine(device, [prompt, [*prompt, *range(100, 116)], prompt]), device, store)


if __name__ == "__main__":
    main()
