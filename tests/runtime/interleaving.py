"""Run a call and let another thread's code cut in before any one of its bytecodes: each interleaving, every time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kvcr_actors.runtime.bell

_WATCHED = (str(Path(kvcr_actors.runtime.bell.__file__).parent), str(Path(__file__).parent))

_STEPS = 2_000


class CutIn:
    """Runs `intruder` once: before bytecode number `step` of what is called, or when told to before that."""

    def __init__(self, step: int, intruder: Callable[[], None]) -> None:
        self.done = False
        self.reached = False
        self._step = step
        self._intruder = intruder
        self._seen = 0

    def now(self) -> None:
        if not self.done:
            self.done = True
            self._intruder()

    def during(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        # CPython 3.12 traces opcodes only if a frame asked for it before the tracer was set.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(_WATCHED):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self._seen == self._step:
                self.reached = True
                self.now()
            self._seen += 1
        return self._trace


def each_cut(scene: Callable[[int], CutIn]) -> int:
    """Play `scene` with the cut at step 0, 1, 2, … until the step does not exist; how many there were."""
    for step in range(_STEPS):
        if not scene(step).reached:
            return step
    raise AssertionError(f"the call has more than {_STEPS} steps")
