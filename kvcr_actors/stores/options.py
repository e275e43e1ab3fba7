"""The checks that every embedded store makes of its options before it opens anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvcr_actors.errors import ConfigError


def check_known(store: str, options: Mapping[str, str], known: Collection[str]) -> None:
    """Refuse options that a store does not have."""
    unknown = sorted(set(options) - set(known))
    if unknown:
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise ConfigError(f"store {store}: unknown option {unknown[0]!r}; {takes}")


def boolean(store: str, options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """The value of an option that is `true` or `false`, nothing else."""
    value = options.get(name)
    if value is None:
        return default
    if value not in {"true", "false"}:
        raise ConfigError(f"store {store}: option {name}={value!r}; write {name}=true or {name}=false")
    return value == "true"
