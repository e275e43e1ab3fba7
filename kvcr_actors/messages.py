"""Every message of the system, grouped by who receives it; completions go to the engine through the outbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import attrs

from kvcr_actors.core.accounting import RequestAccount
from kvcr_actors.core.host_tier import Growth, HostPage
from kvcr_actors.core.ledger import Claim
from kvcr_actors.ports import CopyOutcome, OperationId, Store
from kvcr_actors.transfers import Operation
from kvcr_actors.types import BackupNode, NodeId, PageKey, PrefetchRequest, RequestId, RestoreOrder, SkipReason

# To the backup actor, from the engine.


@attrs.define
class BackUpStep:
    """Copy all nodes of one step to the host in one submit that waits, on the device, for the fence.

    The one message of every step, made on the hot thread: not frozen, which costs twice as much to make.
    """

    step: int
    nodes: Sequence[BackupNode]
    fence: object | None = None
    resets: int = 0
    """How many resets the engine has given, those before the flush included; so in every order that has it."""
    stale: int = 0
    """The step's first nodes, which were written before the last of these resets."""


# To the confirmation actor.


@attrs.frozen
class StagedNode:
    """A node on its way to the host: `pages` are its new pages, root to tail, in state FILLING.

    `above` is the host page that they hang from, None at a root. A node without new pages has its own tail there, which
    another copy still fills, or which the store lacks.
    """

    node_id: NodeId
    pages: Sequence[HostPage]
    above: HostPage | None
    position: int = 0
    """Where it stands in its step's list of nodes: its bit in the ranks' agreement."""
    growths: Sequence[Growth] = ()
    """Components on their way to pages that the host holds without them."""
    needs: int = 0
    """The step's nodes, as bits, that name its parent or its pages: where ranks give up one, this one goes too."""

    @property
    def tail(self) -> HostPage | None:
        """The node's last page in the host."""
        return self.pages[-1] if self.pages else self.above


@attrs.frozen(eq=False)
class CopyStarted:
    """A step's submit is launched. Whoever takes this message owns the staged pages and the claim on them."""

    step: int
    copy: Operation[CopyOutcome]
    staged: Sequence[StagedNode]
    claim: Claim
    done: tuple[NodeId, ...] = ()
    """Nodes of the step that had nothing to copy."""
    failed: tuple[tuple[NodeId, SkipReason], ...] = ()
    missing: Mapping[NodeId, PageKey] = attrs.field(factory=dict[NodeId, PageKey])
    """For nodes that failed as `parent_absent`, the first key that the host lacks of what they hang from."""
    operation: OperationId = ("backup", 0)
    """What ranks agree on for this step."""
    generation: int = 0
    """That of the host's pages when they were staged."""


# To the deposit actor.


@attrs.frozen(eq=False)
class DepositPages:
    """Write these ready pages (parents first) to the store. Whoever takes this message owns the claim."""

    pages: Sequence[HostPage]
    claim: Claim


# To the prefetch actor.


@attrs.frozen
class StartPrefetches:
    """Look up, read and hold the prefixes of these requests."""

    requests: Sequence[PrefetchRequest]
    resets: int = 0


@attrs.frozen
class CancelPrefetches:
    """End what these requests hold, wherever it stands; a request that holds nothing is ignored."""

    request_ids: Sequence[RequestId]


@attrs.frozen
class StopPrefetches:
    """Make these requests do with what has arrived, unless their policy is to wait; those not searching are ignored."""

    request_ids: Sequence[RequestId]


PrefetchOrder: TypeAlias = StartPrefetches | CancelPrefetches | StopPrefetches

# To the restore actor.


@attrs.frozen
class RestoreStep:
    """Copy ready prefixes to the device in one submit that waits, on the device, for the fence."""

    orders: Sequence[RestoreOrder]
    fence: object | None = None
    number: int = 0
    """How many steps with restores the engine has handed over, this one included."""
    resets: int = 0


# To the loop itself: no actor may see an order behind it sooner.


@attrs.frozen(eq=False)
class ResetCaches:
    """Forget every page that was computed before; the `number` of the order counts from 1.

    `clear` empties the store that is attached, `store` takes its place. Without a label nobody is told of the end.
    """

    number: int
    label: RequestId | None = None
    clear: bool = False
    store: Store | None = None


# To the publisher.


@attrs.frozen
class InventoryChanged:
    """Copies came or went: what happened waits in the event feed, in order."""


# Completions: to the engine, through the outbox.


@attrs.frozen
class BackupAck:
    """A step's one submit is over: each of the step's nodes is in `node_ids` or in `failed`, once.

    The device pages of every node named may be changed from now on. `missing` names for each node that failed as
    `parent_absent` the first key of its path that the host is known to lack: write from there. What stands above a
    node's `parent` the controller knows from the step's nodes and the host alone: the next ack may name an earlier key.
    """

    step: int
    node_ids: tuple[NodeId, ...]
    failed: tuple[tuple[NodeId, SkipReason], ...] = ()
    missing: tuple[tuple[NodeId, PageKey], ...] = ()


@attrs.frozen
class PrefetchReady:
    """The prefix of a request stands in host memory up to page `pages` (counted from the root).

    With `account` None a claim holds it until a restore order or a cancel; with an account, nothing beyond the device
    was found, and the prefetch is over.
    """

    request_id: RequestId
    pages: int
    account: RequestAccount | None = None


@attrs.frozen
class RestoreFinished:
    """A restore order is over and its claim released; the device has the prefix up to page `pages`.

    In the pages that the order named it has of each pool what the policies ask for at `pages`; nothing is known of the
    others. `pages` is less than was ordered where the policies allow no longer prefix (see `RestoreOrder`).
    """

    request_id: RequestId
    pages: int
    account: RequestAccount


@attrs.frozen
class PrefetchCancelled:
    """A prefetch ended without a restore: cancelled by the engine, expired, or stopped."""

    request_id: RequestId
    account: RequestAccount


@attrs.frozen
class DepositFailed:
    """Pages that stay out of the store: refused after the last retry, or never offered while the host held them."""

    keys: tuple[PageKey, ...]
    reason: SkipReason


@attrs.frozen
class ResetFinished:
    """A reset is over: nothing that was computed before it is left, but what is named here.

    `host_pages` stood ready in host memory, `store_pages` were cleared from the store; `ended` counts the nodes,
    prefetches and restores that ended with the reason `reset`. `kept` pages are still under a copy that does not end:
    nobody uses them, and their slots come back later. `error` says what of the store, or of other ranks, went wrong.
    """

    label: RequestId
    host_pages: int
    store_pages: int = 0
    ended: int = 0
    kept: int = 0
    error: str | None = None


@attrs.frozen
class ControllerFailed:
    """The last word: the caches must be treated as cold, and nothing that was open before uses memory any more.

    What did not come to its end in time is named in `error`, and may still write its pages. Orders that follow are
    answered at once, as stopped.
    """

    error: str


Completion: TypeAlias = (
    BackupAck | PrefetchReady | RestoreFinished | PrefetchCancelled | DepositFailed | ResetFinished | ControllerFailed
)
