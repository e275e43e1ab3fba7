"""Logging for programs. The library only calls `structlog.get_logger`; the program decides where lines go."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog


def configure_logging(stream: TextIO | None = None, level: int = logging.WARNING) -> None:
    """Send the library's events to `stream` (standard error by default): coloured on a terminal, else logfmt lines.

    Call it once, at the start of a program. It replaces structlog's configuration for the whole process.
    """
    target = sys.stderr if stream is None else stream
    renderer: structlog.typing.Processor
    if target.isatty():
        renderer = structlog.dev.ConsoleRenderer()
    else:
        renderer = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"])
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(target),
    )
