from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from kvcr_actors.devices import host_memory
from kvcr_actors.devices.host_limits import explain_shortage, memory_limits
from kvcr_actors.devices.host_memory import POISON_BYTE, HostPools
from kvcr_actors.errors import ConfigError, DeviceError, NoHostMemoryError
from kvcr_actors.types import CacheLayout, PoolSpec

LAYOUT = CacheLayout((PoolSpec("kv", 2, 4096), PoolSpec("odd", 3, 33)))
MAP_NORESERVE = 0x4000


class RecordingRegistrar:
    """Remembers registrations; refuses the one with the number given, and to undo those with the numbers given."""

    def __init__(self, refuse: int | None = None, *, keep: tuple[int, ...] = ()) -> None:
        self.held: dict[int, int] = {}
        self.calls = 0
        self.undone = 0
        self._refuse = refuse
        self._keep = keep

    def register(self, address: int, size: int) -> None:
        self.calls += 1
        if self.calls - 1 == self._refuse:
            raise DeviceError("cudaHostRegister: cudaErrorMemoryAllocation")
        self.held[address] = size

    def unregister(self, address: int) -> None:
        self.undone += 1
        if self.undone - 1 in self._keep:
            raise DeviceError("cudaHostUnregister: cudaErrorUnknown")
        del self.held[address]


def test_buffer_and_tensor_are_the_same_bytes() -> None:
    host = HostPools(LAYOUT, 10)
    host.tensor(1)[3] = torch.arange(99, dtype=torch.uint8)
    assert bytes(host.buffer(1)[3 * 99 : 4 * 99]) == bytes(range(99))
    host.buffer(0)[8192:8200] = b"abcdefgh"
    assert bytes(host.tensor(0)[1, :8].tolist()) == b"abcdefgh"
    assert host.tensor(0).shape == (10, 8192)
    assert len(host.buffer(1)) == 990


def test_poison_overwrites_the_slots_given_and_no_other() -> None:
    host = HostPools(LAYOUT, 4)
    host.poison(1, [0, 2])
    host.poison(1, [])
    assert [bool((row == POISON_BYTE).all()) for row in host.tensor(1)] == [True, False, True, False]
    assert not host.tensor(0).any()


