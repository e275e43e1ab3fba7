"""A rank in a process of its own: it does what the test tells it over a pipe, each command in a task."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from kvcr_actors.core.rounds import RoundShape
from kvcr_actors.ports import RankTerms


class Rank:
    """The commands."""

    def __init__(self, port: int) -> None:
        from kvcr_actors.testing.services import RecordingServices

        self._port = port
        self._services_type = RecordingServices
        self._store: Any = None
        self._ranks: Any = None
        self._calls: dict[str, asyncio.Task[int]] = {}
        self.threads: Counter[str] = Counter()

    async def open(self, group: str, rank: int, size: int, deadline_s: float, **more: Any) -> None:
        import torch.distributed as dist

        from kvcr_actors.ranks.torch_distributed import TorchDistributedRanks

        self._note_threads()
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", self._port, is_master=False)
        shape = RoundShape(*more.get("shape", (8, 2)))
        self._ranks = TorchDistributedRanks(
            rank, size, dist.PrefixStore(group, self._store), shape=shape, start_deadline_s=more.get("start_s", 30.0)
        )
        self.threads.clear()
        services = self._services_type(asyncio)  # type: ignore[arg-type] - the ranks spawn nothing
        await self._ranks.open(services, RankTerms(deadline_s, more.get("settings", {})))

    def _note_threads(self) -> None:
        from kvcr_actors.ranks import _gloo

        gather, threads = _gloo.GlooGroup.gather, self.threads

        def noted(group: Any, mine: bytes, goes_on: Any) -> list[bytes]:
            threads[threading.current_thread().name] += 1
            return gather(group, mine, goes_on)

        if gather.__name__ != "noted":
            _gloo.GlooGroup.gather = noted  # type: ignore[method-assign]

    async def agree(self, name: str, bits: int, after_s: float = 0.0) -> int:
        await asyncio.sleep(after_s)
        return await self._ranks.agree(("test", name), bits)

    async def agree_all(self, pairs: list[tuple[str, int]]) -> list[int]:
        return list(await asyncio.gather(*(self._ranks.agree(("test", name), bits) for name, bits in pairs)))

    async def start(self, name: str, bits: int) -> None:
        """Agree in the background, for `revoke`."""
        self._calls[name] = asyncio.create_task(self._ranks.agree(("test", name), bits))
        await asyncio.sleep(0)

    async def revoke(self, name: str) -> None:
        self._calls[name].cancel()
        await asyncio.wait([self._calls.pop(name)])

    async def state(self) -> dict[str, Any]:
        return {**self._ranks.describe(), "threads": dict(self.threads)}

    async def close(self, deadline_s: float = 10.0) -> None:
        await self._ranks.close(deadline_s)

    async def freeze(self) -> None:
        """Stop the whole process until SIGCONT."""
        os.kill(os.getpid(), signal.SIGSTOP)

    async def die(self) -> None:
        os._exit(1)


async def _serve(conn: Connection, port: int) -> None:
    loop = asyncio.get_running_loop()
    rank = Rank(port)
    done = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def run(number: int, command: str, arguments: dict[str, Any]) -> None:
        try:
            result = await getattr(rank, command)(**arguments)
        except Exception as error:  # noqa: BLE001 - the test raises it
            conn.send((number, None, f"{type(error).__name__}: {error}"))
        else:
            conn.send((number, result, None))

    def start(number: int, command: str, arguments: dict[str, Any]) -> None:
        task = loop.create_task(run(number, command, arguments))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(start, *conn.recv())
        except EOFError:
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=read, daemon=True).start()
    import torch.distributed  # noqa: F401 - before the test's clock runs

    conn.send((0, os.getpid(), None))
    await done.wait()
    os._exit(0)


def main(conn: Connection, port: int) -> None:
    """The process."""
    asyncio.run(_serve(conn, port))
