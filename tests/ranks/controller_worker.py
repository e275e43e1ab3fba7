"""A rank that is a whole controller in a process of its own: `python -m tests.ranks.controller_worker PORT`.

It reads lives from its input, one line of JSON each, and reports each in one line of its output. The main thread is the
engine's scheduler thread.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kvcr_actors.logs import configure_logging
from kvcr_actors.ranks.torch_distributed import TorchDistributedRanks
from kvcr_actors.testing.invariants import check_invariants
from kvcr_actors.testing.store_driver import chain
from tests.ranks import counted_gloo
from tests.ranks.lives import Life
from tests.ranks.planted_faults import planted
from tests.ranks.scripted_scheduler import Scheduler

IDLE_S = 0.05


def live(life: Life, store: dist.TCPStore, meetings: dist.TCPStore) -> dict[str, Any]:
    """One life from start to close, and what can be told of it."""
    counted_gloo.forget()
    with planted(life.planted):
        scheduler = Scheduler(life, store, meetings)
        scheduler.controller.start()
        scheduler.follow_script()
        wait_for(lambda: not scheduler.controller.claims.open and is_idle(scheduler.ranks), life.settle_s)
        report = tell_state(scheduler)
        scheduler.guard(lambda: scheduler.meet("end", life.survivors))
        started = time.monotonic()
        scheduler.guard(scheduler.controller.close)
        scheduler.take()
        scheduler.guard(lambda: check(scheduler))
    wait_for(lambda: not threads_of_controllers(), life.settle_s)
    return report | {
        "nodes": scheduler.nodes,
        "lengths": scheduler.lengths,
        "endings": scheduler.endings,
        "left_out": scheduler.left_out,
        "trouble": scheduler.trouble,
        "close_s": time.monotonic() - started,
        "threads_left": threads_of_controllers(),
    }


def tell_state(scheduler: Scheduler) -> dict[str, Any]:
    """What stands and what was called, while the controller runs; then host memory is emptied."""
    controller, claims = scheduler.controller, scheduler.controller.claims
    host = controller._assembly.host
    names = {key: f"{name}{index}" for name in "abcdefgh" for index, key in enumerate(chain(name, 12))}
    held = sorted(names[key] for key in controller.host_contents())
    scheduler.guard(lambda: controller.clear_host(scheduler.life.patience_s))
    calls = counted_gloo.calls
    return {
        "rank": scheduler.life.rank,
        "pid": os.getpid(),
        "host": held,
        "slots_in_use": [arena.slots - arena.free_slots for arena in host._slots.arenas],
        "claims": {
            "taken": claims.taken,
            "released": claims.released,
            "open": [repr(one) for one in claims.open_claims()],
            "refused": claims.refused,
            "quarantined_bytes": claims.quarantined_bytes,
        },
        "ranks": scheduler.ranks.describe(),
        "collectives": [[kind, size, number] for (kind, size), number in calls.collectives.items()],
        "threads": [[name, ident, number] for (name, ident), number in calls.threads.items()],
        "scheduler": [threading.current_thread().name, threading.get_ident()],
        "open_in_rounds": sorted(calls.open),
    }


def check(scheduler: Scheduler) -> None:
    """The testing kit's invariants: claims, memory, answers, accounts and events."""
    check_invariants(scheduler.controller, scheduler.orders, scheduler.completions, index=scheduler.index)


def is_idle(ranks: TorchDistributedRanks) -> bool:
    """Whether no operation is open here or, as far as this rank knows, elsewhere, and no round is under way."""
    made = ranks.collectives
    time.sleep(IDLE_S)
    return not len(ranks._table) and not ranks._others_open and ranks.collectives == made


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait until something holds, for a while: whoever reads the report sees whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)


def threads_of_controllers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(("kvcr", "store-"))]


def main() -> None:
    configure_logging()
    torch.set_num_threads(1)
    counted_gloo.install()
    port = int(sys.argv[1])
    # Two connections: a call of one waits for the calls of other threads on it.
    store, meetings = (dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(2))
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(live(Life(**json.loads(line)), store, meetings)), flush=True)


if __name__ == "__main__":
    main()