@pytest.mark.parametrize("huge_pages", [False, True])
def test_scenario_42_memory_used_is_within_two_percent_of_what_was_asked_for(huge_pages: bool) -> None:
    asked = 96 << 20
    script = f"""
import re, torch
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.types import CacheLayout, PoolSpec
def used():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.zeros(4096)[::2].zero_()
before = used()
pools = HostPools(CacheLayout((PoolSpec("kv", 2, 16384), PoolSpec("swa", 4, 16384))), {asked} // (6 * 16384),
                  huge_pages={huge_pages}, touch_threads=1)
print(used() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert 0.98 * asked <= int(done.stdout) <= 1.02 * asked


def test_several_threads_touch_every_page() -> None:
    layout = CacheLayout((PoolSpec("kv", 1, 1 << 20),))
    host = HostPools(layout, 300, touch_threads=3)
    assert not host.tensor(0)[::7, ::4096].any()


def test_scenario_42_registration_goes_in_chunks_of_whole_slots_that_share_no_memory_page() -> None:
    registrar = RecordingRegistrar()
    host = HostPools(LAYOUT, 9000, registrar=registrar, register_chunk_bytes=500_000)
    assert host.is_registered
    for pool, spec in enumerate(LAYOUT.pools):
        base, chunk = host.address(pool), host.chunk_slots(pool) * spec.page_bytes
        assert chunk % mmap.PAGESIZE == 0
        starts = sorted(start for start in registrar.held if base <= start < base + 9000 * spec.page_bytes)
        assert starts == list(range(base, base + 9000 * spec.page_bytes, chunk))
        assert sum(registrar.held[start] for start in starts) == 9000 * spec.page_bytes
    host.close()
    assert registrar.held == {}
    assert not host.is_registered


@pytest.mark.parametrize("refuse", range(4))
def test_scenario_42_a_refused_registration_is_rolled_back_and_named(refuse: int) -> None:
    registrar = RecordingRegistrar(refuse)
    with pytest.raises(DeviceError, match=r"host pool (kv|odd): \d+ bytes at \d+ not registered: .*MemoryAllocation"):
        HostPools(LAYOUT, 9000, registrar=registrar, register_chunk_bytes=500_000)
    assert registrar.calls == refuse + 1
    assert registrar.held == {}


def test_a_chunk_that_the_driver_keeps_is_named_and_all_others_are_unregistered() -> None:
    registrar = RecordingRegistrar(keep=(0, 2))
    host = HostPools(LAYOUT, 9000, registrar=registrar, register_chunk_bytes=500_000)
    with pytest.raises(DeviceError, match="a chunk stays registered: cudaHostUnregister: cudaErrorUnknown"):
        host.close()
    assert registrar.undone == registrar.calls
    assert len(registrar.held) == 2
    assert not host.is_registered
    host.close()


def test_a_roll_back_that_fails_too_names_both_errors() -> None:
    registrar = RecordingRegistrar(3, keep=(0,))
    with pytest.raises(DeviceError, match=r"not registered: .*MemoryAllocation; a chunk stays registered: .*Unknown"):
        HostPools(LAYOUT, 9000, registrar=registrar, register_chunk_bytes=500_000)
    assert len(registrar.held) == 1


@pytest.mark.parametrize("refuse", [None, 20])
def test_scenario_42_half_a_tebibyte_is_registered_in_chunks_and_rolled_back_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, refuse: int | None
) -> None:
    """Mapped, but never touched: that many bytes of addresses, not of memory."""
    reserve = partial(mmap.mmap, -1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    monkeypatch.setattr(host_memory, "_map", lambda size, huge_pages: reserve(size))
    monkeypatch.setattr(host_memory, "_touch", lambda tensors, threads: None)
    registrar, layout = RecordingRegistrar(refuse), CacheLayout((PoolSpec("kv", 64, 32 << 10),))
    slots = (512 << 30) // layout.page_bytes
    if refuse is not None:
        with pytest.raises(
            DeviceError, match=f"host pool kv: {16 << 30} bytes at {refuse * (16 << 30)} not registered"
        ):
            HostPools(layout, slots, registrar=registrar, free_bytes=1 << 50)
        assert registrar.held == {}
        return
    host = HostPools(layout, slots, registrar=registrar, free_bytes=1 << 50)
    assert len(registrar.held) == 32
    assert sum(registrar.held.values()) == 512 << 30
    assert len(host.buffer(0)) == 512 << 30
    host.close()
    assert registrar.held == {}


def test_pools_that_nobody_closed_are_unregistered_when_they_go() -> None:
    registrar = RecordingRegistrar()
    host = HostPools(LAYOUT, 10, registrar=registrar)
    assert registrar.held
    del host
    assert registrar.held == {}


def test_scenario_43_memory_that_is_not_free_is_refused_before_it_is_taken() -> None:
    with pytest.raises(NoHostMemoryError, match="free_bytes"):
        HostPools(LAYOUT, 10, free_bytes=LAYOUT.page_bytes * 10 - 1)
    HostPools(LAYOUT, 10, free_bytes=LAYOUT.page_bytes * 10)
    with pytest.raises(NoHostMemoryError, match=r"GiB asked for, but .* leaves"):
        HostPools(CacheLayout((PoolSpec("kv", 1024, 1 << 20),)), 1 << 20)


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="slots"):
        HostPools(LAYOUT, -1)
    with pytest.raises(ConfigError, match="register_chunk_bytes"):
        HostPools(LAYOUT, 1, register_chunk_bytes=100)
    with pytest.raises(ConfigError, match="touch_threads: 0"):
        HostPools(LAYOUT, 1, touch_threads=0)
    with pytest.raises(ConfigError, match="numa_node: 4095"):
        HostPools(LAYOUT, 1, numa_node=4095)


def test_a_mapping_that_the_kernel_refuses_is_no_host_memory() -> None:
    script = """
