"""How a page's components lie in the runner's pools: labels, references and addresses of their spans."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from functools import cache

import attrs
from kvcr.types import MemoryRef, RegionDescriptor

from kvcr_actors import NO_SLOT, CacheLayout, Components, ConfigError
from kvcr_actors.ports import HostMemory
from kvcr_actors_kvcr.block_keys import bits
from kvcr_actors_kvcr.pool_memory import PoolMemory, address_of

DIGEST_POOL = "page-digest"
DIGEST_BYTES = 32


@attrs.frozen
class Span:
    """One transfer element of a page: part `part` of pool `pool`, `size` bytes under the runner's label."""

    pool: int
    part: int
    size: int
    label: str


def page_spans(layout: CacheLayout, counts: Mapping[str, int]) -> tuple[tuple[Span, ...], ...]:
    """For each pool the spans of its component, equal parts in order; ConfigError if they do not divide it."""
    unknown = sorted(set(counts) - {pool.name for pool in layout.pools})
    if unknown:
        names = ", ".join(pool.name for pool in layout.pools)
        raise ConfigError(f"store kvcr: option spans names the pool {unknown[0]!r}; the layout has {names}")
    pools: list[tuple[Span, ...]] = []
    for index, pool in enumerate(layout.pools):
        count = counts.get(pool.name, 1)
        size, rest = divmod(pool.page_bytes, count)
        if rest:
            raise ConfigError(
                f"store kvcr: option spans: {count} spans do not divide {pool.name}'s {pool.page_bytes} bytes"
            )
        labels = [pool.name] if count == 1 else [f"{pool.name}:{part}" for part in range(count)]
        pools.append(tuple(Span(index, part, size, label) for part, label in enumerate(labels)))
    return tuple(pools)


class PageLayout:
    """The layout of one store: every conversion between host slots, pool slots and the runner's references.

    Lives on the owner thread; host memory and pools stay alive as long as it does.
    """

    def __init__(
        self, layout: CacheLayout, host: HostMemory, agent: str, *, counts: Mapping[str, int], digests: int = 0
    ) -> None:
        self.spans = page_spans(layout, counts)
        self._agent = agent
        self._names = tuple(pool.name for pool in layout.pools)
        self._page_bytes = tuple(pool.page_bytes for pool in layout.pools)
        self._slots = host.slots
        self._buffers = tuple(host.buffer(pool) for pool in range(len(layout.pools)))
        self._host = tuple(map(address_of, self._buffers))
        self._pools: dict[str, int] = {}
        self._digests = bytearray(max(1, digests) * DIGEST_BYTES)
        self._digest_slots = digests
        self.labels = cache(self._labels)

    @property
    def pool_layouts(self) -> list[tuple[str, int]]:
        """Name and element size of each of the runner's pools; peers must agree on them."""
        sizes = [(name, spans[0].size) for name, spans in zip(self._names, self.spans, strict=True)]
        return [*sizes, (DIGEST_POOL, DIGEST_BYTES)] if self._digest_slots else sizes

    def framework_regions(self) -> list[RegionDescriptor]:
        """The host pools, and the digests' staging area, as the runner registers them."""
        regions: list[RegionDescriptor] = []
        for name, spans, address in zip(self._names, self.spans, self._host, strict=True):
            label = name if len(spans) == 1 else f"{name}:*"
            count = self._slots * len(spans)
            regions.append(RegionDescriptor(addr=address, size=spans[0].size, count=count, label=label))
        if self._digest_slots:
            address = address_of(memoryview(self._digests))
            regions.append(
                RegionDescriptor(addr=address, size=DIGEST_BYTES, count=self._digest_slots, label=DIGEST_POOL)
            )
        return regions

    def sizes_for(self, blocks: int) -> dict[str, int]:
        """Bytes that each of the runner's pools takes for so many pages."""
        sizes = {name: blocks * size for name, size in zip(self._names, self._page_bytes, strict=True)}
        return sizes | ({DIGEST_POOL: blocks * DIGEST_BYTES} if self._digest_slots else {})

    def attach(self, pools: Mapping[str, PoolMemory]) -> None:
        """Take the addresses of the runner's pools, for reads."""
        self._pools = {name: pool.address for name, pool in pools.items()}

    def _labels(self, mask: int) -> list[str]:
        """The labels of a block of these pools, in the order in which it is stored."""
        labels = [span.label for pool in bits(mask) for span in self.spans[pool]]
        return [*labels, DIGEST_POOL] if self._digest_slots else labels

    def references(self, mask: int, slots: Components, index: int, digest_slot: int | None = None) -> list[MemoryRef]:
        """The host spans of page `index` of a batch, in the order of `labels`."""
        refs: list[MemoryRef] = []
        for pool in bits(mask):
            spans = self.spans[pool]
            first = int(slots[pool][index]) * len(spans)
            refs.extend(
                MemoryRef(end_point_name=self._agent, label=span.label, element_index=first + span.part)
                for span in spans
            )
        if digest_slot is not None:
            refs.append(MemoryRef(end_point_name=self._agent, label=DIGEST_POOL, element_index=digest_slot))
        return refs

    def moves(
        self, mask: int, slots: Components, index: int, stored: list[MemoryRef]
    ) -> Iterator[tuple[int, int, int]]:
        """(host address, pool address, bytes) of the spans wanted (`mask`) of a block fetched to `stored`."""
        where = {ref.label: ref.element_index for ref in stored}
        for pool in bits(mask):
            spans = self.spans[pool]
            base = self._host[pool] + int(slots[pool][index]) * self._page_bytes[pool]
            source = self._pools[self._names[pool]]
            for span in spans:
                yield base + span.part * span.size, source + where[span.label] * span.size, span.size

    def host_view(self, pool: int, slot: int) -> memoryview:
        """The host bytes of one component."""
        size = self._page_bytes[pool]
        return self._buffers[pool][slot * size : (slot + 1) * size]

    def pool_bytes_of(self, pool: int, stored: list[MemoryRef]) -> bytes:
        """The bytes of one component of a fetched block, as they lie in the runner's pool."""
        where = {ref.label: ref.element_index for ref in stored}
        base = self._pools[self._names[pool]]
        parts = [ctypes.string_at(base + where[span.label] * span.size, span.size) for span in self.spans[pool]]
        return b"".join(parts)

    def stored_digest(self, stored: list[MemoryRef]) -> bytes:
        """The digest that lies beside a fetched block."""
        index = next(ref.element_index for ref in stored if ref.label == DIGEST_POOL)
        return ctypes.string_at(self._pools[DIGEST_POOL] + index * DIGEST_BYTES, DIGEST_BYTES)

    def digest_view(self, digest_slot: int) -> memoryview:
        """A slot of the staging area for digests, writable."""
        return memoryview(self._digests)[digest_slot * DIGEST_BYTES : (digest_slot + 1) * DIGEST_BYTES]

    def page_bytes(self, mask: int) -> int:
        """Bytes of a page's pools."""
        return sum(self._page_bytes[pool] for pool in bits(mask))


def batch_mask(slots: Components, index: int) -> int:
    """The bit set of the pools that a batch names for its page `index`."""
    return sum(1 << pool for pool, chosen in enumerate(slots) if chosen[index] != NO_SLOT)
