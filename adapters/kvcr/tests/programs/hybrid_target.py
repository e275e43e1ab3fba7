"""A target of hybrid pages in a process of its own. `python hybrid_target.py SCENARIO ENDPOINT`; prints JSON.

dead      looks for a prefix at an endpoint where nobody is
pressed   its runner holds one page, and another request has claimed it
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import anyio

from kvcr_actors import AllPages, CacheLayout, DeadlineError, PageKey, PoolSpec, TrailingPages, router_key
from kvcr_actors.testing.store_driver import chain
from kvcr_actors_kvcr import FetchHint
from tests.pairs import Side, side

HYBRID = CacheLayout((PoolSpec("kv", 2, 96, AllPages()), PoolSpec("mamba", 1, 7, TrailingPages(1))))
SHORT = {"operation_timeout_ms": 1_000, "abandon_timeout_ms": 2_000, "remote_wait_ms": 1_500, "close_wait_ms": 15_000}


def begin(target: Side, request: str, endpoint: str, keys: tuple[PageKey, ...]) -> None:
    hint = FetchHint(endpoint, frozenset(map(router_key, keys)))
    target.store.begin_request(request, hint.envelope(request))


async def dead(target: Side, endpoint: str) -> dict[str, Any]:
    keys = chain("a", 4)
    begin(target, "request", endpoint, keys)
    await target.lookup(keys)
    confirmed = await target.confirm(keys)
    again = await target.lookup(keys)
    target.store.end_request("request")
    return {"confirmed": confirmed, "again": again}


async def pressed(target: Side, endpoint: str) -> dict[str, Any]:
    first, second = chain("a", 1), chain("b", 1)
    confirmed: list[bool] = []
    for request, keys in (("first", first), ("second", second)):
        begin(target, request, endpoint, keys)
        await target.lookup(keys, request)
        confirmed.append(await target.confirm(keys, request))
    promised = await target.lookup(second, "second")
    target.store.end_request("first")
    confirmed.append(await target.confirm(second, "second"))
    read = await target.read(second, [3], "second")
    target.store.end_request("second")
    return {"confirmed": confirmed, "promised": promised, "read": read}


async def main(scenario: str, endpoint: str) -> None:
    error, answer, seconds, state = "", dict[str, Any](), 0.0, dict[str, Any]()
    run, capacity = {"dead": (dead, 32), "pressed": (pressed, 1)}[scenario]
    try:
        async with side(HYBRID, capacity=capacity, align_storage_prefix=False, **SHORT) as target:
            started = time.monotonic()
            answer = await run(target, endpoint)
            seconds = time.monotonic() - started
            state = {"operations": target.store.describe()["operations"]}
    except* DeadlineError as errors:
        error = str(errors.exceptions[0])
    mapped = target.store.describe()["mapped_bytes"]
    print(json.dumps({**answer, **state, "seconds": seconds, "error": error, "mapped_bytes": mapped}))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
