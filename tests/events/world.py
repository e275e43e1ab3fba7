"""A cache of three tiers in miniature, its publisher, and readers behind a network that loses what it is told to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from kvcr_actors.core.inventory import BlocksRemoved, BlocksStored, InventoryEvent, Ownership, TierCleared
from kvcr_actors.core.keys import chain_seed, page_key, router_key
from kvcr_actors.events.contexts import ContextTable
from kvcr_actors.events.follower import StreamFollower, WireIndex
from kvcr_actors.events.stream import EventStream, Message, StreamLimits
from kvcr_actors.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Dialect,
    WireEvent,
    WireHash,
    find_dialect,
    tier_of,
)
from kvcr_actors.types import PageContext, PageKey, Tier

ENGINE, STORE = Ownership.ENGINE, Ownership.STORE
PAGE_TOKENS = 2


class PageForest:
    """Pages of a few prompts that share prefixes: each has a parent, tokens and a context."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self.parents: dict[PageKey, PageKey | None] = {}
        self.tokens: dict[PageKey, tuple[int, ...]] = {}
        seed = chain_seed(page_tokens=PAGE_TOKENS)
        keys: list[PageKey] = []
        while len(keys) < count:
            parent = rng.choice([None, *keys[-6:], *keys[-6:]])
            tokens = (rng.randrange(1 << 32), len(keys))
            key = page_key(parent or seed, tokens)
            self.parents[key], self.tokens[key] = parent, tokens
            keys.append(key)
        self.keys = keys

    def note(self, table: ContextTable, keys: Iterable[PageKey]) -> None:
        for key in keys:
            table.note([key], PageContext(self.tokens[key], PAGE_TOKENS))


