"""Memory that native code may still touch though its operation has ended: counted, and kept until it is quiet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcr.types import OpHandle

from kvcr_actors_kvcr.jobs import Job, Wait


class Quarantine:
    """Operations whose memory is not quiet. On the owner thread; `bytes` may be read on any.

    `settle` is called with a job that is over once all of its memory is quiet.
    """

    def __init__(self, settle: Callable[[Job[Any]], None]) -> None:
        self.bytes = 0
        self._settle = settle
        self._uncertain: set[OpHandle] = set()
        self._kept: dict[OpHandle, Job[Any]] = {}

    def doubt(self, handle: OpHandle) -> None:
        """The runner is not sure of an operation that it is about to report."""
        self._uncertain.add(handle)

    def is_doubted(self, handle: OpHandle) -> bool:
        """Whether an operation that ends now leaves memory that may still be written."""
        return handle in self._uncertain

    def keep(self, wait: Wait, job: Job[Any]) -> None:
        """Keep the memory of an operation that has ended."""
        job.hazards[wait.handle] = wait.size
        self.bytes += wait.size
        self._kept[wait.handle] = job

    def end(self, handle: OpHandle) -> None:
        """The memory of an operation is quiet."""
        self._uncertain.discard(handle)
        job = self._kept.pop(handle, None)
        if job is not None:
            self.bytes -= job.hazards.pop(handle)
            if job.over and not job.hazards:
                self._settle(job)

    def end_all(self) -> None:
        """The runner is closed, and all memory quiet."""
        for handle in list(self._kept):
            self.end(handle)
