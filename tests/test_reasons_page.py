"""The page of reasons explains each one there is, and names settings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from kvcr_actors.config import ControllerConfig
from kvcr_actors.types import MissReason, SkipReason

PAGE = (Path(__file__).parent.parent / "docs/reasons.md").read_text()
PARTS = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


@pytest.mark.parametrize("reasons", [MissReason, SkipReason])
def test_every_reason_has_its_section_and_no_section_is_of_none(reasons: type[MissReason] | type[SkipReason]) -> None:
    sections = re.findall(r"^### (\w+)\n\n(.+?)(?=\n\n###|\Z)", PARTS[reasons.__name__], re.MULTILINE | re.DOTALL)
    assert [name for name, _ in sections] == list(reasons)
    assert all(len(text.split()) > 8 for _, text in sections)


def test_every_setting_that_is_named_exists() -> None:
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+|restarts)`", PAGE))
    assert len(named) > 10
    assert named <= {field.name for field in attrs.fields(ControllerConfig)}
