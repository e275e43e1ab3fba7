"""Host memory over buffers of others: the same bytes, and a clear refusal of what does not fit."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from kvcr_actors.errors import ConfigError
from kvcr_actors.host_buffers import POISON_BYTE, HostBuffers
from kvcr_actors.types import CacheLayout, PoolSpec

LAYOUT = CacheLayout((PoolSpec("kv", 2, 8), PoolSpec("state", 1, 3)))


def test_slots_are_views_of_the_buffers_given() -> None:
    array = np.zeros((5, 16), np.uint8)
    mapped = mmap.mmap(-1, 4096)
    host = HostBuffers(LAYOUT, 4, [memoryview(array), mapped])
    host.page(0, 2)[:] = bytes(range(16))
    host.buffer(1)[3:6] = b"abc"
    assert array[2].tolist() == list(range(16))
    assert mapped[3:6] == b"abc"
    assert [len(host.buffer(pool)) for pool in range(2)] == [64, 12]
    host.poison(0, [2])
    assert set(array[2].tolist()) == {POISON_BYTE}
    assert not array[[0, 1, 3, 4]].any()
    with pytest.raises(IndexError, match="slot 4 of 4"):
        host.page(0, 4)


def test_addresses_of_an_engine_are_the_same_memory() -> None:
    kv, state = (ctypes.c_char * 64)(), (ctypes.c_char * 12)()
    host = HostBuffers.at_addresses(LAYOUT, 4, [ctypes.addressof(kv), ctypes.addressof(state)])
    host.page(0, 3)[:] = b"k" * 16
    state[0:3] = b"xyz"
    assert kv.raw == bytes(48) + b"k" * 16
    assert bytes(host.page(1, 0)) == b"xyz"
    with pytest.raises(ConfigError, match="give one for each of 2 pools"):
        HostBuffers.at_addresses(LAYOUT, 4, [ctypes.addressof(kv)])


def test_what_does_not_fit_is_refused_by_pool() -> None:
    good = bytearray(64)
    for buffers, words in (
        ([good], "1 buffers for 2 pools"),
        ([good, bytearray(11)], "pool state: its buffer has 11 bytes; its slots take 12"),
        ([memoryview(bytes(64)), bytearray(12)], "pool kv: its buffer must be writable"),
        ([memoryview(np.zeros((64, 2), np.uint8)[:, :1]), bytearray(12)], "pool kv: its buffer must be writable"),
    ):
        with pytest.raises(ConfigError, match=words):
            HostBuffers(LAYOUT, 4, buffers)
    with pytest.raises(ConfigError, match="slots: 0"):
        HostBuffers(LAYOUT, 0, [good, good])
