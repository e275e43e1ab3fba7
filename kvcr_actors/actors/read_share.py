"""How much host memory prefetches may take together for what they read from the store."""

from __future__ import annotations

import attrs

from kvcr_actors.config import ControllerConfig
from kvcr_actors.core.admission import PrefetchAdmission
from kvcr_actors.types import MissReason


def prefetch_admission(config: ControllerConfig, capacity_pages: int) -> PrefetchAdmission:
    """The bounds on what prefetches may take of the host; ConfigError if no prefetch could ever start."""
    limits = PrefetchAdmission(
        threshold_pages=config.prefetch_threshold_pages,
        capacity_pages=capacity_pages,
        reserve_fraction=config.host_reserve_fraction,
        in_flight_limit=config.prefetch_in_flight_pages,
    )
    # The threshold counts what the host holds of a prefix as well: a read of one page may be the rest of a long one.
    return attrs.evolve(limits, threshold_pages=1)


class ReadShare:
    """Counts the pages that were read for prefixes which are not over, and those under reads that are not quiet."""

    __slots__ = ("_capacity_pages", "_config", "_limits", "_taken")

    def __init__(self, config: ControllerConfig, capacity_pages: int) -> None:
        self._config = config
        self._capacity_pages = capacity_pages
        self._limits: PrefetchAdmission | None = None
        self._taken = 0

    def refusal(self, pages: int) -> MissReason | None:
        """Why so many pages more may not be read now; None if they may."""
        return self._admission().admit(pages, self._taken)

    def room(self) -> int:
        """The most pages that may be read now."""
        return self._admission().room(self._taken)

    def take(self, pages: int) -> None:
        """Count pages, until they are given back."""
        self._taken += pages

    def give_back(self, pages: int) -> None:
        """Count pages no longer."""
        self._taken -= pages

    def _admission(self) -> PrefetchAdmission:
        # Bounds under which nothing could be read are an error only where there is something to read from.
        if self._limits is None:
            self._limits = prefetch_admission(self._config, self._capacity_pages)
        return self._limits
