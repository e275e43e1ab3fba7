"""Every fault that the doctor knows, planted one at a time, is named with its remedy; a sound machine has none."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from kvcr_actors.devices.host_limits import MemoryLimit
from kvcr_actors.doctor.checks import Verdict, Wish, examine
from kvcr_actors.doctor.machine import Gpu, Machine, StoreFolder

GIB = 1 << 30
FOLDER = StoreFolder(Path("/data/kv"), exists=True, owner=7, mode=0o700, free_bytes=100 * GIB, file_system="ext4")
SOUND = Machine(
    python=(3, 12),
    uid=7,
    cores=16,
    packages={
        "torch": "2.11.0",
        "triton": "3.6.0",
        "cuda-bindings": "13.0.1",
        "kvcr-actors-kvcr": "0.1",
        "kvcr": "0.1.1",
        "nixl": "1.5.0",
    },
    gpus=(Gpu("NVIDIA H200", 130 * GIB, 139 * GIB),),
    limits=(MemoryLimit("the host", 128 * GIB, 120 * GIB),),
    huge_pages="madvise",
    shared_memory_bytes=8 * GIB,
    folder=FOLDER,
)
WISH = Wish(host_bytes=64 * GIB, store_bytes=50 * GIB, gpu=True, kvcr=True)


def packages(**changes: str | None) -> dict[str, str | None]:
    return {**SOUND.packages, **{name.replace("_", "-"): value for name, value in changes.items()}}


def test_a_sound_machine_has_nothing_in_its_way() -> None:
    findings = examine(SOUND, WISH)
    assert {finding.verdict for finding in findings} == {Verdict.GOOD}
    about = [finding.about for finding in findings]
    assert about == ["python", "torch", "GPU 0", "host memory", "huge pages", "NUMA", "store folder /data/kv", "KVCR"]
    assert not any(finding.remedy for finding in findings)


PROBLEMS = {
    "system": ({"system": "Darwin"}, "system", "Linux only"),
    "python": ({"python": (3, 10)}, "python", "3.11 or newer"),
    "no torch": ({"packages": packages(torch=None)}, "torch", "pip install torch"),
    "no GPU": ({"gpus": (), "gpu_error": "this torch was built without CUDA"}, "GPU", "check the driver"),
    "no pinning": ({"gpus": (Gpu("H200", GIB, GIB, "out of memory"),)}, "pinned memory, GPU 0", "memlock"),
    "no bindings": ({"packages": packages(cuda_bindings=None)}, "cuda-bindings", "pip install cuda-bindings"),
    "little memory": (
        {"limits": (*SOUND.limits, MemoryLimit("the container's limit", 32 * GIB, 20 * GIB))},
        "host memory",
        "fewer slots",
    ),
    "locked memory": ({"locked_bytes": 8 << 20}, "locked memory", "ulimit -l"),
    "no binding": ({"numa_nodes": (0, 1), "can_bind_memory": False}, "NUMA", "CAP_SYS_NICE"),
    "no memfd": ({"has_memfd": False}, "shared memory", "seccomp"),
    "few files": ({"open_files": 256}, "open files", "ulimit -n"),
    "taken port": ({"taken_ports": (5557,)}, "port 5557", "choose another port"),
    "foreign folder": ({"folder": attrs.evolve(FOLDER, owner=1000)}, "store folder /data/kv", "chown"),
    "open folder": ({"folder": attrs.evolve(FOLDER, mode=0o777)}, "store folder /data/kv", "chmod 700"),
    "full disk": ({"folder": attrs.evolve(FOLDER, free_bytes=GIB)}, "store folder /data/kv", "make room"),
    "no KVCR": ({"packages": packages(nixl=None)}, "KVCR", "pip install kvcr-actors-kvcr"),
}

NOTES = {
    "one core": ({"cores": 1}, WISH, "cores", "two or more"),
    "switch interval": ({"switch_interval_s": 5e-5}, WISH, "GIL", "leave sys.setswitchinterval"),
    "no GPU, none wanted": ({"gpus": ()}, attrs.evolve(WISH, gpu=False), "GPU", "a CudaDevice needs one"),
    "no triton": ({"packages": packages(triton=None)}, WISH, "triton", "pip install triton"),
    "old bindings": ({"packages": packages(cuda_bindings="12.9.1")}, WISH, "cuda-bindings", "upgrade"),
    "huge pages": ({"huge_pages": "always"}, WISH, "huge pages", "opt out"),
    "no huge pages": ({"huge_pages": "never"}, WISH, "huge pages", "HostPools(huge_pages=True)"),
    "nodes": ({"numa_nodes": (0, 1)}, WISH, "NUMA", "numa_node"),
    "little shared memory": ({"shared_memory_bytes": 64 << 20}, WISH, "shared memory", "--shm-size"),
    "network disk": (
        {"folder": attrs.evolve(FOLDER, file_system="nfs4")},
        WISH,
        "store folder /data/kv",
        "use a local disk",
    ),
    "half of KVCR": ({"packages": packages(nixl=None)}, attrs.evolve(WISH, kvcr=False), "KVCR", "needs all three"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_planted_fault_is_named_with_its_remedy(name: str) -> None:
    changes, about, remedy = PROBLEMS[name]
    bad = [one for one in examine(attrs.evolve(SOUND, **changes), WISH) if one.verdict is Verdict.PROBLEM]
    assert [one.about for one in bad] == [about]
    assert remedy in bad[0].remedy
    assert bad[0].found


@pytest.mark.parametrize("name", NOTES)
def test_what_works_but_less_well_is_a_note(name: str) -> None:
    changes, wish, about, remedy = NOTES[name]
    findings = [one for one in examine(attrs.evolve(SOUND, **changes), wish) if one.verdict is not Verdict.GOOD]
    assert [(one.about, one.verdict) for one in findings] == [(about, Verdict.NOTE)]
    assert remedy in findings[0].remedy


def test_without_kvcr_and_without_a_folder_nothing_is_said_of_them() -> None:
    bare = attrs.evolve(SOUND, folder=None, packages=packages(kvcr=None, nixl=None, kvcr_actors_kvcr=None), limits=())
    about = [finding.about for finding in examine(bare, Wish())]
    assert about == ["python", "torch", "GPU 0", "huge pages", "NUMA"]
