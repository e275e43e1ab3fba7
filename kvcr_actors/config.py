"""The controller's configuration: one frozen class, unknown keys refused, the source of each value known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs

from kvcr_actors.core.values import checked_seconds
from kvcr_actors.errors import ConfigError
from kvcr_actors.types import Eviction, StopPolicy


def _check_pages(config: object, field: attrs.Attribute[int], value: object) -> None:
    if type(value) is not int or value < field.metadata["least"]:
        raise ConfigError(f"{field.name}: {value!r} is not a whole number of {field.metadata['least']} or more")


def _check_seconds(config: object, field: attrs.Attribute[float], value: object) -> None:
    if checked_seconds(field.name, value) <= 0:
        raise ConfigError(f"{field.name}: {value!r} is not a number above 0")


def _check_share(config: object, field: attrs.Attribute[float], value: object) -> None:
    if type(value) not in (int, float) or not 0 <= cast("float", value) < 1:
        raise ConfigError(f"{field.name}: {value!r} is not a share from 0 to below 1")


def _check_switch(config: object, field: attrs.Attribute[bool], value: object) -> None:
    if type(value) is not bool:
        raise ConfigError(f"{field.name}: {value!r} is neither True nor False")


def _stop_policy(value: object) -> StopPolicy:
    try:
        return StopPolicy(cast("str", value))
    except ValueError:
        known = ", ".join(StopPolicy)
        raise ConfigError(f"prefetch_stop_policy: {value!r} is not a policy; choose one of {known}") from None


def _eviction(value: object) -> Eviction:
    try:
        return Eviction(cast("str", value))
    except ValueError:
        known = ", ".join(Eviction)
        raise ConfigError(f"host_eviction: {value!r} is not a policy; choose one of {known}") from None


def _count(default: int, least: int = 1) -> int:
    return attrs.field(default=default, validator=_check_pages, metadata={"least": least})


def _seconds(default: float) -> float:
    return attrs.field(default=default, validator=_check_seconds)


@attrs.frozen
class ControllerConfig:
    """Limits and policies. Times are seconds, sizes are pages unless the name says otherwise."""

    prefetch_threshold_pages: int = _count(1)
    """Below this many pages beyond the device, a prefetch reads nothing."""
    prefetch_deadline_s: float = _seconds(30.0)
    """The most that one prefetch may take to `PrefetchReady`, from when the prefetch actor starts it."""
    prefetch_stop_policy: StopPolicy = attrs.field(default=StopPolicy.WAIT_COMPLETE, converter=_stop_policy)
    """How long prefetches go on whose requests do not say."""
    prefetch_in_flight_pages: int = _count(1 << 16)
    """The most pages read from the store that all prefetches together may hold in host memory."""
    failed_read_pause_s: float = _seconds(5.0)
    """How long a page is not read again whose read failed, or took too long."""
    claim_lifetime_s: float = _seconds(60.0)
    """A ready prefetch that is neither restored nor cancelled ends after this time."""
    host_reserve_fraction: float = attrs.field(default=0.1, validator=_check_share)
    """The share of host memory that prefetches leave to backups."""
    host_eviction: Eviction = attrs.field(default=Eviction.LRU, converter=_eviction)
    """Which page leaves when host memory is full; `kvcr-actors sweep` says which one suits a trace."""
    refresh_store: bool = attrs.field(default=True, validator=_check_switch)
    """Whether a request's prefix is made recent in the store too, each time it is asked for."""
    deposit_batch_pages: int = _count(64)
    deposit_queue_pages: int = _count(1 << 15)
    """Pages that may wait for the store, or half of the host's pages if that is less: what waits cannot be evicted.

    Beyond it deposits are shed: counted, offered again once there is room, and named in `DepositFailed` if they leave
    the host before that.
    """
    deposit_retries: int = _count(3, least=0)
    deposit_backoff_s: float = _seconds(0.05)
    deposit_yield_s: float = _seconds(0.5)
    """The most that a batch of deposits lets reads of the store go first."""
    copy_deadline_s: float = _seconds(30.0)
    """The most that a submit may take before its nodes are given up (their memory only when it is quiet)."""
    agreement_deadline_s: float = _seconds(10.0)
    """The most that ranks wait for each other in one collective, and an operation for ranks that lack it."""
    inbox_limit: int = _count(4096)
    """Messages that an actor's inbox holds; one message carries a step."""
    restarts: int = _count(3, least=0)
    restart_window_s: float = _seconds(60.0)
    restart_backoff_s: float = _seconds(0.05)
    drain_budget_s: float = _seconds(10.0)
    """The most that each stage of the drain at close may take."""
    poison_freed_pages: bool = attrs.field(default=False, validator=_check_switch)
    """Overwrite host slots when they are freed, so that a use after free shows. For tests and the replay."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ControllerConfig:
        """Build from plain values; a key that does not exist is a ConfigError that names the nearest ones."""
        known = {field.name for field in attrs.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown configuration key {unknown[0]!r}; known keys: {', '.join(sorted(known))}")
        return cls(**values)

    def effective(self) -> dict[str, tuple[Any, str]]:
        """Each value and where it came from: `default` or `set`."""
        return {
            field.name: (value, "default" if value == field.default else "set")
            for field, value in zip(attrs.fields(type(self)), attrs.astuple(self, recurse=False), strict=True)
        }
