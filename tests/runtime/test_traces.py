"""What the log tells of a failure costs no look at its variables: their contents stay out, and the loop goes on."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import structlog

from kvcr_actors.testing.store_driver import chain
from kvcr_actors.testing.virtual_time import VIRTUAL, BackendName, run_virtual
from tests.actors.rig import Rig


class Request:
    """What a frame has in hand."""

    shown = 0

    def __repr__(self) -> str:
        self.shown += 1
        return "the words of a request"


@pytest.mark.parametrize("backend", VIRTUAL)
def test_a_failing_actor_is_traced_without_its_variables(backend: BackendName, capsys: Any) -> None:
    request = Request()

    async def life() -> None:
        rig = Rig(store_pages=None)

        def fail(*args: object) -> Any:
            in_hand = request
            raise RuntimeError(f"planted {id(in_hand)}")

        async with rig.running():
            rig.device.submit = fail  # type: ignore[method-assign]
            rig.give_step(rig.node(chain("a", 1)))
            await anyio.sleep(1.0)

    before = structlog.get_config()
    structlog.reset_defaults()
    try:
        run_virtual(life, backend=backend)
    finally:
        structlog.configure(**before)
    told = capsys.readouterr().out
    assert f"planted {id(request)}" in told
    assert "in fail" in told
    assert "the words of a request" not in told
    assert request.shown == 0
