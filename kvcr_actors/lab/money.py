"""What memory is worth: a budget split between host and disk, in seconds of prefill that hits save.

A hit saves the prefill of its page and costs its transfer, from the tier that has it. The tiers are those of the
sequential replay: they share recency, and the store has all that the host has. So the host finds what an LRU of its
size finds, and both together what an LRU of the larger of the two finds; a disk no larger than the host adds nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import attrs

from kvcr_actors.errors import ConfigError
from kvcr_actors.lab.stack import LruCurve
from kvcr_actors.replay.trace import BLOCK_TOKENS

GIB: Final = 1 << 30

MODELS: Final[Mapping[str, int]] = {
    "llama-3.1-8b": 32 * 2 * 8 * 128 * 2,
    "llama-3.1-70b": 80 * 2 * 8 * 128 * 2,
    "llama-3.1-405b": 126 * 2 * 8 * 128 * 2,
    "qwen2.5-7b": 28 * 2 * 4 * 128 * 2,
    "qwen3-32b": 64 * 2 * 8 * 128 * 2,
    "deepseek-v3": 61 * (512 + 64) * 2,
}
"""Bytes of KV cache a token, at two bytes a number: layers x (K and V) x heads x size; one latent for MLA."""


def page_bytes(model: str, page_tokens: int = BLOCK_TOKENS) -> int:
    """Give the bytes of a page of a model: a name of `MODELS`, or LAYERSxHEADSxSIZE of its K and V at two bytes."""
    shape = re.fullmatch(r"(\d+)x(\d+)x(\d+)", model)
    if shape is not None:
        layers, heads, size = map(int, shape.groups())
        token = layers * 2 * heads * size * 2
    else:
        token = MODELS.get(model, 0)
    if not token:
        known = ", ".join(MODELS)
        raise ConfigError(f"model: {model!r} is not known; use {known}, or LAYERSxHEADSxSIZE such as 32x8x128")
    return token * page_tokens


def _check_positive(costs: object, field: attrs.Attribute[Any], value: object) -> None:
    if not cast("float", value) > 0:
        raise ConfigError(f"{field.name}: {value!r} is not a number above 0")


@attrs.frozen
class Costs:
    """What a page weighs and what moving or computing it takes."""

    page_bytes: int = attrs.field(validator=_check_positive)
    page_tokens: int = attrs.field(default=BLOCK_TOKENS, validator=_check_positive)
    prefill_tokens_s: float = attrs.field(default=10_000.0, validator=_check_positive)
    """Tokens a second that the engine computes."""
    host_gb_s: float = attrs.field(default=25.0, validator=_check_positive)
    """Host to device, in 10**9 bytes a second."""
    disk_gb_s: float = attrs.field(default=3.0, validator=_check_positive)
    """Store to host."""
    disk_price: float = attrs.field(default=1.0, validator=_check_positive)
    """What a GiB of disk costs, in GiB of host memory: budgets are in those."""

    def pages(self, gib: float) -> int:
        """Pages that fit a size."""
        return int(gib * GIB // self.page_bytes)

    def saved_s(self, host_hits: int, disk_hits: int) -> float:
        """Seconds that hits save; a transfer that takes longer than the prefill saves none."""
        prefill = self.page_tokens / self.prefill_tokens_s
        from_host = self.page_bytes / (self.host_gb_s * 1e9)
        from_disk = from_host + self.page_bytes / (self.disk_gb_s * 1e9)
        return host_hits * max(0.0, prefill - from_host) + disk_hits * max(0.0, prefill - from_disk)


@attrs.frozen
class Split:
    """A budget's share of each tier, what they find, and what that saves over the trace."""

    host_gib: float
    disk_gib: float
    host_hits: int
    disk_hits: int
    saved_s: float


def split(curve: LruCurve, costs: Costs, host_gib: float, disk_gib: float) -> Split:
    """Say what a host and a disk of these sizes find together. Without a host the disk cannot be reached."""
    host, disk = costs.pages(host_gib), costs.pages(disk_gib)
    host_hits = curve.at(host)
    disk_hits = curve.at(max(host, disk)) - host_hits if host else 0
    return Split(host_gib, disk_gib, host_hits, disk_hits, costs.saved_s(host_hits, disk_hits))


def splits(curve: LruCurve, costs: Costs, budget_gib: float, steps: int = 8) -> Sequence[Split]:
    """Split a budget (GiB of host memory, or disk at its price) in `steps` steps: from nearly all disk to all host.

    The first has a host of half a step, since a disk needs one.
    """
    if not budget_gib > 0:
        raise ConfigError(f"budget: {budget_gib!r} is not a number of GiB above 0")
    shares = [0.5 / steps, *(step / steps for step in range(1, steps + 1))]
    return [split(curve, costs, budget_gib * share, budget_gib * (1 - share) / costs.disk_price) for share in shares]


def best(options: Sequence[Split]) -> Split:
    """The split that saves most; of equals the one with the most host memory."""
    return max(options, key=lambda option: (option.saved_s, option.host_gib))


def next_gib(curve: LruCurve, costs: Costs, now: Split) -> tuple[float, float]:
    """Seconds over the trace that one more GiB of host saves, and one more GiB of disk."""
    host = split(curve, costs, now.host_gib + 1, now.disk_gib)
    disk = split(curve, costs, now.host_gib, now.disk_gib + 1)
    return host.saved_s - now.saved_s, disk.saved_s - now.saved_s


def tier_hits(curve: LruCurve, capacities: Sequence[int]) -> Sequence[int]:
    """Hits of each tier, first to last (device, host, store), that share recency: what those before it did not find."""
    found: list[int] = []
    largest = 0
    for capacity in capacities:
        largest = max(largest, capacity)
        found.append(curve.at(largest) - sum(found))
    return found
