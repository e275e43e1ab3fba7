"""A worker in a process of its own, and how to speak to it."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

WORKER = Path(__file__).with_name("worker.py")


def free_port() -> int:
    """A port that was free a moment ago, outside the range from which systems deal ports to others."""
    while True:
        port = random.randrange(12_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class WorkerProcess:
    """Spoken to in JSON lines. Leaving the block kills it if it still runs, and shows its log.

    Without `wait` it may still be starting: ranks wait for each other, so start them all, then `wait_ready` for each.
    Once it has ended, `log` is its standard error, and `last` what it said last.
    """

    def __init__(self, *arguments: str, port: int | None = None, wait: bool = True, **options: Any) -> None:
        self.port = port or free_port()
        options = {"control_port": self.port, **options}
        command = [sys.executable, str(WORKER), "--options", json.dumps(options), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.log, self.last = "", dict[str, Any]()
        self.endpoint = ""
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until it takes orders."""
        self.endpoint = self.answer()["endpoint"]

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        runs = self.process.poll() is None
        if runs:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        _, log = self.process.communicate()
        if runs:
            print(f"the worker at port {self.port} did not quit; its log:\n{log}", file=sys.stderr)

    def send(self, **order: Any) -> None:
        """Give an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        """Give an order and wait for its answer."""
        self.send(do=do, **order)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def quit(self, timeout_s: float = 60.0) -> int:
        """Close the worker; its exit status."""
        words, self.log = self.process.communicate(json.dumps({"do": "quit"}) + "\n", timeout=timeout_s)
        answers = [line for line in words.splitlines() if line.startswith("{")]
        self.last = json.loads(answers[-1]) if answers else {}
        return self.process.returncode

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to an order."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return json.loads(line)
        _, self.log = self.process.communicate()
        raise RuntimeError(f"the worker ended with status {self.process.returncode}: {self.log}")
