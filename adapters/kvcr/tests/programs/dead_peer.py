"""A hybrid lookup whose hinted source does not exist, in a process of its own: prints what came of it, as JSON."""

from __future__ import annotations

import json
import time

import anyio

from examples.two_workers.process import free_port
from kvcr_actors.core.keys import router_key
from kvcr_actors.errors import DeadlineError
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import AllPages, CacheLayout, PoolSpec, TrailingPages
from kvcr_actors_kvcr import FetchHint
from tests.pairs import side

HYBRID = CacheLayout((PoolSpec("kv", 2, 96, AllPages()), PoolSpec("mamba", 1, 7, TrailingPages(1))))


async def main() -> None:
    keys = chain("a", 4)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    error = ""
    try:
        async with side(
            HYBRID, operation_timeout_ms=1_000, abandon_timeout_ms=2_000, remote_wait_ms=1_500, close_wait_ms=15_000
        ) as one:
            one.store.begin_request("request", FetchHint(endpoint, frozenset(map(router_key, keys))).envelope("id"))
            started = time.monotonic()
            await one.lookup(keys)
            confirmed = await one.confirm(keys)
            seconds = time.monotonic() - started
            again = await one.lookup(keys)
            operations = one.store.describe()["operations"]
            one.store.end_request("request")
    except* DeadlineError as errors:
        error = str(errors.exceptions[0])
    print(
        json.dumps(
            {"confirmed": confirmed, "again": again, "operations": operations, "seconds": seconds, "error": error}
        )
    )


anyio.run(main)