import resource, torch
from kvcr_actors.devices.host_memory import HostPools
from kvcr_actors.errors import NoHostMemoryError
from kvcr_actors.types import CacheLayout, PoolSpec
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
try:
    HostPools(CacheLayout((PoolSpec("kv", 1, 1 << 20),)), 256, free_bytes=1 << 40)
except NoHostMemoryError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "does not map 268435456 bytes" in done.stdout
    assert "RLIMIT_AS" in done.stdout


def test_huge_pages_that_the_kernel_does_not_know_are_off_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    monkeypatch.setattr(mmap, "MADV_NOHUGEPAGE", 9999)
    assert HostPools(LAYOUT, 1).slots == 1
    with pytest.raises(ConfigError, match="huge_pages=True: refused by the kernel"):
        HostPools(LAYOUT, 1, huge_pages=True)


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="the kernel has no NUMA")
def test_memory_can_be_bound_to_a_node() -> None:
    host = HostPools(LAYOUT, 2000, numa_node=0)
    # The kernel merges neighbouring mappings: look for the one that begins last before the pool.
    maps = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    begins = max(int(fields[0], 16) for fields in maps if int(fields[0], 16) <= host.address(0))
    assert [fields[1] for fields in maps if int(fields[0], 16) == begins] == ["bind:0"]


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").exists(), reason="the kernel has no NUMA")
def test_a_node_that_memory_cannot_be_bound_to_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_memory, "_MPOL_BIND", 99)
    with pytest.raises(ConfigError, match="numa_node: 0: mbind failed: Invalid argument; leave it unset, or let"):
        HostPools(LAYOUT, 1, numa_node=0)
    monkeypatch.setattr(host_memory.platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="not supported on riscv64"):
        HostPools(LAYOUT, 1, numa_node=0)


def test_a_forked_child_does_not_share_the_memory() -> None:
    host = HostPools(LAYOUT, 100)
    inside, flags = False, []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= host.address(0) < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line.split()
    assert "dc" in flags  # do not copy at fork
    assert "nh" in flags  # no huge pages


def make_root(root: Path, groups: str, files: dict[str, str]) -> Path:
    contents = {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 900 kB\n", "proc/self/cgroup": groups, **files}
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_scenario_43_the_tightest_limit_of_a_v2_hierarchy_counts_and_page_cache_makes_way(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        "0::/pod/box\n",
        {
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "100\n",
            "sys/fs/cgroup/pod/memory.max": "500000\n",
            "sys/fs/cgroup/pod/memory.current": "300000\n",
            "sys/fs/cgroup/pod/memory.stat": "active_file 7\ninactive_file 50000\n",
        },
    )
    limits = memory_limits(root)
    assert [(limit.total, limit.free) for limit in limits] == [(500000, 250000), (1024000, 921600)]
    shortage = explain_shortage(250001, limits)
    assert shortage is not None
    assert "sys/fs/cgroup/pod/memory.max" in shortage
    assert explain_shortage(250000, limits) is None


def test_scenario_43_a_v1_container_whose_path_is_the_hosts_falls_back_to_the_mounts_root(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "400000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "450000\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 10\n",
        },
    )
    assert [(limit.total, limit.free) for limit in memory_limits(root)] == [(400000, 0), (1024000, 921600)]


def test_scenario_43_a_v1_group_without_a_limit_does_not_count(tmp_path: Path) -> None:
    root = make_root(
        tmp_path,
        "4:memory:/box\n",
        {
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "1\n",
        },
    )
    assert [limit.total for limit in memory_limits(root)] == [1024000]


def test_a_kernel_without_control_groups_leaves_the_hosts_limit(tmp_path: Path) -> None:
    root = make_root(tmp_path, "", {})
    (root / "proc/self/cgroup").unlink()
    assert [limit.total for limit in memory_limits(root)] == [1024000]


def test_this_machines_limits_can_be_read() -> None:
    limits = memory_limits()
    assert limits
    assert all(0 <= limit.free <= limit.total for limit in limits)
    assert limits[0].free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_no_slots_are_an_empty_tier() -> None:
    host = HostPools(LAYOUT, 0)
    assert len(host.buffer(0)) == 0
    assert host.tensor(1).shape == (0, 99)
