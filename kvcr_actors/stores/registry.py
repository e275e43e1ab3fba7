"""Stores by name: the entry points of group `kvcr_actors.stores`, ours and those of other distributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TypeAlias, cast

from kvcr_actors.core.keys import Namespace
from kvcr_actors.errors import ConfigError
from kvcr_actors.ports import Store

GROUP = "kvcr_actors.stores"

StoreFactory: TypeAlias = Callable[[Mapping[str, str], int, Path | None, Namespace], Store]
"""What an entry point of the group is: options, capacity in pages, folder, namespace."""


def store_names() -> tuple[str, ...]:
    """The names of the stores installed, sorted."""
    return tuple(sorted(entry_points(group=GROUP).names))


def open_store(
    name: str, options: Mapping[str, str], capacity_pages: int, path: str | Path | None, namespace: Namespace
) -> Store:
    """Make the store of a name, in the folder `path` if it has one.

    ConfigError for an unknown name, a path that is none or a refused option.
    The store is not open yet: that is `Store.open`, on the loop.
    """
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise ConfigError(f"unknown store {name!r}; installed: {', '.join(store_names()) or 'none'}")
    if len(found) > 1:
        sources = ", ".join(sorted(entry.value for entry in found))
        raise ConfigError(f"store {name!r} is installed more than once: {sources}; uninstall all but one")
    factory = cast("StoreFactory", next(iter(found)).load())
    return factory(options, capacity_pages, _folder(path), namespace)


def _folder(path: object) -> Path | None:
    if path is None or isinstance(path, Path):
        return path
    if isinstance(path, str) and path and "\0" not in path:
        return Path(path)
    raise ConfigError(f"path: {path!r} does not name a folder; give a str or a Path")
