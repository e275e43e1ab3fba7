"""The verdicts: each check looks at the facts and says what is well, what to know, or what is wrong and what to do."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import attrs

from kvcr_actors.doctor.machine import Machine

_GIB = 1 << 30
_LEAST_FILES = 1024
_DEFAULT_SWITCH_S = 0.005
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "lustre", "9p", "fuse.sshfs")


class Verdict(enum.StrEnum):
    """How much a finding matters."""

    GOOD = "good"
    NOTE = "note"
    """It works, and something is slower or missing."""
    PROBLEM = "problem"
    """It will not work, or not as it should."""


@attrs.frozen
class Finding:
    """One verdict: what it is about, what was found, and, unless all is well, what to do."""

    about: str
    verdict: Verdict
    found: str
    remedy: str = ""


@attrs.frozen
class Wish:
    """What the user means to run, for checks that depend on it; 0 and False ask for nothing."""

    host_bytes: int = 0
    store_bytes: int = 0
    gpu: bool = False
    kvcr: bool = False


def examine(machine: Machine, wish: Wish) -> list[Finding]:
    """Judge a machine for a wish, in an order that a person reads well."""
    return [finding for check in _CHECKS for finding in check(machine, wish)]


def _system(machine: Machine, wish: Wish) -> Iterator[Finding]:
    del wish
    if machine.system != "Linux":
        yield _problem("system", machine.system, "the package runs on Linux only")
    if machine.python < (3, 11):
        yield _problem("python", f"{machine.python[0]}.{machine.python[1]}", "use Python 3.11 or newer")
    else:
        yield _good("python", f"{machine.python[0]}.{machine.python[1]} on {machine.system}, {machine.cores} cores")
    if machine.cores < 2:
        yield _note(
            "cores", "one core", "the controller's thread shares it with the scheduler; give the process two or more"
        )


def _switch_interval(machine: Machine, wish: Wish) -> Iterator[Finding]:
    del wish
    if machine.switch_interval_s < _DEFAULT_SWITCH_S:
        yield _note(
            "GIL",
            f"the switch interval is {machine.switch_interval_s * 1e3:g} ms",
            "each hand-over of the GIL costs the scheduler; leave sys.setswitchinterval at its 5 ms",
        )


def _gpu(machine: Machine, wish: Wish) -> Iterator[Finding]:
    torch = machine.packages.get("torch")
    if torch is None:
        yield _problem("torch", "not installed", "pip install torch; a CPU build serves a CpuDevice")
        return
    yield _good("torch", torch)
    if not machine.gpus:
        judge = _problem if wish.gpu else _note
        yield judge("GPU", machine.gpu_error or "none", "a CudaDevice needs one; check the driver and torch's build")
        return
    for index, gpu in enumerate(machine.gpus):
        yield _good(f"GPU {index}", f"{gpu.name}, {gpu.free_bytes / _GIB:.1f} of {gpu.total_bytes / _GIB:.1f} GiB free")
        if gpu.pinning_error:
            yield _problem(
                f"pinned memory, GPU {index}",
                gpu.pinning_error,
                "host pools must be registered with the driver: raise RLIMIT_MEMLOCK (ulimit -l), and in a container "
                "run with --ulimit memlock=-1",
            )
    if machine.packages.get("triton") is None:
        yield _note("triton", "not installed", "pages are moved by torch operations, one a plane; pip install triton")
    bindings = machine.packages.get("cuda-bindings")
    if bindings is None:
        yield _problem("cuda-bindings", "not installed", "it comes with torch's CUDA wheels; pip install cuda-bindings")
    elif int(bindings.split(".")[0]) < 13:
        yield _note("cuda-bindings", bindings, "from 13 on a batch of copies is one call; upgrade it with the driver")


def _memory(machine: Machine, wish: Wish) -> Iterator[Finding]:
    if not machine.limits:
        return
    tightest = min(machine.limits, key=lambda limit: limit.free)
    found = f"{tightest.free / _GIB:.1f} GiB free by {tightest.source}"
    if wish.host_bytes > tightest.free:
        yield _problem(
            "host memory",
            f"{wish.host_bytes / _GIB:.1f} GiB asked for, {found}",
            "ask for fewer slots, or raise that limit",
        )
    else:
        yield _good("host memory", found)
    locked = machine.locked_bytes
    if locked is not None and wish.gpu and locked < max(wish.host_bytes, 1) and machine.uid != 0:
        yield _problem(
            "locked memory",
            f"RLIMIT_MEMLOCK is {locked / _GIB:.2f} GiB",
            "page-locked host pools count against it: ulimit -l unlimited, or --ulimit memlock=-1 for the container",
        )


def _huge_pages(machine: Machine, wish: Wish) -> Iterator[Finding]:
    del wish
    if machine.huge_pages == "always":
        yield _note(
            "huge pages",
            "transparent huge pages are always on",
            "host pools opt out unless huge_pages=True; other memory of the engine may be rounded up",
        )
    elif machine.huge_pages in ("never", ""):
        yield _note("huge pages", "off", "HostPools(huge_pages=True) is refused or of no effect; deposits are slower")
    else:
        yield _good("huge pages", machine.huge_pages)


def _numa(machine: Machine, wish: Wish) -> Iterator[Finding]:
    del wish
    count = len(machine.numa_nodes)
    if count == 1:
        yield _good("NUMA", "one node")
    elif machine.can_bind_memory:
        yield _note("NUMA", f"{count} nodes", "give HostPools the numa_node that the GPU hangs on (nvidia-smi topo -m)")
    else:
        yield _problem(
            "NUMA",
            f"{count} nodes, and memory cannot be bound to one",
            "HostPools(numa_node=...) needs mbind: give the container CAP_SYS_NICE, or a cpuset with that node",
        )


def _sharing(machine: Machine, wish: Wish) -> Iterator[Finding]:
    del wish
    if not machine.has_memfd:
        yield _problem("shared memory", "memfd_create is refused", "allow it in the container's seccomp profile")
    shared = machine.shared_memory_bytes
    if shared is not None and shared < 256 << 20:
        yield _note(
            "shared memory",
            f"{shared / (1 << 20):.0f} MiB free in its file system",
            "engines of several processes need more: run the container with --shm-size or --ipc=host",
        )
    files = machine.open_files
    if files is not None and files < _LEAST_FILES:
        yield _problem("open files", f"at most {files}", f"stores and sockets need more: ulimit -n {_LEAST_FILES * 4}")


def _ports(machine: Machine, wish: Wish) -> Iterator[Finding]:
    del wish
    for port in machine.taken_ports:
        yield _problem(f"port {port}", "taken, or not allowed", "choose another port, or end what listens (ss -ltnp)")


def _folder(machine: Machine, wish: Wish) -> Iterator[Finding]:
    folder = machine.folder
    if folder is None:
        return
    about = f"store folder {folder.path}"
    if folder.obstacle:
        yield _problem(about, folder.obstacle, "name a folder of this user, or one that can be made")
        return
    sound = True
    if folder.exists and folder.owner != machine.uid:
        sound = False
        yield _problem(about, f"belongs to user {folder.owner}", "a store uses only a folder of its own user: chown it")
    if folder.exists and folder.mode & 0o022:
        sound = False
        yield _problem(about, f"others may write to it (mode {folder.mode:o})", "chmod 700 the folder")
    if wish.store_bytes > folder.free_bytes:
        sound = False
        yield _problem(
            about,
            f"{wish.store_bytes / _GIB:.1f} GiB asked for, {folder.free_bytes / _GIB:.1f} GiB free",
            "make room, choose another disk, or give the store fewer bytes",
        )
    if folder.file_system in _NETWORK:
        yield _note(
            about, f"on a network file system ({folder.file_system})", "use a local disk; locks and reads stall"
        )
    if sound:
        yield _good(about, f"{folder.free_bytes / _GIB:.1f} GiB free on {folder.file_system}")


def _kvcr(machine: Machine, wish: Wish) -> Iterator[Finding]:
    parts = {name: machine.packages.get(name) for name in ("kvcr-actors-kvcr", "kvcr", "nixl")}
    missing = [name for name, found in parts.items() if found is None]
    if not missing:
        yield _good("KVCR", ", ".join(f"{name} {found}" for name, found in parts.items()))
    elif wish.kvcr:
        yield _problem("KVCR", f"not installed: {', '.join(missing)}", "pip install kvcr-actors-kvcr")
    elif len(missing) < len(parts):
        yield _note("KVCR", f"not installed: {', '.join(missing)}", "the KVCR store needs all three")


def _good(about: str, found: str) -> Finding:
    return Finding(about, Verdict.GOOD, found)


def _note(about: str, found: str, remedy: str) -> Finding:
    return Finding(about, Verdict.NOTE, found, remedy)


def _problem(about: str, found: str, remedy: str) -> Finding:
    return Finding(about, Verdict.PROBLEM, found, remedy)


_CHECKS: tuple[Callable[[Machine, Wish], Iterator[Finding]], ...] = (
    _system,
    _switch_interval,
    _gpu,
    _memory,
    _huge_pages,
    _numa,
    _sharing,
    _ports,
    _folder,
    _kvcr,
)
