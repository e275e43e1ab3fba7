"""A forked child has a copy of its parent's controller and none of the threads behind it: every method says so."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from kvcr_actors.aio import AsyncController
from kvcr_actors.controller import CacheController
from kvcr_actors.core.inventory import TierCleared
from kvcr_actors.testing.store_driver import chain
from kvcr_actors.types import BackupNode, PrefetchRequest, RestoreOrder, Tier
from tests.doors import Ports

NODE = BackupNode(1, chain("a", 1), ((0,), (0,)))
REQUEST = PrefetchRequest("r", chain("a", 1))
ORDER = RestoreOrder("r", 0, ((0,), (0,)))
SENTENCE = f"belongs to process {os.getpid()}; make a new one after a fork"


def in_a_child(calls: dict[str, Callable[[], object]]) -> list[str]:
    """The names of the calls that did not say in a forked child what they must."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        silent: list[str] = []
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                if SENTENCE in str(error):
                    continue
            except BaseException:  # noqa: BLE001, S110 - named below
                pass
            silent.append(name)
        os.write(write, "\n".join([*silent, "over"]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as answer:
        names = answer.read().split("\n")
    os.waitpid(child, 0)
    assert names.pop() == "over"
    return names


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("host", ["thread", "inline"])
def test_every_method_of_the_synchronous_door_refuses_in_a_forked_child(host: Any) -> None:
    ports = Ports()
    with CacheController(host=host, **ports.arguments) as cache:
        write = cache.write
        calls: dict[str, Callable[[], object]] = {
            "start": cache.start,
            "write": lambda: write(NODE, flush=False),
            "flush": cache.flush_pending_backups,
            "prefetch": lambda: cache.prefetch(REQUEST),
            "restore": lambda: cache.restore(ORDER),
            "cancel": lambda: cache.cancel("r"),
            "stop_prefetch": lambda: cache.stop_prefetch("r"),
            "publish": lambda: cache.publish([TierCleared(Tier.DEVICE)]),
            "take": cache.take,
            "wait": lambda: cache.wait(0.0),
            "wait_restores_submitted": cache.wait_restores_submitted,
            "write_back": lambda: cache.write_back([NODE]),
            "wait_quiet": lambda: cache.wait_quiet(1.0),
            "attach_store": lambda: cache.attach_store(ports.store, 1.0),  # type: ignore[arg-type]
            "detach_store": lambda: cache.detach_store(1.0),
            "checkpoint": lambda: cache.checkpoint("x", 1.0),
            "clear_host": lambda: cache.clear_host(1.0),
            "reset": lambda: cache.reset("x", clear=True),
            "describe": lambda: cache.describe(1.0),
            "host_contents": lambda: cache.host_contents(1.0),
            "close": cache.close,
        }
        assert in_a_child(calls) == []
        assert cache.write_back([NODE]).node_ids == (1,)  # the parent goes on


@pytest.mark.parametrize("host", ["thread", "inline"])
def test_a_start_after_the_close_says_to_make_a_new_one(host: Any) -> None:
    cache = CacheController(host=host, **Ports().arguments)
    with cache:
        pass
    with pytest.raises(RuntimeError, match="was started or closed already, and runs once; make a new one"):
        cache.start()


def test_every_method_of_the_asynchronous_door_refuses_in_a_forked_child() -> None:
    async def main() -> None:
        ports = Ports()
        cache = await AsyncController(**ports.arguments).start()

        def awaited(call: Callable[[], Any]) -> Callable[[], object]:
            return lambda: call().send(None)  # up to its first wait: there is no loop of the child's own

        calls: dict[str, Callable[[], object]] = {
            "start": awaited(cache.start),
            "backup": awaited(lambda: cache.backup([NODE])),
            "prefetch": awaited(lambda: cache.prefetch(REQUEST)),
            "restore": awaited(lambda: cache.restore(ORDER)),
            "cancel": lambda: cache.cancel("r"),
            "stop_prefetch": lambda: cache.stop_prefetch("r"),
            "publish": lambda: cache.publish([TierCleared(Tier.DEVICE)]),
            "wait_quiet": awaited(cache.wait_quiet),
            "wait_restores_submitted": awaited(cache.wait_restores_submitted),
            "attach_store": awaited(lambda: cache.attach_store(ports.store)),  # type: ignore[arg-type]
            "detach_store": awaited(cache.detach_store),
            "checkpoint": awaited(lambda: cache.checkpoint("x")),
            "reset": awaited(lambda: cache.reset("x", clear=True)),
            "close": awaited(cache.close),
        }
        assert in_a_child(calls) == []
        assert (await cache.backup([NODE])).node_ids == (1,)
        await cache.close()

    anyio.run(main)
