"""Whether a prefetch may start: long enough to pay, and within the share of host memory that backups leave it."""

from __future__ import annotations

import math

import attrs

from kvcr_actors.errors import ConfigError
from kvcr_actors.types import MissReason


@attrs.frozen
class PrefetchAdmission:
    """Limits in pages. Backups always keep `reserve_fraction` of the host's `capacity_pages` for themselves.

    A configuration under which no prefetch could ever start is a ConfigError.
    """

    threshold_pages: int
    capacity_pages: int
    reserve_fraction: float
    in_flight_limit: int

    def __attrs_post_init__(self) -> None:
        least = max(1, self.threshold_pages)
        if self.share_pages < least:
            raise ConfigError(
                f"prefetches may use {self.share_pages} of {self.capacity_pages} host pages, one takes {least}: enlarge"
                " the host, or lower host_reserve_fraction or prefetch_threshold_pages"
            )
        if self.in_flight_limit < least:
            raise ConfigError(
                f"prefetch_in_flight_pages {self.in_flight_limit} is below the {least} pages that one prefetch takes"
            )

    @property
    def share_pages(self) -> int:
        """The most host pages that prefetches may hold together while they are in flight."""
        return self.capacity_pages - math.ceil(self.capacity_pages * self.reserve_fraction - 1e-9)

    def admit(self, pages: int, in_flight: int) -> MissReason | None:
        """Return why a prefetch of `pages` may not start while others hold `in_flight` pages; None if it may."""
        if pages < self.threshold_pages:
            return MissReason.BELOW_THRESHOLD
        if in_flight + pages > self.share_pages:
            return MissReason.NO_HOST_MEMORY
        if in_flight + pages > self.in_flight_limit:
            return MissReason.QUEUE_FULL
        return None

    def room(self, in_flight: int) -> int:
        """Return the longest prefetch that would be admitted now; 0 if none would."""
        most = min(self.share_pages, self.in_flight_limit) - in_flight
        return most if most >= max(1, self.threshold_pages) else 0
