"""A store for tests whose lookups are promises: what a peer said it holds, confirmed only when it delivers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import anyio

from kvcr_actors.core.hit_policy import boundaries, longest
from kvcr_actors.ports import HostMemory, Services, StoreTraits
from kvcr_actors.stores.backend import PageBackend
from kvcr_actors.testing.faults import Fault, FaultPlan
from kvcr_actors.testing.stores import FaultyStore, Latency, no_latency
from kvcr_actors.transfers import Operation
from kvcr_actors.types import CacheLayout, PageKey, RequestId


class ConfirmingStore(FaultyStore):
    """A `FaultyStore` that promises more than it has: `promised` maps keys to the pools that hints speak of.

    A confirmation takes `latency("confirm", pages)` and succeeds if the backend really has what the prefix needs of the
    pages that the request looked up. Each one that delivers opens a claim, until the request ends; one that arrives
    after the end is released on arrival.
    `asked` lists the confirmations as (request, pages), `late` counts the claims released on arrival.
    """

    def __init__(
        self,
        backend: PageBackend,
        promised: Mapping[PageKey, int],
        faults: FaultPlan | None = None,
        *,
        latency: Latency = no_latency,
        batch_pages: int = 64,
    ) -> None:
        traits = StoreTraits(requires_confirmation=True, batch_pages=batch_pages)
        super().__init__(backend, faults, latency=latency, traits=traits, name="confirming")
        self.asked: list[tuple[RequestId, int]] = []
        self.claims: dict[RequestId, int] = {}
        self.late = 0
        self._promised = promised
        self._spawner: Services | None = None
        self._layout: CacheLayout | None = None
        self._ended: set[RequestId] = set()
        self._looked_up: dict[RequestId, frozenset[PageKey]] = {}

    @property
    def open_claims(self) -> int:
        """Delivered copies that are still kept."""
        return sum(self.claims.values())

    async def open(self, services: Services, host: HostMemory) -> None:
        """Open the backend."""
        await super().open(services, host)
        self._spawner, self._layout = services, host.layout

    def end_request(self, request_id: RequestId) -> None:
        """Release what was delivered for a request."""
        self.claims.pop(request_id, None)
        self._looked_up.pop(request_id, None)
        self._ended.add(request_id)

    def begin_request(self, request_id: RequestId, hints: object) -> None:
        """Take a request, which may have an id that was used before."""
        del hints
        self._ended.discard(request_id)

    def lookup(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[tuple[int, ...]]:
        """What is held and what is promised."""
        self._looked_up[request_id] = self._looked_up.get(request_id, frozenset()).union(keys)
        return Operation[tuple[int, ...]].finished(
            tuple(self._backend.lookup(key) | self._promised.get(key, 0) for key in keys)
        )

    def confirm(self, keys: Sequence[PageKey], request_id: RequestId) -> Operation[bool]:
        """Deliver what the prefix needs, or fail to."""
        confirmed: Operation[bool] = Operation()
        if self._spawner is None:
            return Operation[bool].finished(False)  # noqa: FBT003
        self.asked.append((request_id, len(keys)))
        fault = self.faults.decide("confirm")
        self.running += 1
        asked = {key: key in self._looked_up.get(request_id, ()) for key in keys}
        self._spawner.spawn(partial(self._deliver, asked, request_id, fault, confirmed), "store-confirm")
        return confirmed

    async def _deliver(
        self, asked: Mapping[PageKey, bool], request_id: RequestId, fault: Fault | None, confirmed: Operation[bool]
    ) -> None:
        """`asked` says of each page of the prefix whether it was looked up."""
        try:
            await anyio.sleep(self._latency("confirm", len(asked)))
            if fault is Fault.STALL:
                await self._released.wait()
            delivered = fault in (None, Fault.STALL, Fault.DUPLICATE) and self._holds(asked)
            if delivered and request_id in self._ended:
                self.late += 1
            elif delivered:
                self.claims[request_id] = self.claims.get(request_id, 0) + 1
            if fault is not Fault.DROP:
                confirmed.settle(delivered)
        finally:
            self.running -= 1
            self._idle.set()

    def _holds(self, asked: Mapping[PageKey, bool]) -> bool:
        if self._layout is None:
            return False
        every = (1 << len(self._layout.pools)) - 1
        masks = [self._backend.lookup(key) if is_asked else every for key, is_asked in asked.items()]
        return longest(boundaries(masks, self._layout)) == len(asked)
