"""`kvcr-actors doctor`: what this machine offers a controller, what stands in its way, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import attrs
from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcr_actors.doctor.checks import Finding, Verdict, Wish, examine
from kvcr_actors.doctor.machine import read_machine
from kvcr_actors.errors import ConfigError

_STYLES = {Verdict.GOOD: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}
_HIGHEST_PORT = 65535


def doctor(
    *,
    host_gib: Annotated[float, Parameter(help="Host memory that the pools shall have, in GiB.")] = 0.0,
    gpu: Annotated[bool, Parameter(help="Whether a GPU must be usable.", negative=())] = False,
    kvcr: Annotated[bool, Parameter(help="Whether the KVCR store must be usable.", negative=())] = False,
    store_path: Annotated[Path | None, Parameter(help="The folder of a disk store.")] = None,
    store_gib: Annotated[float, Parameter(help="What that store shall hold, in GiB.")] = 0.0,
    ports: Annotated[tuple[int, ...], Parameter(help="Ports that sockets shall use on loopback.")] = (),
    as_json: Annotated[bool, Parameter(name="--json", help="Print JSON in place of a table.", negative=())] = False,
) -> int:
    """Check this machine: GPU, pinned memory, limits, huge pages, NUMA, shared memory, ports, folders, versions.

    The exit status is 0 if nothing stands in the way, 1 if something does.
    """
    if not (0 <= host_gib < 1e9 and 0 <= store_gib < 1e9):
        raise ConfigError(f"--host-gib {host_gib:g}, --store-gib {store_gib:g}: give sizes of 0 or more")
    for port in ports:
        if not 1 <= port <= _HIGHEST_PORT:
            raise ConfigError(f"--ports {port}: give a port from 1 to {_HIGHEST_PORT}")
    wish = Wish(int(host_gib * (1 << 30)), int(store_gib * (1 << 30)), gpu, kvcr)
    findings = examine(read_machine(ports, store_path), wish)
    if as_json:
        print(json.dumps([attrs.asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return int(any(finding.verdict is Verdict.PROBLEM for finding in findings))


def _print(findings: list[Finding]) -> None:
    table = Table("what", "verdict", "found", "what to do", box=None, pad_edge=False)
    for finding in findings:
        verdict = Text(finding.verdict.value, style=_STYLES[finding.verdict])
        table.add_row(Text(finding.about), verdict, Text(finding.found), Text(finding.remedy))
    console = Console()
    console.print(table)
    problems = sum(finding.verdict is Verdict.PROBLEM for finding in findings)
    notes = sum(finding.verdict is Verdict.NOTE for finding in findings)
    style = "bold red" if problems else "green"
    console.print(Text(f"\nproblems: {problems or 'none'}, notes: {notes or 'none'}", style=style))