class TreeIndex(WireIndex):
    """A stricter reader, as routers are: device blocks form a tree, and lose what hangs from a removed block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner_removals = 0

    def apply(self, event: WireEvent) -> None:
        match event:
            case BlockStored() if tier_of(event.medium) is Tier.DEVICE:
                held = self.content.setdefault((Tier.DEVICE, event.ownership), {})
                if event.parent_block_hash is not None and event.parent_block_hash not in held:
                    return
                parent = event.parent_block_hash
                for block in event.block_hashes:
                    held[block] = parent
                    parent = block
            case BlockRemoved() if tier_of(event.medium) is Tier.DEVICE:
                held = self.content.setdefault((Tier.DEVICE, event.ownership), {})
                for block in event.block_hashes:
                    self._detach(held, block)
            case BlockStored() | BlockRemoved() | AllBlocksCleared():
                super().apply(event)

    def _detach(self, held: dict[WireHash, WireHash | None], block: WireHash) -> None:
        for child in [child for child, parent in held.items() if parent == block]:
            self.inner_removals += 1
            self._detach(held, child)
        held.pop(block, None)


class World:
    """Holds the truth, publishes it, and lets readers follow."""

    def __init__(
        self,
        seed: int,
        *,
        pages: int = 24,
        limits: StreamLimits | None = None,
        dialect: str = "dynamo",
        known: bool = True,
    ) -> None:
        self.rng = random.Random(seed)
        self.forest = PageForest(pages, self.rng)
        self.contexts = ContextTable()
        self.known = known
        if known:
            self.forest.note(self.contexts, self.forest.keys)
        self.truth: dict[tuple[Tier, Ownership], dict[PageKey, PageKey | None]] = {}
        self.dialect: Dialect = find_dialect(dialect)
        self.limits = limits or StreamLimits(snapshot_pause_s=0.0)
        self.number = 0
        self.now = 0.0
        self.stream = self._new_stream()
        self.tree = TreeIndex()
        self.readers = [StreamFollower(can_replay=True), StreamFollower(can_replay=True, index=self.tree)]
        self.evicted_inner = False
        self.dropped = 0
        self.lose: Callable[[], bool] = lambda: False

    def _new_stream(self) -> EventStream:
        return EventStream(self.dialect, self.contexts, self._take_number, limits=self.limits)

    def _take_number(self) -> int:
        self.number += 1
        return self.number - 1

    def held(self, tier: Tier, owner: Ownership = ENGINE) -> dict[PageKey, PageKey | None]:
        return self.truth.setdefault((tier, owner), {})

    def store(self, tier: Tier, count: int, owner: Ownership = ENGINE) -> None:
        """Some pages come to a tier, in one event that names them in any order; a tree grows from its roots."""
        held = self.held(tier, owner)
        new: list[PageKey] = []
        for _ in range(count):
            absent = [
                key
                for key in self.forest.keys
                if key not in held and (tier is not Tier.DEVICE or self.forest.parents[key] in (None, *held))
            ]
            if absent:
                new.append(self.rng.choice(absent))
                held[new[-1]] = self.forest.parents[new[-1]]
        if new:
            if not self.known:  # a prompt's event may name again what it shares with others
                new += self.rng.sample([key for key in held if key not in new], (len(held) - len(new)) // 2)
            self.rng.shuffle(new)
            self.publish([BlocksStored(tier, tuple(new), tuple(held[key] for key in new), owner)])

    def evict(self, tier: Tier, count: int, owner: Ownership = ENGINE, *, leaves: bool = True) -> None:
        held = self.held(tier, owner)
        gone: list[PageKey] = []
        self.evicted_inner |= not leaves and tier is Tier.DEVICE
        for _ in range(min(count, len(held))):
            inner = set(held.values()) if leaves else set()
            gone.append(self.rng.choice([key for key in held if key not in inner]))
            del held[gone[-1]]
        if gone:
            self.rng.shuffle(gone)
            self.publish([BlocksRemoved(tier, tuple(gone), owner)])

    def clear(self, tier: Tier, owner: Ownership = ENGINE) -> None:
        self.held(tier, owner).clear()
        self.publish([TierCleared(tier, owner)])

    def learn(self, count: int) -> None:
        """It becomes known what some pages were computed from."""
        self.forest.note(self.contexts, self.rng.sample(self.forest.keys, count))

    def name_again(self) -> None:
        """Everything is known, and events name all that is held, in any order."""
        self.forest.note(self.contexts, self.forest.keys)
        for (tier, owner), held in self.truth.items():
            keys = self.rng.sample(list(held), len(held))
            for start in range(0, len(keys), 5):
                part = tuple(keys[start : start + 5])
                self.publish([BlocksStored(tier, part, tuple(held[key] for key in part), owner)])
                self.send(1 << 30)

    def publish(self, events: Sequence[InventoryEvent]) -> None:
        self.stream.push(events)

    def restart(self) -> None:
        """The process dies and comes back: memory is empty, what the store kept is announced anew."""
        for (tier, owner), held in self.truth.items():
            if tier is not Tier.STORE:
                held.clear()
            del owner
        self.number += self.rng.randrange(5)
        self.dropped += self.stream.backlog.dropped
        self.stream = self._new_stream()
        for (tier, owner), held in self.truth.items():
            if held:
                self.publish([BlocksStored(tier, tuple(held), tuple(held.values()), owner)])

    def send(self, most: int) -> None:
        """Send some batches, each reader losing some."""
        self.now += 1.0
        for _ in range(most):
            message = self.stream.next_message(self.now, 0.0)
            if message is None:
                return
            self.deliver(message)

    def deliver(self, message: Message) -> None:
        for reader in self.readers:
            if not self.lose():
                self._give(reader, message)

    def _give(self, reader: StreamFollower, message: Message) -> None:
        start = reader.receive(*message)
        if start is None:
            return
        if not self.stream.covers(start):
            self.stream.ask_snapshot()
        for replayed in self.stream.replay(start, 1 << 30):
            reader.replayed(*replayed)
        reader.end_replay()

    def settle(self) -> None:
        """The network is whole again, and everything is sent; a heartbeat shows what was lost last."""
        self.lose = lambda: False
        self.send(1 << 30)
        self.deliver(self.stream.heartbeat(0.0))
        self.now += 10_000.0
        self.send(1 << 30)
        if not self.known:
            self.name_again()

    def expected(self, tier: Tier, owner: Ownership = ENGINE) -> set[int]:
        return {self.dialect.block_hash(router_key(key)) for key in self.held(tier, owner)}

    def reachable(self) -> set[int]:
        """Device pages whose whole path is there: all that a tree can hold."""
        held = self.held(Tier.DEVICE)
        whole: set[PageKey | None] = {None}
        for key in self.forest.keys:
            if key in held and self.forest.parents[key] in whole:
                whole.add(key)
        return {self.dialect.block_hash(router_key(key)) for key in whole if key is not None}

    def assert_followed(self) -> None:
        flat, tree = self.readers[0].index, self.tree
        for tier in Tier:
            for owner in Ownership:
                word = self.dialect.owner(owner)
                assert flat.keys(tier, word) == self.expected(tier, owner), (tier, owner)
                if tier is not Tier.DEVICE:
                    assert tree.keys(tier, word) == self.expected(tier, owner), (tier, owner)
        assert tree.keys(Tier.DEVICE) == self.reachable()
        # A removal that was dropped leaves its block there until the snapshot.
        assert self.evicted_inner or self.dropped or self.stream.backlog.dropped or not tree.inner_removals
        assert not any(reader.in_doubt for reader in self.readers)
