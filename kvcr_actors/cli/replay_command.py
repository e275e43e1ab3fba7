"""`kvcr-actors replay`: from the words of a command line to a report, its files and an exit status."""

from __future__ import annotations

import json as json_format
import signal
import tempfile
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvcr_actors.cli.hosts import check_can_bind
from kvcr_actors.core.keys import Namespace
from kvcr_actors.errors import ConfigError
from kvcr_actors.events.endpoints import Endpoint
from kvcr_actors.replay.options import ReplayOptions, option_name
from kvcr_actors.replay.outputs import whole_file
from kvcr_actors.replay.report import ReplayReport
from kvcr_actors.replay.summary import render
from kvcr_actors.replay.trace import read_trace, shipped_trace
from kvcr_actors.stores.registry import open_store


def _option(field: str, text: str, default: str | None = None, **more: Any) -> Parameter:
    """Describe an option; its default is shown from `ReplayOptions`, the one place that has it."""
    shown = default or str(attrs.fields_dict(ReplayOptions)[field].default)
    return Parameter(help=text, show_default=shown, **more)


def replay(
    trace: Annotated[Path | None, _option("trace", "A .jsonl or .jsonl.gz file.", "the shipped trace")] = None,
    /,
    *,
    limit: Annotated[int | None, _option("limit", "Replay only the first requests.", "all")] = None,
    block_tokens: Annotated[int | None, _option("block_tokens", "Tokens for which the trace has one block id.")] = None,
    sequential: Annotated[
        bool | None, _option("sequential", "One request at a time, each until all is quiet.", "no", negative="")
    ] = None,
    concurrency: Annotated[int | None, _option("concurrency", "The most requests that run at a time.")] = None,
    device_blocks: Annotated[int | None, _option("device_blocks", "Size of the device tier.")] = None,
    host_blocks: Annotated[int | None, _option("host_blocks", "Size of the host tier; 0 for none.")] = None,
    store: Annotated[str | None, _option("store", "none, memory, disk, or the name of an installed store.")] = None,
    store_blocks: Annotated[int | None, _option("store_blocks", "Size of the store; 0 for none.")] = None,
    store_path: Annotated[
        Path | None, _option("store_path", "The store's folder, kept for the next run.", "temporary")
    ] = None,
    store_option: Annotated[
        list[str] | None, _option("store_option", "KEY=VALUE for the store; may be repeated.", "none", negative="")
    ] = None,
    page_bytes: Annotated[int | None, _option("page_bytes", "A page's bytes, over all pools.")] = None,
    pools: Annotated[str | None, _option("pools", "kv, and swa and mamba after commas.", "kv")] = None,
    write_policy: Annotated[
        Literal["write-through", "selective", "write-back"] | None,
        _option("write_policy", "When nodes are backed up."),
    ] = None,
    loop: Annotated[
        Literal["asyncio", "trio"] | None, _option("loop", "The event loop that the actors run on.")
    ] = None,
    events: Annotated[
        str | None, _option("events", "Publish KV events here: a port on loopback, or tcp://HOST:PORT.", "none")
    ] = None,
    events_replay: Annotated[str | None, _option("events_replay", "Serve replays of lost events here.", "none")] = None,
    dialect: Annotated[
        Literal["dynamo", "vllm", "sglang"] | None, _option("dialect", "Whose form of the events to publish.")
    ] = None,
    json: Annotated[Path | None, _option("json", "Write report and options here, as JSON.", "none")] = None,
    plot: Annotated[Path | None, _option("plot", "Draw hits over time here: .png, .svg or .pdf.", "none")] = None,
    progress: Annotated[bool | None, _option("progress", "Show a progress bar on a terminal.", "--progress")] = None,
    seed: Annotated[int | None, _option("seed", "Makes page contents differ from another run's.")] = None,
) -> int:
    """Replay a request trace through the real actors, with real bytes in every tier.

    Prints where every block was found, or why it was not. The exit status is 0 for a healthy run, 1 for wrong bytes,
    open claims, books that do not balance or a failed run, 2 for bad input and 130 for Ctrl-C.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    return _run(_options(given), frozenset(given))


def _options(given: dict[str, Any]) -> ReplayOptions:
    if given.get("sequential") and given.get("concurrency", 1) != 1:
        raise ConfigError("--concurrency: a --sequential replay runs one request at a time; leave one of the two out")
    values = dict(given)
    if "pools" in given:
        values["pools"] = tuple(given["pools"].split(","))
    if "store_option" in given:
        values["store_option"] = dict(_pair(text) for text in given["store_option"])
    return ReplayOptions(**values)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--store-option: {text!r} is not KEY=VALUE; write for example fsync=true")
    return key, value


def _run(options: ReplayOptions, given: frozenset[str]) -> int:
    _check_hosts(options)
    requests = read_trace(options.trace or shipped_trace(), options.limit, options.block_tokens)
    options.check_capacities(requests)
    errors = Console(stderr=True)
    with ExitStack() as stack:
        located = stack.enter_context(_located_store(options))
        _check_store_options(located)
        bar = _progress_bar(errors, shown=options.progress)
        task = bar.add_task("replay", total=len(requests))

        def started() -> None:
            errors.print(_configuration(options, given))
            stack.enter_context(bar)

        # Torch takes seconds to import; an error above need not wait for it.
        from kvcr_actors.replay.session import run_replay

        report = run_replay(located, requests, lambda finished: bar.advance(task, finished), started)
    _write_results(options, report)
    render(report, Console())
    return 0 if report.healthy else 1


def _check_hosts(options: ReplayOptions) -> None:
    for name, text in (("--events", options.events), ("--events-replay", options.events_replay)):
        if text is not None:
            check_can_bind(name, Endpoint.parse(text, name))


def _check_store_options(options: ReplayOptions) -> None:
    """Let the store look at its options now: to make one, unlike to open it, touches nothing."""
    if options.has_store:
        anyone = Namespace(model="replay", weights="", dtype="uint8", layout="", page_bytes=options.page_bytes)
        open_store(options.store, options.store_option, options.store_blocks, options.store_path, anyone)


def _configuration(options: ReplayOptions, given: frozenset[str]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.title = "effective configuration"
    for _ in range(3):
        table.add_column(overflow="fold")
    for field, (value, source) in options.effective(given).items():
        table.add_row(option_name(field), value, source, style="dim" if source == "default" else None)
    return table


@contextmanager
def _located_store(options: ReplayOptions) -> Generator[ReplayOptions, None, None]:
    """Give a disk store without a folder one that goes at the end."""
    if options.store != "disk" or options.store_path is not None or not options.has_store:
        yield options
        return
    folder = tempfile.TemporaryDirectory(prefix="kvcr-actors-")
    try:
        yield attrs.evolve(options, store_path=Path(folder.name))
    finally:
        with _deaf():  # it holds prompts' pages, and goes before the program does
            folder.cleanup()


@contextmanager
def _deaf() -> Generator[None]:
    """Ignore for a moment the signals that would end the program; they come to the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress_bar(console: Console, *, shown: bool) -> Progress:
    columns = (
        TextColumn("replaying"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True)


def _write_results(options: ReplayOptions, report: ReplayReport) -> None:
    """Write all files, then give them their names, so that an interrupt leaves none."""
    with ExitStack() as stack:
        if options.json is not None:
            target = stack.enter_context(whole_file(options.json))
            whole = {"version": version("kvcr-actors"), "options": options.to_json(), **report.to_json()}
            target.write_text(json_format.dumps(whole, indent=2) + "\n")
        if options.plot is not None:
            from kvcr_actors.replay.plot import draw_hits

            draw_hits(report.series, stack.enter_context(whole_file(options.plot)), options.plot.suffix)
