"""One worker: an engine in miniature over the controller and a KVCR store. It obeys JSON lines on standard input.

    {"do": "store"}                computes the prompt's pages, backs them up and stores them
    {"do": "reuse", "hint": ...}   looks for the prompt's prefix, restores it and digests what came
    {"do": "hold", "hint": ...}    looks for it, and keeps what came in host memory
    {"do": "release"}              lets go of it
    {"do": "forget"}               drops the host tier's pages, so that only the store has them
    {"do": "state"}                tells what the store did
    {"do": "quit"}                 closes everything, and tells what of the store is still mapped

The order of "hold" and "reuse" may name a "salt", which is another prompt. With --ranks, each process is a
tensor-parallel rank: it has its share of heads, and listens at the store's control_port plus its number. With
--rendezvous the ranks agree on what they reuse. With --events it publishes KV events for a router.
The model is Qwen3-0.6B's geometry: 28 layers, 8 KV heads of 128, bf16.
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
from torch.distributed import TCPStore

from kvcr_actors import (
    AsyncController,
    BackupNode,
    CacheLayout,
    ContextTable,
    ControllerConfig,
    CpuDevice,
    DeadlineError,
    EventsConfig,
    HostPools,
    Namespace,
    PageContext,
    PageKey,
    PoolSpec,
    PrefetchReady,
    PrefetchRequest,
    RequestId,
    RestoreFinished,
    RestoreOrder,
    TorchDistributedRanks,
    ZmqEventSink,
    chain_seed,
    layout_name,
    open_controller,
    page_keys,
    router_key,
)
from kvcr_actors.ports import EventSink, Ranks
from kvcr_actors_kvcr import KvcrOptions, KvcrStore, RankGroup

LAYERS, HEADS, HEAD_SIZE, BYTES, PAGE_TOKENS = 28, 8, 128, 2, 64


class Worker:
    """One rank: its pages on a CPU device, its host tier, its store."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        group = RankGroup(data=arguments.data_ranks, tensor=arguments.ranks)
        rank = group.rank(data=arguments.data_rank, tensor=arguments.rank)
        plane = PAGE_TOKENS * (HEADS // arguments.ranks) * HEAD_SIZE * BYTES
        # All K planes, then all V planes: the store moves a page as these two spans.
        self.layout = CacheLayout((PoolSpec("kv", 2 * LAYERS, plane),), page_tokens=PAGE_TOKENS)
        self.tokens = list(range(arguments.tokens))
        self.salt = arguments.salt or None
        self.keys = self.keys_of(self.salt)
        self.seed, self.requests, self.others = arguments.rank, 0, 0
        self.held: RequestId = ""
        pages = len(self.keys)
        self.device = CpuDevice(self.layout, pages, HostPools(self.layout, arguments.host_pages or pages))
        namespace = Namespace(
            "Qwen3-0.6B", "1", "bfloat16", layout_name(self.layout), self.layout.page_bytes, rank.namespace_ranks()
        )
        options = json.loads(arguments.options)
        options = {"spans": "kv:2", **rank.control_options(options["control_port"]), **options}
        self.store = KvcrStore(KvcrOptions(**options), 2 * pages, namespace)
        config = ControllerConfig(host_reserve_fraction=0.0, **json.loads(arguments.config))
        contexts = ContextTable()
        self.context = PageContext(self.tokens, PAGE_TOKENS, salt=self.salt)
        sinks: list[EventSink] = []
        if arguments.events:
            sinks.append(ZmqEventSink(EventsConfig(arguments.events, **rank.event_ranks()), contexts))
        self.controller = open_controller(
            config, device=self.device, store=self.store, ranks=meet(arguments), sinks=sinks, contexts=contexts
        )

    def keys_of(self, salt: str | None) -> tuple[PageKey, ...]:
        """The pages of the prompt under a salt."""
        return page_keys(self.tokens, PAGE_TOKENS, chain_seed(page_tokens=PAGE_TOKENS, salt=salt))

    def digests(self, count: int) -> list[str]:
        """What the device has in its first pages, a digest a page."""
        rows = self.device.gather(0, range(count))
        return [hashlib.sha256(row.numpy()).hexdigest()[:16] for row in rows]

    async def store_prompt(self, controller: AsyncController) -> dict[str, Any]:
        """Compute the prompt's pages, back them up, and wait until the store has them."""
        generator = torch.Generator().manual_seed(self.seed)
        for page in range(len(self.keys)):
            content = torch.randint(0, 256, (1, self.layout.page_bytes), dtype=torch.uint8, generator=generator)
            self.device.load(0, [page], content)
        node = BackupNode(1, tuple(self.keys), (range(len(self.keys)),), context=self.context)
        ack = await controller.backup([node])
        await controller.wait_quiet()
        return {
            "not_backed_up": [reason for _, reason in ack.failed],
            "endpoint": self.store.endpoint,
            "hashes": [router_key(key) for key in self.keys],
            "digests": self.digests(len(self.keys)),
            "stored_pages": len(self.store.contents()),
        }

    async def find(self, controller: AsyncController, order: dict[str, Any]) -> PrefetchReady:
        """Prefetch the longest prefix that may be reused: the last token must be computed."""
        self.requests += 1
        request = f"request-{self.requests}"
        usable = (len(self.tokens) - 1) // PAGE_TOKENS
        keys = self.keys_of(order.get("salt") or self.salt)[:usable]
        return await controller.prefetch(PrefetchRequest(request, keys, hints=order.get("hint")))

    async def reuse(self, controller: AsyncController, order: dict[str, Any]) -> dict[str, Any]:
        """Restore what was found."""
        self.device.poison(0, range(len(self.keys)))
        started = anyio.current_time()
        found = ended = await self.find(controller, order)
        if found.account is None:
            ended = await controller.restore(RestoreOrder(found.request_id, 0, (range(found.pages),)))
        pages = ended.pages if isinstance(ended, RestoreFinished) else 0
        return {
            "tokens": len(self.tokens),
            "reused": pages * PAGE_TOKENS,
            "not_reused": dict(ended.account.reasons) if ended.account else {},
            "digests": self.digests(pages),
            "seconds": anyio.current_time() - started,
        }

    async def hold(self, controller: AsyncController, order: dict[str, Any]) -> dict[str, Any]:
        """Keep what was found in host memory."""
        found = await self.find(controller, order)
        self.held = found.request_id
        return {"held": found.pages if found.account is None else 0}

    async def release(self, controller: AsyncController) -> dict[str, Any]:
        """Let go of what is held."""
        controller.cancel(self.held)
        await controller.wait_quiet()
        controller.clear_host()
        return {"released": self.held}

    async def forget(self, controller: AsyncController) -> dict[str, Any]:
        """Push the prompt out of the host tier with another prompt's pages; the store has room for two prompts."""
        self.others += 1
        other = page_keys(
            [token + self.others for token in self.tokens], PAGE_TOKENS, chain_seed(page_tokens=PAGE_TOKENS)
        )
        await controller.backup([BackupNode(2, tuple(other), (range(len(other)),))])
        await controller.wait_quiet()
        return {"host_pages_of_the_prompt": len(controller.host_contents() & set(self.keys))}

    async def answer(self, controller: AsyncController, order: dict[str, Any]) -> dict[str, Any] | None:
        """Obey an order; None for the last one."""
        match order["do"]:
            case "store":
                return await self.store_prompt(controller)
            case "reuse":
                return await self.reuse(controller, order)
            case "hold":
                return await self.hold(controller, order)
            case "release":
                return await self.release(controller)
            case "forget":
                return await self.forget(controller)
            case "state":
                claims = controller.claims
                return self.store.describe() | {
                    "claims_open": claims.open,
                    "quarantined_claim_bytes": claims.quarantined_bytes,
                    "reasons": dict(controller.stats.reasons),
                    "ranks": controller.describe()["ranks"],
                }
            case _:
                return None

    async def run(self) -> None:
        """Serve until the end; what is not quiet by then, such as a read from a peer that is gone, stays mapped."""
        try:
            await self.serve()
        except DeadlineError as late:
            print(f"worker: {late}", file=sys.stderr, flush=True)
        print(json.dumps({"mapped_bytes": self.store.describe()["mapped_bytes"]}), flush=True)

    async def serve(self) -> None:
        """Serve orders until `quit` or the end of the input."""
        async with self.controller as controller:
            print(json.dumps({"ready": True, "endpoint": self.store.endpoint}), flush=True)
            while True:
                line = await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
                answer = await self.answer(controller, json.loads(line) if line else {"do": "quit"})
                if answer is None:
                    break
                print(json.dumps(answer, default=str), flush=True)


def meet(arguments: argparse.Namespace) -> Ranks | None:
    """The other tensor-parallel ranks, if they are to agree; whoever launches them runs the server they meet at."""
    if not arguments.rendezvous:
        return None
    meeting = TCPStore("127.0.0.1", arguments.rendezvous, is_master=False)
    return TorchDistributedRanks(arguments.rank, arguments.ranks, meeting)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--salt", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--data-rank", type=int, default=0)
    parser.add_argument("--data-ranks", type=int, default=1)
    parser.add_argument("--rendezvous", type=int, default=0, help="the port of the TCPStore at which ranks meet")
    parser.add_argument("--host-pages", type=int, default=0, help="pages of the host tier; the prompt's by default")
    parser.add_argument("--events", default="", help="publish KV events from this port on")
    parser.add_argument("--options", default="{}", help="options of the store, as JSON")
    parser.add_argument("--config", default="{}", help="the controller's configuration, as JSON")
    logging.getLogger("nixl").setLevel(logging.WARNING)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    anyio.run(Worker(parser.parse_args(arguments)).run)


if __name__ == "__main__":
    main()
