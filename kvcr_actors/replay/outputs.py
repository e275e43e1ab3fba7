"""Result files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kvcr_actors.errors import ConfigError


def check_output(option: str, path: Path) -> None:
    """Refuse a target that cannot be written, before any work: ConfigError names the option. Leaves nothing behind."""
    if path.is_dir():
        raise ConfigError(f"{option}: {path} is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option}: {path} is a device or pipe, which cannot be replaced whole; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{option}: the folder {path.parent} does not exist; make it first, or name another file")
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{option}: {path} is write-protected; change its permissions, or name another file")
    temporary = _temporary_beside(path)
    try:
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be written ({error.strerror}); name another file") from error


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths name one file, also by a link or by another way there; neither need exist."""
    try:
        return one.samefile(other)
    except OSError:
        return _real(one) == _real(other)


def is_within(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder, or is it, by whatever way."""
    return _real(path).is_relative_to(_real(folder))


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # links in a circle
        return path.absolute()


@contextmanager
def whole_file(path: Path) -> Generator[Path, None, None]:
    """Lend a temporary file beside `path`; it takes the name at the end, or goes if the body does not get there."""
    temporary = _temporary_beside(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.partial")
