"""One worker: an engine in miniature over the controller and a KVCR store. It obeys JSON lines on standard input.

    {"do": "store"}                computes the prompt's pages, backs them up and stores them
    {"do": "reuse", "hint": ...}   looks for the prompt's prefix, restores it and digests what came
    {"do": "forget"}               drops the host tier's pages, so that only the store has them
    {"do": "state"}                tells what the store did
    {"do": "quit"}                 closes everything

With --events it publishes KV events for a router, as data-parallel rank --dp-rank of two, at that port plus the rank.
The model is Qwen3-0.6B's geometry: 28 layers, 8 KV heads of 128, bf16; a tensor-parallel rank has its share of heads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import anyio
import structlog
import torch

from kvcr_actors import (
    AsyncController,
    BackupNode,
    CacheLayout,
    PoolSpec,
    PrefetchRequest,
    RestoreFinished,
    RestoreOrder,
    open_controller,
)
from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.keys import Namespace, chain_seed, layout_name, page_keys, router_key
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.events.config import EventsConfig
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.zmq import ZmqEventSink
from kvcr_actors.ports import EventSink
from kvcr_actors.types import PageContext
from kvcr_actors_kvcr import KvcrOptions, KvcrStore

LAYERS, HEADS, HEAD_SIZE, BYTES, PAGE_TOKENS = 28, 8, 128, 2, 64


class Worker:
    """One rank: its pages on a CPU device, its host tier, its store."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        heads = HEADS // arguments.ranks
        plane = PAGE_TOKENS * heads * HEAD_SIZE * BYTES
        # All K planes, then all V planes: the store moves a page as these two spans.
        self.layout = CacheLayout((PoolSpec("kv", 2 * LAYERS, plane),), page_tokens=PAGE_TOKENS)
        self.tokens = list(range(arguments.tokens))
        self.keys = page_keys(
            self.tokens, PAGE_TOKENS, chain_seed(page_tokens=PAGE_TOKENS, salt=arguments.salt or None)
        )
        self.rank, self.requests, self.others = arguments.rank, 0, 0
        pages = len(self.keys)
        self.device = CpuDevice(self.layout, pages, HostPools(self.layout, pages))
        namespace = Namespace(
            "Qwen3-0.6B", "1", "bfloat16", layout_name(self.layout), self.layout.page_bytes,
            (("tensor", arguments.rank, arguments.ranks),),
        )  # fmt: skip
        self.store = KvcrStore(KvcrOptions(**{"spans": "kv:2", **json.loads(arguments.options)}), 2 * pages, namespace)
        config = ControllerConfig(host_reserve_fraction=0.0, **json.loads(arguments.config))
        contexts = ContextTable()
        self.context = PageContext(self.tokens, PAGE_TOKENS, salt=arguments.salt or None)
        sinks: list[EventSink] = []
        if arguments.events:
            ranks = {"data_parallel_rank": arguments.dp_rank, "data_parallel_size": 2}
            sinks.append(ZmqEventSink(EventsConfig(arguments.events, **ranks), contexts))
        self.controller = open_controller(config, device=self.device, store=self.store, sinks=sinks, contexts=contexts)

    def digests(self, count: int) -> list[str]:
        """What the device has in its first pages, a digest a page."""
        rows = self.device.gather(0, range(count))
        return [hashlib.sha256(row.numpy()).hexdigest()[:16] for row in rows]

    async def store_prompt(self, controller: AsyncController) -> dict[str, Any]:
        """Compute the prompt's pages, back them up, and wait until the store has them."""
        generator = torch.Generator().manual_seed(self.rank)
        for page in range(len(self.keys)):
            content = torch.randint(0, 256, (1, self.layout.page_bytes), dtype=torch.uint8, generator=generator)
            self.device.load(0, [page], content)
        node = BackupNode(1, tuple(self.keys), (range(len(self.keys)),), context=self.context)
        await controller.backup([node])
        await controller.wait_quiet()
        return {
            "endpoint": self.store.endpoint,
            "hashes": [router_key(key) for key in self.keys],
            "digests": self.digests(len(self.keys)),
            "stored_pages": len(self.store.contents()),
        }

    async def reuse(self, controller: AsyncController, hint: object) -> dict[str, Any]:
        """Restore the longest prefix that may be reused: the last token must be computed."""
        self.requests += 1
        request = f"request-{self.requests}"
        usable = (len(self.tokens) - 1) // PAGE_TOKENS
        self.device.poison(0, range(len(self.keys)))
        started = anyio.current_time()
        ready = await controller.prefetch(PrefetchRequest(request, tuple(self.keys[:usable]), hints=hint))
        pages = 0
        if ready.account is None:
            restored = await controller.restore(RestoreOrder(request, 0, (range(ready.pages),)))
            pages = restored.pages if isinstance(restored, RestoreFinished) else 0
        return {
            "tokens": len(self.tokens),
            "reused": pages * PAGE_TOKENS,
            "digests": self.digests(pages),
            "seconds": anyio.current_time() - started,
        }

    async def forget(self, controller: AsyncController) -> dict[str, Any]:
        """Push the prompt out of the host tier with another prompt's pages; the store has room for two prompts."""
        self.others += 1
        other = page_keys(
            [token + self.others for token in self.tokens], PAGE_TOKENS, chain_seed(page_tokens=PAGE_TOKENS)
        )
        await controller.backup([BackupNode(2, tuple(other), (range(len(other)),))])
        await controller.wait_quiet()
        return {"host_pages_of_the_prompt": len(controller.host_contents() & set(self.keys))}

    async def run(self) -> None:
        """Serve commands until `quit` or the end of the input."""
        async with self.controller as controller:
            print(json.dumps({"ready": True, "endpoint": self.store.endpoint}), flush=True)
            while True:
                line = await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
                order = json.loads(line) if line else {"do": "quit"}
                match order["do"]:
                    case "store":
                        answer = await self.store_prompt(controller)
                    case "reuse":
                        answer = await self.reuse(controller, order.get("hint"))
                    case "forget":
                        answer = await self.forget(controller)
                    case "state":
                        answer = self.store.describe()
                        claims = controller.claims
                        answer |= {"claims_open": claims.open, "quarantined_claim_bytes": claims.quarantined_bytes}
                    case _:
                        break
                print(json.dumps(answer, default=str), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--salt", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--events", default="", help="publish KV events from this port on")
    parser.add_argument("--dp-rank", type=int, default=0)
    parser.add_argument("--options", default="{}", help="options of the store, as JSON")
    parser.add_argument("--config", default="{}", help="the controller's configuration, as JSON")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    anyio.run(Worker(parser.parse_args(arguments)).run)


if __name__ == "__main__":
    main()
