"""A trace as the laboratory reads it: each request a path of numbered pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs

from kvcr_actors.errors import TraceError
from kvcr_actors.replay.trace import TraceRequest
from kvcr_actors.types import PageKey

_KEY_BYTES = 4


@attrs.frozen(slots=False)
class Workload:
    """Requests in file order: `paths` has the page numbers of each, root to tail, counted from 0 as they first come.

    A page is a block below all that is above it, so equal paths are equal prefixes, as the page keys of a replay say.
    """

    paths: Sequence[Sequence[int]]
    unique: int
    """Different pages."""

    @cached_property
    def pages(self) -> int:
        """Pages asked for, over all requests."""
        return sum(map(len, self.paths))

    @cached_property
    def largest(self) -> int:
        """Pages of the largest request."""
        return max(map(len, self.paths))

    @cached_property
    def keys(self) -> list[list[PageKey]]:
        """Each request's pages by short keys, for the tree that the controller runs."""
        keys = [number.to_bytes(_KEY_BYTES, "big") for number in range(self.unique)]
        return [[keys[page] for page in path] for path in self.paths]


def workload(requests: Sequence[TraceRequest]) -> Workload:
    """Number the pages of a trace's requests; TraceError if there are none."""
    if not requests:
        raise TraceError("the trace has no requests; a sweep needs one at least")
    known: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    for request in requests:
        path: list[int] = []
        page = -1
        for block in request.hash_ids:
            page = known.setdefault((page, block), len(known))
            path.append(page)
        paths.append(path)
    return Workload(paths, len(known))
