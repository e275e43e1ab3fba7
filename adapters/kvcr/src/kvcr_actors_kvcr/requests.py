"""What the store keeps for a request while it lives: its hint, and claims on pages delivered to confirm it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
from kvcr.types import BlockKey, ReleaseHandle

from kvcr_actors import PageKey, RequestId, router_key
from kvcr_actors_kvcr.hints import FetchHint, HintRefusal, parse_hint
from kvcr_actors_kvcr.options import KvcrOptions
from kvcr_actors_kvcr.peers import Peers


@attrs.define(eq=False)
class OpenRequest:
    """A request with a usable hint. `claims` are the owner thread's; `ended` is set once, by the loop.

    `refused` says that its source was not asked, which is counted once.
    """

    hint: FetchHint
    claims: dict[BlockKey, ReleaseHandle] = attrs.field(factory=dict[BlockKey, ReleaseHandle])
    ended: bool = False
    refused: bool = False
    promised: frozenset[PageKey] = frozenset()
    """The pages that lookups were promised; the host has the others of a prefix already."""

    def promise(self, keys: Sequence[PageKey]) -> None:
        """Note which of the pages asked for the hint names. The salt is in a page's hash, so no other salt's is."""
        self.promised |= {key for key in keys if router_key(key) in self.hint.hashes}


class OpenRequests:
    """The hints of running requests, on the loop. `refused` counts hints by why they give no remote read."""

    def __init__(self, options: KvcrOptions) -> None:
        self._options = options
        self._hosts = options.hint_hosts
        self._open: dict[RequestId, OpenRequest] = {}
        self.accepted = 0
        self.refused: Counter[HintRefusal] = Counter()

    def begin(self, request_id: RequestId, hints: object) -> None:
        """Take a request's hint; one that cannot be used is counted and gives no remote read."""
        if not self._options.control_port:
            self.refused[HintRefusal.PEERS_OFF] += 1
            return
        options = self._options
        hint = parse_hint(hints, self._hosts, move_hints=options.move_hints, shard_offset=options.shard_offset)
        if isinstance(hint, HintRefusal):
            self.refused[hint] += 1
            return
        self.accepted += 1
        self._open[request_id] = OpenRequest(hint)

    def may_ask(self, request: OpenRequest, peers: Peers) -> bool:
        """Whether a request's source is asked now; that it is not is counted once a request."""
        refusal = peers.refuses(request.hint.endpoint)
        if refusal is not None and not request.refused:
            request.refused = True
            self.refused[refusal] += 1
        return refusal is None

    def get(self, request_id: RequestId) -> OpenRequest | None:
        """The request, if it has a usable hint."""
        return self._open.get(request_id)

    def end(self, request_id: RequestId) -> OpenRequest | None:
        """Discard a request's hint; the caller releases its claims."""
        request = self._open.pop(request_id, None)
        if request is not None:
            request.ended = True
        return request

    def __len__(self) -> int:
        return len(self._open)
