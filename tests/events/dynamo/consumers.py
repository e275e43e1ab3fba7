"""Real Dynamo consumers behind lines of JSON, run by an interpreter that has ai-dynamo-runtime.

usage: consumers.py (selection | agent) CONFIG: answers each line of standard input with a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

os.environ.setdefault("DYN_LOG", "error")

import dynamo._core as dynamo

Answer = Callable[[dict[str, Any]], Awaitable[Any]]
DOMAIN = "0" * 31 + "1:" + "0" * 31 + "2"


async def serve(answer: Answer) -> None:
    loop = asyncio.get_running_loop()
    print(json.dumps("ready"), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line))), flush=True)


def blocks(workers: list[dict[str, Any]]) -> dict[str, list[int]]:
    return {
        str(worker["worker_id"]): [worker["device_blocks"], worker["host_pinned_blocks"], worker["disk_blocks"]]
        for worker in workers
    }


async def selection(config: dict[str, Any]) -> None:
    service = dynamo.SelectionService(indexer_threads=1)
    for worker in config["workers"]:
        state = await service.upsert_worker(
            {
                "worker_id": worker["id"],
                "model_name": "m",
                "block_size": config["block_size"],
                "endpoint": f"http://worker-{worker['id']}",
                "kv_events_endpoint": worker["events"],
                "replay_endpoint": worker["replay"],
                "router_hint_worker_type": "aggregated",
                "router_hint_source_control_endpoints": {0: f"tcp://192.0.2.{worker['id']}:23280"},
            }
        )
        assert state["lifecycle"] == "schedulable", state

    async def answer(request: dict[str, Any]) -> Any:
        if request["ask"] == "overlap":
            return blocks((await service.overlap_scores({"model_name": "m", **request["query"]}))["workers"])
        chosen = await service.select_and_reserve({"model_name": "m", **request["query"]})
        return chosen.get("kv_hint")

    await serve(answer)
    service.shutdown()


async def agent(config: dict[str, Any]) -> None:
    """A router and one worker whose data-parallel ranks' events come through a KV state agent.

    The agent is the one reader of a store's own blocks. Ranks answer as worker 1, 2 and so on.
    """
    workers, size = config["workers"], config["block_size"]
    runtime = dynamo.DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("ns.backend.generate")

    seen: list[dict[str, Any]] = []

    async def generate(request: Any, context: Any = None) -> Any:
        del context
        seen.append(request)
        yield {"token_ids": [1], "finish_reason": "stop"}

    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    await asyncio.sleep(0.4)
    model = dynamo.ModelRuntimeConfig()
    model.total_kv_blocks, model.max_num_batched_tokens = 1_000, 8_192
    model.enable_local_indexer = model.kv_event_publishing_enabled = True
    model.kv_event_source_mode = "state_agent_v2"
    model.data_parallel_start_rank, model.data_parallel_size = 0, len(workers)
    host = dynamo.KvStateAgentHost(runtime.endpoint("ns.kv_state_agent.control"), 8)
    await host.start()
    attachments = [
        {
            "cache_owner_id": f"{DOMAIN}/{'0' * 15}3/{rank + 4:032}",
            "global_dp_rank": rank,
            "kv_state_endpoint": "ns/backend/generate",
            "indexer_domain_id": DOMAIN,
            "kv_block_size": size,
            "raw_zmq_endpoint": worker["events"],
            "raw_topic": "",
            "image_token_id": None,
            "video_token_id": None,
            "router_hint_source": {"source_control_endpoint": worker["control"], "worker_type": "aggregated"},
        }
        for rank, worker in enumerate(workers)
    ]
    model.set_engine_specific(
        "router_hint_source_control_endpoints",
        json.dumps({str(rank): worker["control"] for rank, worker in enumerate(workers)}),
    )
    model.set_engine_specific("router_hint_worker_type", json.dumps("aggregated"))
    model.set_engine_specific("router_hint", "true")
    owner = dynamo.KvStateAttachmentOwner(endpoint, endpoint.connection_id(), attachments)
    await owner.start()
    await dynamo.register_model(
        dynamo.ModelInput.Tokens,
        dynamo.ModelType.Chat | dynamo.ModelType.Completions,
        endpoint,
        "dummy",
        "dummy",
        worker_type=dynamo.WorkerType.Aggregated,
        kv_cache_block_size=size,
        runtime_config=model,
        skip_model_assets=True,
    )
    router = dynamo.KvRouter(endpoint, size, dynamo.KvRouterConfig())
    await asyncio.sleep(1.5)

    async def answer(request: dict[str, Any]) -> Any:
        if request["ask"] == "status":
            return await host.status()
        tokens = request["query"]["token_ids"]
        if request["ask"] == "hint":
            seen.clear()
            rank = request["query"]["worker"] - 1
            stream = await router.generate(tokens, "dummy", worker_id=endpoint.connection_id(), dp_rank=rank)
            async for _ in stream:
                pass
            return seen[0].get("kv_hint")
        scores = await router.get_overlap_scores(tokens)
        return blocks([{**worker, "worker_id": worker["dp_rank"] + 1} for worker in scores["workers"]])

    await serve(answer)
    del serving, owner
    sys.stdout.flush()
    os._exit(0)  # the runtime's own threads do not end


if __name__ == "__main__":
    asyncio.run({"selection": selection, "agent": agent}[sys.argv[1]](json.loads(sys.argv[2])))
