"""What must hold of a controller once it is quiet, whatever went wrong: claims, memory, answers, accounts, events.

An `OrderBook` notes the orders that a test gives; `check_invariants` compares them with the completions that came back
and with the state that is left. Each broken invariant is an AssertionError that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import attrs

from kvcr_actors.aio import AsyncController
from kvcr_actors.assembly import Assembly
from kvcr_actors.controller import CacheController
from kvcr_actors.core.accounting import RequestAccount
from kvcr_actors.core.inventory import InventoryIndex
from kvcr_actors.core.ledger import ClaimState
from kvcr_actors.core.stats import ControllerStats, TierTotals
from kvcr_actors.messages import (
    BackupAck,
    Completion,
    PrefetchCancelled,
    PrefetchReady,
    ResetFinished,
    RestoreFinished,
)
from kvcr_actors.types import BackupNode, MissReason, NodeId, PrefetchRequest, RequestId, RestoreOrder, Tier

Subject: TypeAlias = Assembly | AsyncController | CacheController


@attrs.define
class OrderBook:
    """The orders given so far. A request id stands for one prefetch, and one restore at most, at a time."""

    steps: dict[int, tuple[NodeId, ...]] = attrs.field(factory=dict[int, tuple[NodeId, ...]])
    requests: dict[RequestId, PrefetchRequest] = attrs.field(factory=dict[RequestId, PrefetchRequest])
    restores: dict[RequestId, RestoreOrder] = attrs.field(factory=dict[RequestId, RestoreOrder])
    resets: list[RequestId] = attrs.field(factory=list[RequestId])

    def step(self, step: int | None, nodes: Iterable[BackupNode]) -> None:
        """Note the nodes of a flush that returned `step`; None notes nothing."""
        if step is not None:
            self.steps[step] = tuple(node.node_id for node in nodes)

    def prefetch(self, request: PrefetchRequest) -> None:
        """Note a prefetch."""
        self.requests[request.request_id] = request

    def restore(self, order: RestoreOrder) -> None:
        """Note a restore."""
        self.restores[order.request_id] = order


def check_invariants(
    subject: Subject,
    orders: OrderBook,
    completions: Sequence[Completion],
    *,
    index: InventoryIndex | None = None,
    stats: ControllerStats | None = None,
    quiet: bool = True,
) -> None:
    """Check everything, for a controller whose actors are quiet or closed and that holds no ready prefix.

    `completions` are all that were taken since the start, in order. `index` is a sink that heard all events. `stats`
    are the controller's counters with the desk's, read from the subject unless it is an `Assembly`. With `quiet=False`
    a device or store still works on memory: what it works on may be quarantined, and nothing else.
    """
    assembly = subject if isinstance(subject, Assembly) else subject._assembly  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    check_claims(assembly, quiet=quiet)
    check_host(assembly, quiet=quiet)
    check_answers(orders, completions, quiet=quiet)
    if stats is None and not isinstance(subject, Assembly):
        stats = subject.stats
    if stats is not None:
        check_accounts(completions, stats)
    if index is not None:
        check_events(assembly, index)


def check_claims(assembly: Assembly, *, quiet: bool = True) -> None:
    """Each claim was released once; none is open but those on memory that is not quiet."""
    ledger = assembly.ledger
    if ledger.taken != ledger.released + ledger.open:
        raise AssertionError(f"claims: {ledger.taken} taken, {ledger.released} released, {ledger.open} open")
    if ledger.refused:
        raise AssertionError(f"claims: {ledger.refused} uses after the release")
    if quiet and ledger.open:
        raise AssertionError(f"claims left open though all is quiet: {ledger.open_claims()}")
    if quiet and (ledger.quarantined or ledger.quarantined_bytes):
        raise AssertionError(f"quarantine: {ledger.quarantined} claims, {ledger.quarantined_bytes} bytes, all is quiet")
    claims = ledger.open_claims()
    quarantined = [claim for claim in claims if claim.state is ClaimState.QUARANTINED]
    if sum(claim.quarantined_bytes for claim in quarantined) != ledger.quarantined_bytes:
        raise AssertionError(f"{ledger.quarantined_bytes} bytes count as quarantined, but: {claims}")
    # A restore that is not quiet keeps the prefixes that it copies from, too.
    kept = "prefetch" if any(claim.kind == "restore" for claim in quarantined) else None
    if lost := [claim for claim in claims if claim not in quarantined and claim.kind != kept]:
        raise AssertionError(f"claims are open on memory that nothing works on: {lost}")


def check_host(assembly: Assembly, *, quiet: bool = True) -> None:
    """Slots, pages and counts agree; nothing is half filled or pinned without a claim."""
    host = assembly.host
    host.check()
    if quiet and host.forgotten_pages:
        raise AssertionError(f"{host.forgotten_pages} forgotten pages keep their slots, though nothing works on them")
    if quiet and host.filling_pages:
        raise AssertionError(f"{host.filling_pages} host pages are still filling, though nothing fills them")
    pages = [host.get(key) for key in host.contents()]
    pinned = [page for page in pages if page is not None and page.pins]
    if quiet and pinned:
        raise AssertionError(f"host pages are pinned without a claim: {pinned}")
    if assembly.store is not None:
        held = assembly.store.contents()
        wrong = [page for page in pages if page is not None and page.stored and page.key not in held]
        if wrong:
            raise AssertionError(f"host pages are believed to be in the store, which lacks them: {wrong}")


def check_answers(orders: OrderBook, completions: Sequence[Completion], *, quiet: bool = True) -> None:
    """Each order ended in exactly one completion, and no completion came without an order."""
    _check_once("reset", orders.resets, [one.label for one in completions if isinstance(one, ResetFinished)])
    acks = [completion for completion in completions if isinstance(completion, BackupAck)]
    _check_once("step", orders.steps, [ack.step for ack in acks])
    for ack in acks:
        named = Counter([*ack.node_ids, *(node for node, _ in ack.failed)])
        if named != Counter(orders.steps[ack.step]):
            raise AssertionError(f"step {ack.step}: nodes {orders.steps[ack.step]} were answered by {ack}")
    endings: list[RequestId] = []
    ready: set[RequestId] = set()
    for completion in completions:
        match completion:
            case PrefetchReady(account=None):
                if completion.request_id in ready or completion.request_id in endings:
                    raise AssertionError(f"request {completion.request_id} became ready twice, or after its end")
                ready.add(completion.request_id)
            case RestoreFinished():
                if completion.request_id not in orders.restores or completion.request_id not in ready:
                    raise AssertionError(f"a restore finished that nobody asked for: {completion}")
                endings.append(completion.request_id)
            case PrefetchReady() | PrefetchCancelled():
                endings.append(completion.request_id)
            case _:
                pass
    # A restore is over only when its copy is quiet: until then the engine must not touch the device pages.
    open_restores: Iterable[RequestId] = () if quiet else [key for key in orders.restores if key not in endings]
    _check_once("request", orders.requests, [*endings, *open_restores])


def check_accounts(completions: Sequence[Completion], stats: ControllerStats) -> None:
    """In each account and in the sums every page has one answer; the counters are the sums of the accounts."""
    host, store, reasons = TierTotals(), TierTotals(), Counter[MissReason]()
    for account in _accounts(completions):
        for tier in (account.host, account.store):
            if tier.queried != tier.used + sum(tier.reasons.values()):
                raise AssertionError(f"an account does not balance: {account}")
        if account.host.queried != account.host.used + account.store.used + sum(account.reasons.values()):
            raise AssertionError(f"pages of an account have no terminal answer, or two: {account}")
        host.add(account.host)
        store.add(account.store)
        reasons.update(account.reasons)
    for name, told, counted in (("host", host, stats.host), ("store", store, stats.store)):
        if told != counted:
            raise AssertionError(f"{name}: the accounts sum up to {told}, but {counted} was counted")
    if reasons != stats.reasons:
        raise AssertionError(f"the accounts' reasons {reasons} are not those counted, {stats.reasons}")
    prefetch = stats.prefetch
    open_restores = prefetch.started - prefetch.used - prefetch.cancelled - prefetch.failed
    if open_restores < 0:
        raise AssertionError(f"more prefetches ended than were started: {prefetch}")
    skipped = sum(len(ack.failed) for ack in completions if isinstance(ack, BackupAck))
    if skipped != stats.backup.skipped.total():
        raise AssertionError(f"{skipped} nodes failed, but {stats.backup.skipped} were counted")


def check_events(assembly: Assembly, index: InventoryIndex) -> None:
    """An index built from the events alone has the content of host and store, and saw nothing impossible."""
    if index.anomalies:
        raise AssertionError(f"{index.anomalies} events stored a key twice, or removed an absent one")
    contents = {Tier.HOST: assembly.host.contents()}
    if assembly.store is not None:
        contents[Tier.STORE] = assembly.store.contents()
    for tier, held in contents.items():
        told = index.residents(tier)
        if told != held:
            more, less = told - held, held - told
            raise AssertionError(f"{tier}: the events tell of {len(more)} pages too many and {len(less)} too few")


def _accounts(completions: Sequence[Completion]) -> Iterable[RequestAccount]:
    for completion in completions:
        match completion:
            case PrefetchReady(account=RequestAccount() as account):
                yield account
            case PrefetchCancelled(account=account) | RestoreFinished(account=account):
                yield account
            case _:
                pass


def _check_once(what: str, given: Iterable[RequestId], answered: Sequence[RequestId]) -> None:
    counts = Counter(answered)
    twice = [key for key, count in counts.items() if count > 1]
    missing = [key for key in given if key not in counts]
    strangers = [key for key in counts if key not in set(given)]
    if twice or missing or strangers:
        raise AssertionError(f"{what}s answered twice {twice}, never {missing}, without an order {strangers}")
