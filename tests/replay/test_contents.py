from __future__ import annotations

import hashlib

import pytest
import torch

from kvcr_actors.replay.contents import PageContents, verify
from kvcr_actors.types import CacheLayout, PoolSpec

KEYS = [hashlib.sha256(bytes([number])).digest() for number in range(50)]


def contents(*sizes: int, seed: int = 0) -> PageContents:
    return PageContents(CacheLayout(tuple(PoolSpec(f"p{n}", 1, size) for n, size in enumerate(sizes))), seed)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 4096])
def test_pages_have_the_size_of_their_pool_whatever_it_is(size: int) -> None:
    made = contents(size)
    pages = made.expected(0, made.seeds(KEYS))
    assert pages.shape == (len(KEYS), size)
    assert pages.dtype == torch.uint8
    assert pages.is_contiguous()


def test_contents_depend_on_key_pool_position_and_run_only() -> None:
    made = contents(64, 64)
    seeds = made.seeds(KEYS)
    pages = made.expected(0, seeds)
    words = pages.view(torch.int64)
    assert len(set(words.flatten().tolist())) == words.numel()
    assert torch.equal(pages, contents(64, 64).expected(0, seeds))
    assert torch.equal(pages[3:9], made.expected(0, seeds[3:9]))
    assert verify(made.expected(1, seeds), pages) == len(KEYS)
    other_run = contents(64, 64, seed=1)
    assert verify(other_run.expected(0, other_run.seeds(KEYS)), pages) == len(KEYS)


@pytest.mark.parametrize("size", [64, 61])
def test_each_wrong_page_counts_once(size: int) -> None:
    made = contents(size)
    seeds = made.seeds(KEYS)
    pages = made.expected(0, seeds)
    assert made.mismatches(0, seeds, pages) == 0
    pages[4, size - 1] ^= 1
    pages[9] = 0
    assert made.mismatches(0, seeds, pages) == 2
    assert verify(pages, made.expected(0, seeds)) == 2


def test_pages_off_by_one_slot_are_all_wrong() -> None:
    made = contents(64)
    seeds = made.seeds(KEYS)
    assert made.mismatches(0, seeds[:-1], made.expected(0, seeds)[1:]) == len(KEYS) - 1


def test_pages_that_are_views_at_odd_places_compare_too() -> None:
    made = contents(64)
    seeds = made.seeds(KEYS)
    wide = torch.zeros((len(KEYS), 64 + 3), dtype=torch.uint8)
    wide[:, 3:] = made.expected(0, seeds)
    assert verify(wide[:, 3:], made.expected(0, seeds)) == 0


def test_many_pages_are_compared_in_chunks_without_a_gap() -> None:
    made = contents(64 << 10)
    seeds = made.seeds(KEYS)
    pages = made.expected(0, seeds)
    pages[:, -1] ^= 1
    assert made.mismatches(0, seeds, pages) == len(KEYS)


def test_no_pages_are_no_mismatches() -> None:
    made = contents(64)
    seeds = made.seeds([])
    assert made.expected(0, seeds).shape == (0, 64)
    assert made.mismatches(0, seeds, made.expected(0, seeds)) == 0


def test_pages_of_another_shape_are_refused_rather_than_compared() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        verify(torch.zeros((2, 8), dtype=torch.uint8), torch.zeros((1, 8), dtype=torch.uint8))
