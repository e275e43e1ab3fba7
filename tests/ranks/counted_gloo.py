"""Counts every collective that this process asks of gloo, whoever asks: its kind, its size and its thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
import torch.distributed as dist

from kvcr_actors.core.rounds import OperationTable
from kvcr_actors.ranks import _gloo

_WORDS = ("all", "barrier", "broadcast", "gather", "monitored", "recv", "reduce", "scatter", "send")
_KINDS = [name for name in dir(dist.ProcessGroupGloo) if name.lstrip("_").startswith(_WORDS)]


@attrs.define
class Calls:
    """The collectives of one life."""

    collectives: Counter[tuple[str, int]] = attrs.field(factory=Counter)
    """By kind and the bytes of all its tensors."""
    threads: Counter[tuple[str, int]] = attrs.field(factory=Counter)
    """By the name and the number of the thread that asked."""
    open: Counter[int] = attrs.field(factory=Counter)
    """Rounds, by how many operations this rank had open."""


calls = Calls()


class CountedGloo(dist.ProcessGroupGloo):
    """A process group that notes each collective before it makes it."""


def _counted(kind: str) -> Callable[..., Any]:
    original = getattr(dist.ProcessGroupGloo, kind)

    def call(group: CountedGloo, *arguments: Any, **options: Any) -> Any:
        calls.collectives[kind, sum(tensor.nbytes for tensor in _tensors(arguments))] += 1
        calls.threads[threading.current_thread().name, threading.get_ident()] += 1
        return original(group, *arguments, **options)

    return call


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def install() -> None:
    """Make the ranks of this process use counted groups, and note what is open at the start of each round."""
    for kind in _KINDS:
        setattr(CountedGloo, kind, _counted(kind))
    _gloo._gloo = CountedGloo
    encode = OperationTable.encode

    def noted(table: OperationTable, round_number: int) -> bytes:
        calls.open[len(table)] += 1
        return encode(table, round_number)

    OperationTable.encode = noted  # type: ignore[method-assign]


def forget() -> None:
    """Begin to count anew."""
    for counter in (calls.collectives, calls.threads, calls.open):
        counter.clear()
