"""Restores as the simulated engine orders them, whole or in part, and what must hold of each when it is over.

An engine may want less than stands ready; its own hit may have shrunk since the look-up, or grown; it may name no
device page where a pool needs one, or begin beyond what its device has, which is a mistake of its own. Whatever it
orders, it is told of no page that it cannot run from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs

from kvcr_actors.core.hit_policy import component_masks, needed_masks
from kvcr_actors.messages import RestoreFinished
from kvcr_actors.simulation.checks import ViolationError
from kvcr_actors.simulation.pages import LAYOUT, POOLS
from kvcr_actors.types import NO_SLOT, RestoreOrder

_ALL = (1 << len(LAYOUT.pools)) - 1


@attrs.frozen
class RestorePlan:
    """What is to be ordered of a prefix that stands ready; `masks` are the pools with a device page, for each page."""

    first: int
    masks: Sequence[int]
    device_pages: int | None = None

    def order(self, number: int, ids: Sequence[int]) -> RestoreOrder:
        """The order for these device pages, one a page of the prefix."""
        pages = tuple(
            tuple(page if mask >> pool & 1 else NO_SLOT for page, mask in zip(ids, self.masks, strict=True))
            for pool in POOLS
        )
        return RestoreOrder(number, self.first, pages, self.device_pages)


def whole_plan(held: int, ready: int) -> RestorePlan:
    """All that stands ready beyond what the device has."""
    return RestorePlan(held, (_ALL,) * (ready - held))


def draw_plan(rng: random.Random, held: int, ready: int, shorter: Sequence[int], grown: int) -> RestorePlan:
    """A restore of whatever kind: `shorter` are hits to which the device's own may have shrunk, `grown` is what it is.

    `held` of the `ready` pages were on the device at the look-up.
    """
    first, device_pages, roll = held, None, rng.random()
    if grown > held and roll < 0.6:
        first, device_pages = min(grown, ready), grown
    elif shorter and roll < 0.25:
        first = rng.choice(shorter)
    elif ready > held and roll > 0.97:
        first = rng.randrange(held + 1, ready + 1)
    end = ready if rng.random() < 0.75 else rng.randrange(first, ready + 1)
    masks = [_ALL] * (end - first)
    if rng.random() < 0.3:
        masks = needed_masks(LAYOUT, end)[first:]
    if masks and rng.random() < 0.1:
        masks[rng.randrange(len(masks))] &= ~(1 << rng.choice(POOLS))
    return RestorePlan(first, masks, device_pages)


def own_pages(order: RestoreOrder, held: int) -> int:
    """What the device has before an order, of which it had `held` pages at the look-up."""
    return min(order.first, held if order.device_pages is None else order.device_pages)


def check_restored(rank: int, order: RestoreOrder, held: int, total: int, done: RestoreFinished) -> None:
    """What is told is within the order, has a device page wherever a pool needs one, and is what was accounted for."""
    who = f"rank {rank}: request {order.request_id}"
    own, end = own_pages(order, held), done.pages
    most = order.first + order.count if own == order.first else own
    if not own <= end <= most:
        raise ViolationError(f"{who}: restored up to {end}, between {own} on the device and {most} that were ordered")
    needed = needed_masks(LAYOUT, end)[order.first :]
    for index, (need, given) in enumerate(zip(needed, component_masks(order.pages), strict=False)):
        if need & ~given:
            raise ViolationError(
                f"{who}: restored up to {end}, and page {order.first + index} has no device page in pools "
                f"{need & ~given:b}"
            )
    account = done.account
    asked, used = account.host.queried, account.host.used + account.store.used
    if (asked, used) != (total - own, end - own):
        raise ViolationError(
            f"{who}: restored {own} up to {end} of {total} pages, but {asked} count as asked for and {used} as used"
        )


def check_equal_restores(order: RestoreOrder, held: int, ended: Mapping[int, int]) -> None:
    """Ranks whose copy succeeded end a restore at the same page."""
    if len(set(ended.values()) - {own_pages(order, held)}) > 1:
        raise ViolationError(f"request {order.request_id}: ranks restored up to different pages: {dict(ended)}")
