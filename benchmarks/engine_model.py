"""A decode step in miniature for `engine_gap`: one CUDA graph with the pools of a hybrid model that it writes into."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.gpu_rig import hybrid_shape
from kvcr_actors.types import NO_SLOT, Components

LANES = 128
SETS = 8
"""Page sets that a lane's turns take in turn: a set is written again eight turns later."""
PAGES = (4, 2, 1)
"""Pages of a node in each pool: full attention, sliding window, recurrent state."""
ROWS = 64
"""Tokens a page."""
SCRATCH_NODES = 64

_HIDDEN = 2048
_FEED = 8192
_LAYERS = 42
_STATE_WORDS = 2048


class DecodeModel:
    """Random weights in bf16, `LANES` sequences, and every step's KV rows written into the lanes' pages."""

    def __init__(self, target_ms: float) -> None:
        self.shape = hybrid_shape()
        self.device = torch.device("cuda", 0)
        nodes = LANES * SETS + SCRATCH_NODES
        self.pools = [
            torch.randint(0, 256, (spec.planes, nodes * count, spec.plane_bytes), dtype=torch.uint8, device=self.device)
            for spec, count in zip(self.shape.layout.pools, PAGES, strict=True)
        ]
        scale = _HIDDEN**-0.5
        self._up = [self._weights(_HIDDEN, _FEED, scale) for _ in range(_LAYERS)]
        self._down = [self._weights(_FEED, _HIDDEN, _FEED**-0.5) for _ in range(_LAYERS)]
        self._kv = self._weights(_HIDDEN, 128 * (14 + 70), scale)
        self._hidden = torch.randn(LANES, _HIDDEN, device=self.device, dtype=torch.bfloat16)
        self._rows = [torch.zeros(LANES, dtype=torch.int64, device=self.device) for _ in PAGES]
        self._pinned = torch.zeros((len(PAGES), LANES), dtype=torch.int64).pin_memory()
        self.graph = torch.cuda.CUDAGraph()
        self.passes = 1
        self.step_ms = 0.0
        self._calibrate(target_ms)

    def begin(self, turns: torch.Tensor, ages: torch.Tensor) -> None:
        """Say where the lanes write from the next step on (int64 on the CPU, one a lane); the graph moves rows on.

        Ordered before the next step on the current stream.
        """
        nodes = torch.arange(LANES) * SETS + turns % SETS
        for pool, count in enumerate(PAGES):
            row = nodes if count == 1 else (nodes * count + ages // ROWS % count) * ROWS + ages % ROWS
            self._pinned[pool].copy_(row)
            self._rows[pool].copy_(self._pinned[pool], non_blocking=True)

    @staticmethod
    def node_pages(lane: int, turn: int) -> Components:
        """The device pages of a finished turn: sliding window and state only at its end."""
        return _components(lane * SETS + turn % SETS)

    @staticmethod
    def scratch_pages(index: int) -> Components:
        """Device pages that no lane uses, for restores."""
        return _components(LANES * SETS + index)

    def differing_pools(self, node: int, scratch: int) -> list[str]:
        """The pools in which a node's bytes and a scratch node's differ, of the pages that a backup keeps."""
        pairs = zip(self.pools, _components(node), _components(LANES * SETS + scratch), strict=True)
        names = [spec.name for spec in self.shape.layout.pools]
        return [name for name, (pool, one, other) in zip(names, pairs, strict=True) if not _equal(pool, one, other)]

    def _weights(self, rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16) * scale

    def _forward(self) -> None:
        hidden = self._hidden
        for _ in range(self.passes):
            for up, down in zip(self._up, self._down, strict=True):
                hidden = torch.nn.functional.rms_norm(hidden + torch.relu(hidden @ up) @ down, (_HIDDEN,))
        self._hidden.copy_(hidden)
        rows = (hidden @ self._kv).view(LANES, -1, 128).transpose(0, 1)
        full, window = self.pools[0].view(torch.bfloat16), self.pools[1].view(torch.bfloat16)
        full.view(14, -1, 128).index_copy_(1, self._rows[0], rows[:14].contiguous())
        window.view(70, -1, 128).index_copy_(1, self._rows[1], rows[14:].contiguous())
        state = self.pools[2].view(torch.bfloat16)[:, :, :_STATE_WORDS]
        self._rows[0].add_(1)
        self._rows[1].add_(1)
        state.index_copy_(1, self._rows[2], hidden[None, :, :_STATE_WORDS].expand(2, -1, -1).contiguous())

    def _calibrate(self, target_ms: float) -> None:
        """Capture the graph with as many passes over the layers as come nearest to the target."""
        one = self._capture_and_time()
        self.passes = 2
        two = self._capture_and_time()
        self.passes = max(1, round(1 + (target_ms - one) / max(two - one, 1e-3)))
        self.step_ms = self._capture_and_time()

    def _capture_and_time(self) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._forward()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(5):
            self.graph.replay()
        begin.record()
        for _ in range(20):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 20


def _components(node: int) -> Components:
    full = tuple(range(node * 4, node * 4 + 4))
    window = (NO_SLOT, NO_SLOT, node * 2, node * 2 + 1)
    state = (NO_SLOT, NO_SLOT, NO_SLOT, node)
    return full, window, state


def _equal(pool: torch.Tensor, one: Sequence[int], other: Sequence[int]) -> bool:
    kept = [[page for page in pages if page != NO_SLOT] for pages in (one, other)]
    return torch.equal(pool[:, kept[0]], pool[:, kept[1]])
