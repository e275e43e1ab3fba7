"""The consumers as a test asks them: how many leading blocks of a prompt each worker has, down to each tier."""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

Depths: TypeAlias = tuple[int, int, int]
"""Blocks from the root that are in the device, that the host continues to, and that the store continues to."""

_ANSWER_S = 30.0
_MODEL = "m"


@attrs.frozen
class Worker:
    """A publisher as consumers know it."""

    id: int
    events: str
    replay: str
    control: str = "tcp://192.0.2.1:23280"
    """Where its store would serve pages to peers."""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class Indexer:
    """`python -m dynamo.indexer`: ZMQ and replays in, HTTP out."""

    def __init__(self, interpreter: str, workers: Sequence[Worker], block_size: int) -> None:
        self._block_size = block_size
        (port,) = free_ports(1)
        self._url = f"http://127.0.0.1:{port}"
        command = [interpreter, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._is_up, "the indexer to answer")
        for worker in workers:
            self._call(
                "/register",
                {
                    "instance_id": worker.id,
                    "endpoint": worker.events,
                    "replay_endpoint": worker.replay,
                    "model_name": _MODEL,
                    "block_size": block_size,
                },
            )

    def depths(self, tokens: Sequence[int], **names: str) -> dict[int, Depths]:
        answer = self._call("/query", {"token_ids": list(tokens), "model_name": _MODEL, **names})
        size = self._block_size
        return {
            int(worker): (tier["gpu"] // size, tier["cpu"] // size, tier["disk"] // size)
            for worker, tier in answer["instances"].items()
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=1):  # noqa: S310 - it is http
                return True
        except OSError:
            return False

    def _call(self, path: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"content-type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310
            return json.loads(answer.read() or b"null")


class Child:
    """A consumer of `consumers.py`, in a process of its own."""

    def __init__(self, kind: str, interpreter: str, workers: Sequence[Worker], block_size: int) -> None:
        config = json.dumps({"block_size": block_size, "workers": [attrs.asdict(worker) for worker in workers]})
        command = [interpreter, str(Path(__file__).with_name("consumers.py")), kind, config]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        assert self._answer() == "ready"

    def ask(self, what: str, **query: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ask": what, "query": query}) + "\n")
        return self._answer()

    def depths(self, tokens: Sequence[int], **names: str) -> dict[int, Depths]:
        answer = self.ask("overlap", token_ids=list(tokens), **names)
        return {int(worker): (tiers[0], tiers[1], tiers[2]) for worker, tiers in answer.items()}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait(5)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(_ANSWER_S), f"no answer within {_ANSWER_S:g} s"
        line = self._process.stdout.readline()
        assert line, f"the consumer ended with {self._process.poll()}"
        return json.loads(line)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = _ANSWER_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)
