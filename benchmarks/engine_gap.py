"""What an engine feels of the host tier: a scheduler loop with overlap, with the tier off and in three forms.

128 lanes of 16 turns decode through one CUDA graph a step. The next step is launched before the last one's results are
handled, in Python, for about three quarters of a step; every eighth step 64 requests finish. Arms, with equal bytes:

- `off` (twice a repetition: the difference of the two is the noise)
- `node`: the product inline, one submit a node, as engines did before batching
- `thread`: the product in its thread, one submit a step
- `inline`: the product inline, one submit a step

    python -m benchmarks.engine_gap --json engine_gap.json
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any

import attrs
import torch

from benchmarks.engine_model import LANES, SCRATCH_NODES, SETS, DecodeModel
from benchmarks.gpu_rig import STAGING
from kvcr_actors.controller import CacheController
from kvcr_actors.core.keys import chain_seed, page_key
from kvcr_actors.devices.cuda import CudaDevice
from kvcr_actors.devices.cuda_runtime import CudaRuntime
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.messages import BackupAck, Completion, PrefetchReady, RestoreFinished
from kvcr_actors.types import BackupNode, PageKey, PrefetchRequest, RestoreOrder, TrailingPages

TURNS = 16
BURST = 64
BURST_EVERY = 8
FINISH_S = 25e-6
"""The scheduler's own work for a request that finishes."""
HOST_SLOTS = 1536
ARMS = ("off", "off again", "node", "thread", "inline")


@attrs.define
class Outcome:
    """One run of one arm."""

    tokens_s: float = 0.0
    stall_us: float = 0.0
    """Median over the steps in which 64 requests finish: from the step's end on the GPU to the next launch."""
    idle_us: float = 0.0
    """Median over the same steps: how long the GPU stood idle behind the running step."""
    finish_us: float = 0.0
    """Mean on the scheduler thread for a request that finishes, all included."""
    most_open: int = 0
    """The most steps whose backups were under way at a time."""
    waits: int = 0
    """How often the scheduler waited for backups, because the next pages were still being read."""
    submits: int = 0
    bytes: int = 0
    restored: int = 0
    mismatches: int = 0
    lost_us: list[float] = attrs.field(factory=list[float])
    """For each step of the eight, from the burst's on: how much longer a step took than a bare one, median."""
    mean_us: list[float] = attrs.field(factory=list[float])
    """The same as a mean: what single long steps cost shows here."""
    work_us: list[float] = attrs.field(factory=list[float])
    """For each step of the eight: the scheduler's own work as it came out, median."""
    stalls_us: list[float] = attrs.field(factory=list[float])
    """Every stall."""
    slow: list[tuple[int, float]] = attrs.field(factory=list[tuple[int, float]])
    """Steps that took over 300 us longer than a bare one: which of the eight, and by how much (us)."""


