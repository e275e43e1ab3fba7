"""Faults that a test plants in one rank's process: what may happen, and what the tests must catch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import attrs

from kvcr_actors.actors.confirmation import ConfirmationActor
from kvcr_actors.actors.filling import PageFiller
from kvcr_actors.controller import CacheController
from kvcr_actors.core.copy_plan import CopyPlan, Direction
from kvcr_actors.devices.cpu import CpuDevice
from kvcr_actors.ports import Agreement
from kvcr_actors.ranks.torch_distributed import TorchDistributedRanks


def raises_once(owner: type, method: str, when: Callable[..., bool] = lambda *_: True) -> Any:
    """A method that raises the first time that its arguments are such; later it does its work."""
    original: Callable[..., Any] = vars(owner)[method]
    raised: list[str] = []

    def replacement(*arguments: Any, **options: Any) -> Any:
        if not raised and when(*arguments):
            raised.append(method)
            raise RuntimeError(f"planted in {owner.__name__}.{method}")
        return original(*arguments, **options)

    return patch.object(owner, method, replacement)


@attrs.frozen(eq=False)
class _Selfish:
    """An agreement that asks the others, and then goes by its own answer."""

    agreement: Agreement
    bits: int

    async def outcome(self) -> int:
        await self.agreement.outcome()
        return self.bits

    def withdraw(self) -> None:
        self.agreement.withdraw()


def goes_by_its_own_answer() -> Any:
    original = TorchDistributedRanks.propose
    return patch.object(
        TorchDistributedRanks, "propose", lambda self, name, bits: _Selfish(original(self, name, bits), bits)
    )


def joins_only_for_its_own() -> Any:
    """A rank whose collectives depend on what it has open itself."""
    original = TorchDistributedRanks._round

    def replacement(self: TorchDistributedRanks) -> bool:
        settled = original(self)
        self._others_open = False
        return settled

    return patch.object(TorchDistributedRanks, "_round", replacement)


def never_answers() -> Any:
    def replacement(self: TorchDistributedRanks, ended: Sequence[Any]) -> None:
        for entry, _ in ended:
            self._waiters.pop(entry)

    return patch.object(TorchDistributedRanks, "_settle", replacement)


def leaks_a_claim() -> Any:
    original = CacheController.prefetch

    def replacement(self: CacheController, request: Any) -> None:
        self._assembly.ledger.take("planted", request.request_id, lambda: None)
        original(self, request)

    return patch.object(CacheController, "prefetch", replacement)


def _is_restore(_device: CpuDevice, plan: CopyPlan, _fence: object) -> bool:
    return plan.direction is Direction.TO_DEVICE


_FAULTS: dict[str, Callable[[], Any]] = {
    "the launch of a backup raises": lambda: raises_once(CpuDevice, "submit"),
    "the end of a backup raises": lambda: raises_once(ConfirmationActor, "_settle"),
    "the read of a prefix raises": lambda: raises_once(PageFiller, "begin"),
    "the launch of a restore raises": lambda: raises_once(CpuDevice, "submit", _is_restore),
    "goes by its own answer": goes_by_its_own_answer,
    "joins only for its own": joins_only_for_its_own,
    "never answers": never_answers,
    "leaks a claim": leaks_a_claim,
}


@contextmanager
def planted(name: str | None) -> Generator[None]:
    """Have the fault for the length of a block."""
    if name is None:
        yield
        return
    with _FAULTS[name]():
        yield
