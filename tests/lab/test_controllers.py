"""A controller with each policy, given one request at a time, hits exactly what the laboratory says."""

from __future__ import annotations

from contextlib import closing

import pytest

from kvcr_actors import (
    BackupAck,
    BackupNode,
    CacheController,
    CacheLayout,
    ConfigError,
    ControllerConfig,
    CpuDevice,
    Eviction,
    HostPools,
    PageKey,
    PoolSpec,
    PrefetchReady,
    PrefetchRequest,
    RestoreFinished,
    RestoreOrder,
)
from kvcr_actors.lab import simulate, workload
from kvcr_actors.messages import Completion
from kvcr_actors.replay.trace import read_trace, shipped_trace

LAYOUT = CacheLayout((PoolSpec("kv", 1, 64),))
WAIT_S = 30.0


def next_completion(controller: CacheController) -> Completion:
    while not (completions := controller.take()):
        assert controller.wait(WAIT_S)
    (completion,) = completions
    return completion


def served(controller: CacheController, number: int, keys: list[PageKey]) -> int:
    """One request of an engine that keeps nothing on the device: restore what is found, back the rest up."""
    controller.prefetch(PrefetchRequest(number, keys, 0))
    controller.flush_pending_backups()
    ready = next_completion(controller)
    assert isinstance(ready, PrefetchReady)
    found = 0
    if ready.account is None:
        found = ready.pages
        controller.restore(RestoreOrder(number, 0, (range(found),)))
        controller.flush_pending_backups()
        assert isinstance(next_completion(controller), RestoreFinished)
    if found < len(keys):
        parent = keys[found - 1] if found else None
        controller.write(BackupNode(number, tuple(keys[found:]), (tuple(range(found, len(keys))),), parent))
        ack = next_completion(controller)
        assert isinstance(ack, BackupAck)
        assert ack.node_ids == (number,)
    return found


@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("capacity", [60, 300])
def test_a_controller_hits_what_the_laboratory_says(eviction: Eviction, capacity: int) -> None:
    work = workload(read_trace(shipped_trace(), 250))
    keys = [[key.rjust(32, b"\0") for key in path] for path in work.keys]
    controller = CacheController(
        ControllerConfig(host_eviction=eviction, host_reserve_fraction=0.0),
        device=CpuDevice(LAYOUT, work.largest, HostPools(LAYOUT, capacity)),
        store=None,
    )
    controller.start()
    with closing(controller):
        hits = [served(controller, number, path) for number, path in enumerate(keys)]
    assert hits == simulate(work.keys, eviction, capacity)
    assert sum(hits) > 0


def test_a_policy_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="host_eviction: 'mru' is not a policy; choose one of lru, lfu"):
        ControllerConfig.from_mapping({"host_eviction": "mru"})
    assert ControllerConfig.from_mapping({"host_eviction": "s3fifo"}).host_eviction is Eviction.S3_FIFO