class Scheduler:
    """The synchronous loop of an engine; `work_s` is its own Python work a step."""

    def __init__(
        self,
        model: DecodeModel,
        nodes: Sequence[Sequence[BackupNode]],
        work_s: float,
        controller: CacheController | None,
        arm: str,
    ) -> None:
        self._model = model
        self._nodes = nodes
        self._work_s = work_s
        self._controller = controller
        self._arm = arm
        self._steps = TURNS * LANES // BURST * BURST_EVERY
        self._begins = [torch.cuda.Event(enable_timing=True) for _ in range(self._steps)]
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(self._steps)]
        self._turns = torch.zeros(LANES, dtype=torch.int64)
        self._born = torch.zeros(LANES, dtype=torch.int64)
        self._open: deque[int] = deque()
        self.waits = 0

    def run(self) -> Outcome:
        """Run all turns; what the cache does beside it must not show."""
        launched: list[tuple[int, float]] = []
        worked: list[float] = []
        finish_s, most_open = 0.0, 0
        torch.cuda.synchronize()
        zero = torch.cuda.Event(enable_timing=True)
        zero.record()
        zero.synchronize()
        zero_s = perf_counter()
        started = perf_counter()
        self._launch(0)
        for step in range(self._steps):
            if step + 1 < self._steps:
                if step and step % BURST_EVERY == 0:
                    launched.append((step - 1, perf_counter() - zero_s))
                self._launch(step + 1)
            self._ends[step].synchronize()
            woke_s = perf_counter()
            _work(self._work_s)
            worked.append((perf_counter() - woke_s) * 1e6)
            if self._controller is not None:
                if self._arm != "thread":
                    self._controller.pump(8)
                most_open = max(most_open, len(self._open))
                _take_acks(self._controller.take(), self._open)
            if step % BURST_EVERY == BURST_EVERY - 1:
                before = perf_counter()
                self._finish(step)
                finish_s += perf_counter() - before
        torch.cuda.synchronize()
        elapsed = perf_counter() - started
        bursts = range(BURST_EVERY - 1, self._steps - 2, BURST_EVERY)
        gaps = [self._ends[step + 1].elapsed_time(self._begins[step + 2]) * 1e3 for step in bursts]
        # From the GPU's own end of the step, since the host may notice it late.
        stalls = [at_s * 1e6 - zero.elapsed_time(self._ends[step]) * 1e3 for step, at_s in launched]
        began = [self._begins[0].elapsed_time(begin) * 1e3 for begin in self._begins]
        steps_us = [later - earlier for earlier, later in pairwise(began)]
        lost_us = [step_us - self._model.step_ms * 1e3 for step_us in steps_us]
        phases = [lost_us[BURST_EVERY - 1 + phase :: BURST_EVERY] for phase in range(BURST_EVERY)]
        return Outcome(
            lost_us=[median(phase) for phase in phases],
            mean_us=[fmean(phase) for phase in phases],
            slow=[((step + 1) % BURST_EVERY, round(lost)) for step, lost in enumerate(lost_us) if lost > 300],
            work_us=[median(worked[BURST_EVERY - 1 + phase :: BURST_EVERY]) for phase in range(BURST_EVERY)],
            stalls_us=stalls,
            tokens_s=LANES * self._steps / elapsed,
            stall_us=median(stalls),
            idle_us=median(gaps),
            most_open=most_open,
            waits=self.waits,
            finish_us=finish_s / (TURNS * LANES) * 1e6,
        )

    def _launch(self, step: int) -> None:
        """Launch a step; lanes whose turn ended with the step before write into their next pages."""
        if step % BURST_EVERY == 0:
            if step:
                lanes = torch.arange((step // BURST_EVERY - 1) % 2, LANES, 2)
                self._turns[lanes] += 1
                self._born[lanes] = step
            self._model.begin(self._turns, step - self._born)
        self._begins[step].record()
        self._model.graph.replay()
        self._ends[step].record()

    def _finish(self, step: int) -> None:
        """Half of the lanes end a turn in this step: their nodes are backed up behind the step's end."""
        controller, burst, fence = self._controller, step // BURST_EVERY, self._ends[step]
        if controller is not None and len(self._open) > SETS - 2:
            self._wait_for_pages(controller)
        for lane in range(burst % 2, LANES, 2):
            _work(FINISH_S)
            if controller is not None:
                controller.write(self._nodes[lane][burst // 2], flush=False)
                if self._arm == "node":
                    controller.flush_pending_backups(fence)
                    controller.pump(4)
        if controller is not None and self._arm != "node":
            number = controller.flush_pending_backups(fence)
            if number is not None:
                self._open.append(number)
            if self._arm == "inline":
                controller.pump(4)

    def _wait_for_pages(self, controller: CacheController) -> None:
        """The lanes' next pages are still being backed up: an engine without free pages waits, and it counts."""
        self.waits += 1
        while len(self._open) > SETS - 2:
            if not controller.wait(30):
                raise RuntimeError(f"the backups of steps {list(self._open)} do not end")
            _take_acks(controller.take(), self._open)


def check_restores(
    controller: CacheController, model: DecodeModel, nodes: Sequence[Sequence[BackupNode]]
) -> tuple[int, int]:
    """Restore the last turn of 64 lanes into scratch pages, and compare with the lanes' pages: (nodes, mismatches)."""
    lanes = range(0, LANES, LANES // SCRATCH_NODES)
    for lane in lanes:
        controller.prefetch(PrefetchRequest(lane, nodes[lane][TURNS - 1].keys))
    controller.flush_pending_backups()
    waiting = set(lanes)
    restored: list[int] = []
    while waiting and controller.wait(30):
        for completion in controller.take():
            match completion:
                case PrefetchReady(request_id=int() as lane, account=None):
                    controller.restore(RestoreOrder(lane, 0, model.scratch_pages(lanes.index(lane))))
                case RestoreFinished(request_id=int() as lane, pages=pages):
                    waiting.discard(lane)
                    restored += [lane] if pages == len(nodes[lane][0].keys) else []
                case PrefetchReady(request_id=int() as lane):
                    waiting.discard(lane)
                case _:
                    pass
        controller.flush_pending_backups(torch.cuda.current_stream())
    torch.cuda.synchronize()
    differing = [model.differing_pools(lane * SETS + (TURNS - 1) % SETS, lanes.index(lane)) for lane in restored]
    if any(differing):
        print("restored bytes differ:", differing[:3])
    return len(restored), sum(map(bool, differing))


def run_arm(arm: str, model: DecodeModel, host: HostPools, work_s: float, repetition: int) -> Outcome:
    """One run of one arm on fresh keys."""
    gc.collect()
    gc.freeze()  # as engines do once they are loaded
    nodes = [[_node(lane, turn, repetition, arm) for turn in range(TURNS)] for lane in range(LANES)]
    if arm.startswith("off"):
        return Scheduler(model, nodes, work_s, None, arm).run()
    threaded = arm == "thread"
    planes = [pool.unbind(0) for pool in model.pools]
    device = CudaDevice(
        host.layout,
        planes,
        host,
        layers=model.shape.layers,
        staging_bytes=STAGING,
        launch_on_caller=not threaded,
    )
    controller = CacheController(device=device, host="thread" if threaded else "inline")
    with controller:
        outcome = Scheduler(model, nodes, work_s, controller, arm).run()
        controller.wait_quiet(60)
        _take_acks(controller.take(), deque())
        outcome.submits = controller.stats.backup.submits
        outcome.bytes = controller.stats.backup.bytes
        outcome.restored, outcome.mismatches = check_restores(controller, model, nodes)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--work-share", type=float, default=0.75)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    arms = options.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    if arms[0] != "off":
        parser.error("--arms: begin with 'off', which the others are compared with")
    model = DecodeModel(options.step_ms)
    layout = attrs.evolve(
        model.shape.layout,
        pools=tuple(
            attrs.evolve(pool, policy=policy)
            for pool, policy in zip(
                model.shape.layout.pools,
                (model.shape.layout.pools[0].policy, TrailingPages(2), TrailingPages(1)),
                strict=True,
            )
        ),
    )
    host = HostPools(layout, HOST_SLOTS, registrar=CudaRuntime(model.device))
    work_s = model.step_ms * 1e-3 * options.work_share
    print(f"{torch.cuda.get_device_name()}, step {model.step_ms:.2f} ms, scheduler work {work_s * 1e3:.2f} ms a step")
    for arm in arms:
        run_arm(arm, model, host, work_s, -1)  # warm-up
    results: dict[str, list[Outcome]] = {arm: [] for arm in arms}
    for repetition in range(options.repetitions):
        for arm in arms[repetition % len(arms) :] + arms[: repetition % len(arms)]:
            results[arm].append(run_arm(arm, model, host, work_s, repetition))
    _report(results)
    if options.json:
        plain: dict[str, Any] = {arm: [attrs.asdict(run) for run in runs] for arm, runs in results.items()}
        options.json.write_text(json.dumps({"step_ms": model.step_ms, "work_s": work_s, "arms": plain}, indent=1))


def _report(results: dict[str, list[Outcome]]) -> None:
    print(
        "| arm | tokens/s | gap to off, median | gap, each | stall, us | GPU idle, us | a finished request, us | "
        "most open | submits | GiB | restored, wrong |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    base = results["off"]
    for arm, runs in results.items():
        gaps = [(1 - run.tokens_s / off.tokens_s) * 100 for run, off in zip(runs, base, strict=True)]
        print(
            f"| {arm} | {median(run.tokens_s for run in runs):,.0f} | {median(gaps):.2f} % | "
            f"{', '.join(f'{gap:.2f}' for gap in gaps)} | {median(run.stall_us for run in runs):,.0f} | "
            f"{median(run.idle_us for run in runs):,.0f} | {median(run.finish_us for run in runs):.1f} | "
            f"{max(run.most_open for run in runs)} | {runs[-1].submits} | {runs[-1].bytes / (1 << 30):.2f} | "
            f"{sum(run.restored for run in runs)}, {sum(run.mismatches for run in runs)} |"
        )
    for arm, runs in results.items():
        for name, lists in (("median", [run.lost_us for run in runs]), ("mean", [run.mean_us for run in runs])):
            phases = [f"{fmean(phase):,.0f}" for phase in zip(*lists, strict=True)]
            print(f"{arm}: us more than a bare step, from the burst's step on, {name}:", *phases)
        worked = [f"{median(phase):,.0f}" for phase in zip(*(run.work_us for run in runs), strict=True)]
        print(f"{arm}: us of the scheduler's own work a step, from the burst's step on:", *worked)


def _node(lane: int, turn: int, repetition: int, arm: str) -> BackupNode:
    parent = chain_seed(salt=f"{arm} {repetition}")
    keys: list[PageKey] = []
    for token in (lane * TURNS + turn, 1, 2, 3):
        parent = page_key(parent, (token,))
        keys.append(parent)
    return BackupNode(lane * TURNS + turn + 1, tuple(keys), DecodeModel.node_pages(lane, turn))


def _take_acks(completions: Sequence[Completion], open_steps: deque[int]) -> None:
    for completion in completions:
        if isinstance(completion, BackupAck):
            if completion.failed:
                raise RuntimeError(f"nodes were not backed up: {completion.failed[:3]}")
            if completion.step in open_steps:
                open_steps.remove(completion.step)


def _work(seconds: float) -> None:
    """The scheduler's own work: Python for so much CPU time of its thread, whoever else wants the GIL.

    Neither waiting for the GIL nor a change of the host's clock speed makes it less or more.
    """
    end = thread_time() + seconds
    while thread_time() < end:
        _turn_over(400)


def _turn_over(turns: int) -> None:
    table: dict[int, int] = {}
    for turn in range(turns):
        table[turn & 255] = turn


if __name__ == "__main__":
    main()
