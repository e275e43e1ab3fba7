"""Clean-up that comes to its end, whatever raises on the way."""

from __future__ import annotations

from collections.abc import Callable

from kvcr_actors.runtime.foreign import contained


class EndingErrors(ExceptionGroup[Exception]):
    """What was raised by endings that have run all the same."""


def run_endings(*endings: Callable[[], object]) -> None:
    """Run each ending, whatever the others raise, and once more one that broke off; then raise what they raised.

    An ending that broke off half way must bear to be run again. One that raises EndingErrors did not break off: it is
    made of endings itself.
    """
    errors: list[Exception] = []
    for ending in endings:
        if not _has_run(ending, errors):
            _has_run(ending, errors)
    if errors:
        raise EndingErrors("clean-up went wrong on its way", errors)


def _has_run(ending: Callable[[], object], errors: list[Exception]) -> bool:
    try:
        ending()
    except EndingErrors as several:
        errors += several.exceptions
    except BaseException as error:  # noqa: BLE001 - raised by the caller
        errors.append(contained(error))
        return False
    return True
