"""`kvcr-actors events tail`: what a publisher says, as a live table or as lines of JSON, and whether it adds up."""

from __future__ import annotations

import json as json_format
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvcr_actors.cli.event_words import MEANINGS, MEANINGS_LIST
from kvcr_actors.cli.foreign import plain, printable
from kvcr_actors.cli.hosts import check_can_dial
from kvcr_actors.errors import ConfigError, EventFormatError
from kvcr_actors.events.endpoints import Endpoint
from kvcr_actors.events.reader import SILENT_S, EventReader
from kvcr_actors.events.stream import Message
from kvcr_actors.events.wire import decode_batch

_LOOK_S: Final = 0.25
_REFRESH_S: Final = 0.1
"""The table is drawn no more often than this, however many batches come."""

_HELP: Final = f"""Follow a publisher: rebuild its index from its events, and count what does not add up.

Without a replay endpoint it knows only what came after it joined, which --check calls lost. --check fails on whatever
makes the index untrustworthy at the end: batches that were missed and not made up for, contradictions, messages that
cannot be read or are too large, numbers that began again lower, a replay that was not over, or silence.

It shows the blocks in each tier, then

{MEANINGS_LIST}
"""

events = App(name="events", help="Look at KV events as routers see them.")


@events.command(help=_HELP)
def tail(
    endpoint: Annotated[str, Parameter(help="Where the publisher binds: a port on loopback, or tcp://HOST:PORT.")],
    /,
    *,
    replay: Annotated[
        str | None, Parameter(help="Where it serves replays; without, lost batches stay lost.", show_default="none")
    ] = None,
    json: Annotated[bool, Parameter(help="Print a line of JSON a batch.", negative="")] = False,
    check: Annotated[bool, Parameter(help="Exit with 1 if the events do not add up.", negative="")] = False,
    seconds: Annotated[float | None, Parameter(help="Stop after this time.", show_default="Ctrl-C ends it")] = None,
) -> int:
    """Follow a publisher, until Ctrl-C or for some seconds; the help of the command line says what is counted."""
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"--seconds: {seconds:g} is not a time; give more than 0")
    address = _dialled("ENDPOINT", endpoint)
    replays = None if replay is None else _dialled("--replay", replay)
    with EventReader(address, replays) as reader, _shown(reader, json=json) as show:
        _follow(reader, show, None if seconds is None else time.monotonic() + seconds)
        faults = reader.faults
    if json:
        print(json_format.dumps({"end": reader.follower.describe(), "faults": faults}))
    for fault in faults if check else ():
        print(f"{address}: {fault}", file=sys.stderr)
    return 1 if check and faults else 0


def _dialled(what: str, text: str) -> str:
    endpoint = Endpoint.parse(text, what)
    check_can_dial(what, endpoint)
    return endpoint.at(0)


def _follow(reader: EventReader, show: Callable[[Message | None], None], until: float | None) -> None:
    silent = False
    try:
        while until is None or time.monotonic() < until:
            show(reader.read(_LOOK_S))
            if not silent and reader.silent_s > SILENT_S:
                print(f"nothing was heard for {SILENT_S:g} s: is the publisher there?", file=sys.stderr)
            silent = reader.silent_s > SILENT_S
    except KeyboardInterrupt:
        return  # the usual end


@contextmanager
def _shown(reader: EventReader, *, json: bool) -> Generator[Callable[[Message | None], None], None, None]:
    if json:
        yield _print_json
        return
    console = Console()
    if not console.is_terminal:
        yield lambda message: None
        console.print(_table(reader))
        return
    with Live(_table(reader), console=console, auto_refresh=False) as live:
        yield _Drawing(reader, live).show
        live.update(_table(reader), refresh=True)


class _Drawing:
    """The live table, drawn anew now and then."""

    def __init__(self, reader: EventReader, live: Live) -> None:
        self._reader = reader
        self._live = live
        self._drawn_at = 0.0

    def show(self, message: Message | None) -> None:
        """Draw it, if that is not just done."""
        del message
        now = time.monotonic()
        if now - self._drawn_at >= _REFRESH_S:
            self._drawn_at = now
            self._live.update(_table(self._reader), refresh=True)


def _print_json(message: Message | None) -> None:
    if message is None:
        return
    sequence, payload = message
    line: dict[str, Any] = {"sequence": sequence, "bytes": len(payload)}
    try:
        batch = decode_batch(payload)
        events = [plain(msgspec.structs.asdict(event) | {"type": type(event).__name__}) for event in batch.events]
        line |= {"timestamp": plain(batch.ts), "rank": batch.data_parallel_rank, "events": events}
    except EventFormatError as error:
        line["error"] = str(error)
    print(json_format.dumps(line), flush=True)


def _table(reader: EventReader) -> Table:
    state = reader.follower.describe()
    blocks: dict[str, int] = state.pop("blocks")
    table = Table(title="KV events", caption="more words: kvcr-actors events tail --help", show_header=False)
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_column("meaning", style="dim")
    for holding, count in blocks.items():
        table.add_row(Text(f"blocks, {printable(holding)}"), f"{count:,}", "there, by what was told")
    table.add_section()
    for key, value in {**state, "silent": f"{reader.silent_s:.1f} s"}.items():
        name = key.replace("_", " ")
        table.add_row(name, _shown_value(value), MEANINGS[name][0])
    return table


def _shown_value(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case _:
            return str(value)
