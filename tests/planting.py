"""Faults that tests plant in the product, and whether such a fault is itself at fault.

A test that expects a rule to be broken must not be content with any failure: a replacement that uses an attribute which
was renamed raises in the product, and then something fails, too. So a `Planter` notes what the code of a replacement
itself raises, and which replacements were never called; `assert_broken` wants the rule by its words, and both of these
reported as errors of the planted fault.
"""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import pytest


class PlantedError(Exception):
    """What tests plant."""


class MisplantedError(Exception):
    """The planted fault is wrong, not the product: it proves nothing."""


class Planter:
    """Puts replacements into the product, as `MonkeyPatch.setattr` does, and watches them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._errors: list[BaseException] = []
        self._calls: dict[str, int] = {}

    def setattr(self, owner: Any, name: str, replacement: Any) -> None:
        """Replace what is there; AttributeError if there is none."""
        place = f"{owner.__name__}.{name}"
        if isinstance(replacement, property):
            replacement = property(self._watched(place, replacement.fget))
        elif callable(replacement):
            replacement = self._watched(place, replacement)
        self._patch.setattr(owner, name, replacement)

    def check(self) -> None:
        """MisplantedError if a replacement raised of itself, or was never called."""
        for error in self._errors:
            raise MisplantedError(f"a replacement raised {type(error).__name__}: {error}") from error
        for place, calls in self._calls.items():
            if not calls:
                raise MisplantedError(f"the replacement of {place} was never called")

    def _watched(self, place: str, replacement: Any) -> Callable[..., Any]:
        self._calls[place] = 0
        files = {__file__}
        if isinstance(code := getattr(replacement, "__code__", None), CodeType):
            files.add(code.co_filename)

        @contextmanager
        def noting() -> Generator[None]:
            self._calls[place] += 1
            try:
                yield
            except PlantedError:
                raise
            except Exception as error:
                if _raised_in(error) in files:
                    self._errors.append(error)
                raise

        if inspect.iscoroutinefunction(replacement):

            async def later(*args: Any, **options: Any) -> Any:
                with noting():
                    return await replacement(*args, **options)

            return later

        @functools.wraps(replacement, updated=())
        def at_once(*args: Any, **options: Any) -> Any:
            with noting():
                return replacement(*args, **options)

        return at_once


def _raised_in(error: BaseException) -> str:
    """The file of the code that raised."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1].f_code.co_filename


Plant = Callable[[Planter], None]


@contextmanager
def planted(plant: Plant) -> Generator[Planter]:
    """Have a fault for the length of a block."""
    with pytest.MonkeyPatch.context() as patch:
        planter = Planter(patch)
        try:
            plant(planter)
        except Exception as error:
            raise MisplantedError(f"{plant.__name__} cannot be planted: {error!r}") from error
        yield planter


def assert_broken(planter: Planter, rule: str, failures: list[str]) -> None:
    """One of the failures, as `Error: message`, tells of the rule (a pattern), and the fault was planted rightly."""
    planter.check()
    assert any(re.search(rule, failure) for failure in failures), f"not {rule!r}, but {failures}"


def failures_of(run: Callable[[], object]) -> list[str]:
    """What a run raises, as `Error: message`, those of a group one by one; nothing if it holds."""
    try:
        run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a failing test raises what it will
        return list(_told(error))
    return []


def _told(error: BaseException) -> Iterator[str]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _told(one)
    else:
        yield f"{type(error).__name__}: {error}"
