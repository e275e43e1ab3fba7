from __future__ import annotations

import io
import logging

import pytest
import structlog

from kvcr_actors.logs import configure_logging


@pytest.fixture(autouse=True)
def own_configuration():
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_lines_go_to_the_stream_given_from_the_level_given_on() -> None:
    stream = io.StringIO()
    configure_logging(stream, logging.INFO)
    log = structlog.get_logger()
    log.debug("quiet")
    log.info("step.done", nodes=3)
    (line,) = stream.getvalue().splitlines()
    assert "level=info event=step.done nodes=3" in line


def test_an_exception_is_part_of_its_line() -> None:
    stream = io.StringIO()
    configure_logging(stream)
    try:
        int("broken")
    except ValueError:
        structlog.get_logger().exception("actor.failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: invalid literal" in line
