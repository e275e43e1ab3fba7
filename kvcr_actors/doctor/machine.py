"""The facts about this machine and process that a controller depends on, read once."""

from __future__ import annotations

import os
import platform
import resource
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs

from kvcr_actors.devices.host_limits import MemoryLimit, memory_limits

PACKAGES = ("torch", "triton", "cuda-bindings", "kvcr-actors-kvcr", "kvcr", "nixl")
"""Packages whose versions matter; all but torch are optional."""

_PROBE_BYTES = 1 << 20


@attrs.frozen
class Gpu:
    """One GPU; `pinning_error` is what the driver said, if anything, when host memory was registered with it."""

    name: str
    free_bytes: int
    total_bytes: int
    pinning_error: str = ""


@attrs.frozen
class StoreFolder:
    """A folder that a store is to use, or its nearest parent that exists."""

    path: Path
    exists: bool
    owner: int
    mode: int
    free_bytes: int
    file_system: str
    obstacle: str = ""
    """Why no store can be there, whoever owns it."""


@attrs.frozen
class Machine:
    """What was found. Sizes are bytes; `None` is a limit that does not exist, or a thing that is not there."""

    system: str = "Linux"
    python: tuple[int, int] = (3, 11)
    uid: int = 0
    cores: int = 2
    switch_interval_s: float = 0.005
    packages: dict[str, str | None] = attrs.field(factory=dict[str, "str | None"])
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    """Why no GPU can be used, in the words of whoever refused."""
    limits: tuple[MemoryLimit, ...] = ()
    locked_bytes: int | None = None
    open_files: int | None = None
    huge_pages: str = ""
    """The kernel's choice: always, madvise or never; empty without transparent huge pages."""
    numa_nodes: tuple[int, ...] = (0,)
    can_bind_memory: bool = True
    shared_memory_bytes: int | None = None
    has_memfd: bool = True
    taken_ports: tuple[int, ...] = ()
    folder: StoreFolder | None = None


def read_machine(ports: Sequence[int] = (), folder: Path | None = None, root: Path = Path("/")) -> Machine:
    """Look at this machine: `ports` that sockets shall use on loopback, and the `folder` of a disk store."""
    gpus, gpu_error = _gpus()
    shared = root / "dev/shm"
    return Machine(
        system=platform.system(),
        python=sys.version_info[:2],
        uid=os.getuid(),
        cores=len(os.sched_getaffinity(0)),
        switch_interval_s=sys.getswitchinterval(),
        packages={name: _version(name) for name in PACKAGES},
        gpus=gpus,
        gpu_error=gpu_error,
        limits=tuple(memory_limits(root)),
        locked_bytes=_soft_limit(resource.RLIMIT_MEMLOCK),
        open_files=_soft_limit(resource.RLIMIT_NOFILE),
        huge_pages=_huge_pages(root),
        numa_nodes=_numa_nodes(root),
        can_bind_memory=_works(_bind_probe),
        shared_memory_bytes=_free_bytes(shared) if shared.is_dir() else None,
        has_memfd=_works(lambda: os.close(os.memfd_create("kvcr-doctor"))),
        taken_ports=tuple(port for port in ports if not _works(lambda port=port: _bind(port))),
        folder=None if folder is None else _folder(folder, root),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> tuple[tuple[Gpu, ...], str]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of CUDA's that is missing is an OSError
        return (), f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        built = torch.version.cuda
        return (), "this torch was built without CUDA" if built is None else "torch finds no GPU that it can use"
    found: list[Gpu] = []
    try:
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            found.append(Gpu(torch.cuda.get_device_name(index), free, total, _pinning_error(index)))
    except RuntimeError as error:  # it is full, or another's alone
        return (), f"GPU {len(found)}: {error}"
    return tuple(found), ""


def _pinning_error(index: int) -> str:
    """Register a little memory as the host pools do, and give it back."""
    import torch

    from kvcr_actors.devices.cuda_runtime import CudaRuntime
    from kvcr_actors.errors import KvcrActorsError

    memory = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
    try:
        runtime = CudaRuntime(index)
        runtime.register(memory.data_ptr(), _PROBE_BYTES)
        runtime.unregister(memory.data_ptr())
    except (KvcrActorsError, ImportError, RuntimeError) as error:
        return str(error) or repr(error)
    return ""


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _huge_pages(root: Path) -> str:
    choice = root / "sys/kernel/mm/transparent_hugepage/enabled"
    if not choice.is_file():
        return ""
    return next((word[1:-1] for word in choice.read_text().split() if word.startswith("[")), "")


def _numa_nodes(root: Path) -> tuple[int, ...]:
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    return tuple(sorted(int(node.name[4:]) for node in nodes)) or (0,)


def _bind_probe() -> None:
    """Bind a page of a mapping to the first node, as `HostPools(numa_node=...)` does."""
    from kvcr_actors.devices.host_memory import HostPools
    from kvcr_actors.types import CacheLayout, PoolSpec

    nodes = _numa_nodes(Path("/"))
    HostPools(CacheLayout((PoolSpec("probe", 1, 4096),)), 1, numa_node=nodes[0], touch_threads=1)


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _bind(port: int) -> None:
    with closing(socket.socket()) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", port))


def _folder(path: Path, root: Path) -> StoreFolder:
    path = path.absolute()
    nearest, unread = _nearest(path)
    found = nearest.lstat()
    obstacle = unread or _obstacle(path, nearest, found.st_mode)
    place = nearest if nearest.is_dir() else nearest.parent
    mounts = [line.split()[1:3] for line in (root / "proc/mounts").read_text().splitlines()]
    on = max((mount for mount in mounts if place.is_relative_to(mount[0])), key=lambda mount: len(mount[0]))
    exists, mode = nearest == path, found.st_mode & 0o777
    return StoreFolder(path, exists, found.st_uid, mode, _free_bytes(place), on[1], obstacle)


def _nearest(path: Path) -> tuple[Path, str]:
    """Give the path, or its nearest parent that can be looked at; and what else but absence hides the rest."""
    reason = ""
    for one in (path, *path.parents):
        try:
            one.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            reason = reason or error.strerror or str(error)
        else:
            return one, reason
    return Path(path.anchor), reason


def _obstacle(path: Path, nearest: Path, mode: int) -> str:
    if nearest == path and stat.S_ISLNK(mode):
        return "it is a symbolic link"
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} may not be written to"
    return ""


def _works(probe: Callable[[], object]) -> bool:
    try:
        probe()
    except Exception:  # noqa: BLE001 - a probe's one question is whether it works
        return False
    return True
