"""Tracebacks for the log, as plain text.

Given an exception, structlog's own console prints the variables of every frame: a second of the loop's time, in which
nothing else happens, and the contents of requests in the log.
"""

from __future__ import annotations

from traceback import format_exception


def traced(error: BaseException) -> str:
    """The traceback of an error and of its causes, without variables."""
    return "".join(format_exception(error))
