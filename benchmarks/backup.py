# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What a backup or a restore costs on this GPU, with the product's own code; every way is checked byte by byte first.

python -m benchmarks.backup ways fragments restore submits neighbours idle trace [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.backup_beside import idle, neighbours
from benchmarks.gpu_rig import BOTH, MIB, NODES, Limit, Row, hybrid_shape, open_rig, uniform_shape
from kvcr_actors.core.copy_plan import Direction


async def ways() -> list[Row]:
    """One step of 64 nodes, by number of submits."""
    rows: list[Row] = []
    shape = hybrid_shape()
    limit = Limit(NODES * shape.node_bytes())
    async with open_rig(shape, NODES) as rig:
        for direction, name in BOTH:
            best = limit.measure(direction, 11)
            for by in ("node and pool", "node", "pool", "step"):
                plans = rig.plans(direction, NODES, by=by)
                timing = await rig.measure(plans, 11 if by == "step" else 5)
                again = limit.measure(direction, 11)
                rows.append(
                    {
                        "direction": name,
                        "one submit a": by,
                        "submits": len(plans),
                        "caller us": round(timing.caller_us),
                        "launching thread us": round(timing.launch_us),
                        "GB/s": round(timing.device_gbs, 1),
                        "of the limit": f"{timing.device_gbs / again.device_gbs:.1%}",
                        "GB/s, idle, call to outcome": round(timing.wall_gbs, 1),
                    }
                )
            rows.append(
                {
                    "direction": name,
                    "one submit a": "(limit: one contiguous copy)",
                    "submits": 1,
                    "caller us": round(best.caller_us),
                    "launching thread us": "",
                    "GB/s": round(best.device_gbs, 1),
                    "of the limit": "100%",
                    "GB/s, idle, call to outcome": round(best.wall_gbs, 1),
                }
            )
    limit.close()
    return rows


async def fragments() -> list[Row]:
    """The same step over scattered host runs."""
    rows: list[Row] = []
    shape = hybrid_shape()
    limit = Limit(NODES * shape.node_bytes())
    async with open_rig(shape, NODES, spread=3) as rig:
        for direction, name in BOTH:
            for label, size in (
                ("one a pool", 0),
                ("16 MiB", 16 * MIB),
                ("4 MiB", 4 * MIB),
                ("1 MiB", MIB),
                ("a page", 1),
            ):
                run_pages = [max(1, round(size / pool.page_bytes)) for pool in shape.layout.pools] if size else ()
                plans = rig.plans(direction, NODES, run_pages=run_pages)
                timing = await rig.measure(plans, 9)
                best = limit.measure(direction, 9)
                rows.append(
                    {
                        "direction": name,
                        "host runs of": label,
                        "runs": sum(len(list(copy.runs())) for copy in plans[0].pools),
                        "launching thread us": round(timing.launch_us),
                        "GB/s": round(timing.device_gbs, 1),
                        "of the limit": f"{timing.device_gbs / best.device_gbs:.1%}",
                        "GB/s, idle, call to outcome": round(timing.wall_gbs, 1),
                    }
                )
    limit.close()
    return rows


async def restore() -> list[Row]:
    """Layer-wise restores by shape, host runs and number of groups."""
    rows: list[Row] = []
    for shape, fragment in ((hybrid_shape(), 0), (hybrid_shape(), MIB), (uniform_shape(), 0), (uniform_shape(), MIB)):
        limit = Limit(NODES * shape.node_bytes())
        async with open_rig(shape, NODES, spread=3) as rig:
            for groups in (1, 4, 6, 8, 12, 42):
                rig.set_groups(groups)
                run_pages = [max(1, round(fragment / pool.page_bytes)) for pool in shape.layout.pools]
                plan = rig.plans(Direction.TO_DEVICE, NODES, run_pages=run_pages if fragment else ())[0]
                await rig.check([plan])
                rig.launch_us.clear()
                times = [await rig.group_seconds(plan) for _ in range(9)]
                first, last = median(pair[0] for pair in times), median(pair[1] for pair in times)
                best = limit.measure(Direction.TO_DEVICE, 9)
                rows.append(
                    {
                        "shape": f"{shape.name}, {limit.size // MIB} MiB",
                        "host runs": "1 MiB" if fragment else "one a pool",
                        "groups": groups,
                        "launching thread us": round(median(rig.launch_us)),
                        "first group ms": round(first * 1e3, 2),
                        "all ms": round(last * 1e3, 2),
                        "first of all": f"{first / last:.0%}",
                        "GB/s": round(limit.size / last / 1e9, 1),
                        "of the limit": f"{limit.size / last / 1e9 / best.device_gbs:.1%}",
                    }
                )
        limit.close()
    return rows


async def submits() -> list[Row]:
    """The submit counter, slices and the caller's time over steps of 1 to 256 nodes; both directions checked."""
    rows: list[Row] = []
    async with open_rig(hybrid_shape(), 256) as rig:
        for nodes in (1, 4, 16, 64, 256):
            for direction, name in BOTH:
                plan = rig.plans(direction, nodes)[0]
                await rig.check([plan])
                before = rig.copier.submits
                outcome = await rig.copier.submit(plan).outcome()
                counted = rig.copier.submits - before
                timing = await rig.measure([plan], 7)
                rows.append(
                    {
                        "nodes": nodes,
                        "direction": name,
                        "MiB": round(plan.bytes_for(rig.shape.layout) / MIB),
                        "submits": counted,
                        "slices": outcome.slices,
                        "caller us": round(timing.caller_us, 1),
                        "launching thread us": round(timing.launch_us),
                        "GB/s": round(timing.device_gbs, 1),
                    }
                )
    return rows


async def trace() -> list[Row]:
    """What the profiler sees of one submit: kernels and copies by kind."""
    rows: list[Row] = []
    async with open_rig(hybrid_shape(), 256, staging_bytes=1400 * MIB) as rig:
        for nodes in (1, 16, 64, 256):
            for direction, name in BOTH:
                plan = rig.plans(direction, nodes)[0]
                await rig.copier.submit(plan).outcome()
                activities = [torch.profiler.ProfilerActivity.CUDA]
                before = rig.copier.submits
                with torch.profiler.profile(activities=activities) as profile:
                    await rig.copier.submit(plan).outcome()
                    torch.cuda.synchronize()
                on_device = [event.name for event in profile.events() or () if "cuda" in str(event.device_type).lower()]
                seen = Counter(name.split(" (")[0] for name in on_device if "Sync" not in name)
                rows.append(
                    {"nodes": nodes, "direction": name, "submits": rig.copier.submits - before, "seen": dict(seen)}
                )
    return rows


SECTIONS: dict[str, Callable[[], Coroutine[Any, Any, list[Row]]]] = {
    "ways": ways,
    "fragments": fragments,
    "restore": restore,
    "submits": submits,
    "neighbours": neighbours,
    "idle": idle,
    "trace": trace,
}


def table(rows: list[Row]) -> str:
    """Rows as a Markdown table."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> Row:
    """Where and with what the figures were taken."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=list(SECTIONS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    print(results["machine"], flush=True)
    for name in arguments.sections:
        begin = time.perf_counter()
        results[name] = asyncio.run(SECTIONS[name]())
        torch.cuda.empty_cache()
        print(f"\n## {name} ({time.perf_counter() - begin:.0f} s)\n\n{table(results[name])}", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
