"""How much memory this process may still take: what the host has free, and what the container's limit leaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import attrs

_GIB = 1 << 30
# A v1 group without a limit shows the largest page-aligned number; anything near it is no limit.
_NO_LIMIT = 1 << 60


@attrs.frozen
class MemoryLimit:
    """One bound on memory: who sets it (`source` names the file), its size, and how much of it is free (bytes)."""

    source: str
    total: int
    free: int


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Read every bound that applies to this process, from `root`'s `/proc` and `/sys`; the tightest comes first."""
    limits = [_host_limit(root), *_group_limits(root)]
    return sorted(limits, key=lambda limit: limit.free)


def explain_shortage(needed: int, limits: list[MemoryLimit]) -> str | None:
    """Say which limit is too small for `needed` bytes; None if all of them leave room."""
    for limit in limits:
        if needed > limit.free:
            return (
                f"{needed / _GIB:.2f} GiB asked for, but {limit.source} leaves {limit.free / _GIB:.2f} GiB "
                f"of {limit.total / _GIB:.2f} GiB; ask for fewer slots or raise that limit"
            )
    return None


def _host_limit(root: Path) -> MemoryLimit:
    source = root / "proc/meminfo"
    fields = dict(line.split(":", 1) for line in source.read_text().splitlines() if ":" in line)
    total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return MemoryLimit(f"the host (MemAvailable of {source})", total, free)


def _group_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the memory limits of this process's control groups (v1 and v2) and of all their ancestors."""
    mounts, groups = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    if not groups.is_file():  # a kernel without control groups
        return
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _chain(mounts, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _chain(
                mounts / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _chain(mount: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> Iterator[MemoryLimit]:
    # Inside a container the path may be the host's, absent from this mount; then only the mount's root counts.
    inner = PurePosixPath(path.lstrip("/"))
    for part in (inner, *inner.parents):
        group = mount / part
        limit_file, usage_file = group / limit_name, group / usage_name
        if not (limit_file.is_file() and usage_file.is_file()):
            continue
        text = limit_file.read_text().strip()
        if text == "max" or int(text) >= _NO_LIMIT:
            continue
        used = int(usage_file.read_text()) - _reclaimable(group / "memory.stat", cache_name)
        yield MemoryLimit(f"the container's limit {limit_file}", int(text), max(0, int(text) - max(0, used)))


def _reclaimable(stat: Path, name: str) -> int:
    """Bytes of page cache that count as used but make way."""
    if not stat.is_file():
        return 0
    return next((int(line.split()[1]) for line in stat.read_text().splitlines() if line.split()[0] == name), 0)
