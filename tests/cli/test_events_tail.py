"""`kvcr-actors events tail` beside `kvcr-actors replay --events`: two processes, as a user runs them."""

from __future__ import annotations

import json
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcr_actors.cli.app import run
from kvcr_actors.cli.event_words import MEANINGS
from kvcr_actors.cli.hosts import check_can_bind
from kvcr_actors.events.endpoints import Endpoint
from kvcr_actors.events.follower import StreamFollower

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "events.md"
PROGRAM = (sys.executable, "-m", "kvcr_actors")
SMALL = ("--limit", "60", "--device-blocks", "64", "--host-blocks", "128", "--no-progress")


def publish(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, "replay", *SMALL, "--events", f"ipc://{folder}/events", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def tail(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [*PROGRAM, "events", "tail", f"ipc://{folder}/events", *words]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job hands an ignored SIGINT down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def lines_until_quiet(reader: subprocess.Popen[str]) -> list[str]:
    """Interrupt a reader once it has printed nothing for a second; give what it printed."""
    assert reader.stdout is not None
    lines: list[str] = []
    while select.select([reader.stdout], [], [], 1.0)[0]:
        lines.append(reader.stdout.readline())
    reader.send_signal(signal.SIGINT)
    output, errors = reader.communicate(timeout=60)
    assert reader.returncode == 0, errors
    return [*lines, *output.splitlines()]


@pytest.mark.parametrize("dialect", ["dynamo", "vllm", "sglang"])
def test_a_replay_is_followed_to_its_end(tmp_path: Path, dialect: str) -> None:
    reader = tail(tmp_path, "--replay", f"ipc://{tmp_path}/replay", "--json", "--check")
    done = publish(tmp_path, "--events-replay", f"ipc://{tmp_path}/replay", "--dialect", dialect)
    assert done.returncode == 0, done.stderr
    *batches, end = [json.loads(line) for line in lines_until_quiet(reader)]
    assert end["faults"] == []
    assert end["end"]["blocks"]["device"] == 64
    assert end["end"]["blocks"]["host"] == 128
    assert end["end"]["blocks"]["store"] > 128
    media = {event["medium"] for batch in batches for event in batch["events"] if "medium" in event}
    assert len(media) == 3


def test_silence_is_told_and_fails_the_check(tmp_path: Path) -> None:
    reader = tail(tmp_path, "--check", "--seconds", "6")
    output, errors = reader.communicate(timeout=60)
    assert reader.returncode == 1
    assert "nothing was heard for 5 s" in errors
    assert "no batch came" in errors
    assert "KV events" in output


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["events", "tail", "nowhere"], "ENDPOINT: 'nowhere' is no endpoint"),
        (["events", "tail", "5557", "--replay", "x"], "--replay: 'x' is no endpoint"),
        (["events", "tail", "99999"], "ENDPOINT: port 99999 does not exist; give one from 1 to 65535"),
        (["events", "tail", "5557", "--replay", "0"], "--replay: port 0 does not exist"),
        (["events", "tail", "9" * 5_000], "ENDPOINT: 'tcp://127.0.0.1:99999"),
        (["events", "tail", "5557", "--seconds", "0"], "--seconds: 0 is not a time"),
        (["replay", "--events", "70000"], "--events: events port 70000"),
        (["replay", "--events", "x"], "--events: events: 'x' is no endpoint"),
        (["replay", "--events-replay", "5557"], "--events-replay: there are no events"),
        (["replay", "--events", "5557", "--events-replay", "5557"], "share tcp://127.0.0.1:5557"),
        (["replay", "--events", "5557", "--dialect", "morse"], "morse"),
        (["replay", "--events", "tcp://no host:5557"], "--events: events: 'tcp://no host:5557' is no endpoint"),
        (["replay", "--events", "5557", "--events-replay", "tcp://a..b:1"], "--events-replay: host 'a..b' has no"),
        (["replay", "--events", "tcp://192.0.2.1:5557"], "host '192.0.2.1' is no address of this machine"),
        (["replay", "--events", "tcp://[2001:db8::1]:5557"], "host '[2001:db8::1]' is no address of this machine"),
        (["events", "tail", "tcp://no host:5557"], "ENDPOINT: 'tcp://no host:5557' is no endpoint"),
        (["events", "tail", "5557", "--replay", "tcp://no host:1"], "--replay: 'tcp://no host:1' is no endpoint"),
        (["events", "tail", "ipc:///no/such/folder/x", "--seconds", "0.1", "--check"], "no batch came"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(words)
    errors = capsys.readouterr().err
    assert complaint in errors
    assert len(errors.splitlines()) == 1
    assert status == (1 if "--check" in words else 2)


def test_a_host_that_is_refused_leaves_everything_as_it_was(tmp_path: Path) -> None:
    store = ["--store", "disk", "--store-path", str(tmp_path / "store"), "--json", str(tmp_path / "report.json")]
    assert run(["replay", *SMALL, *store, "--events", "tcp://192.0.2.1:5557"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["localhost", "lo", "*", "127.0.0.2", "[::1]"])
def test_a_host_that_is_this_machine_is_published_from(host: str) -> None:
    check_can_bind("--events", Endpoint.parse(f"tcp://{host}:5557", "--events"))


def test_each_count_is_explained_where_it_is_shown_in_the_help_and_in_the_documentation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {name.replace("_", " ") for name in StreamFollower(can_replay=False).describe()} - {"blocks"} | {"silent"}
    assert set(MEANINGS) == counts
    assert run(["events", "tail", "ipc:///no/such/folder/x", "--seconds", "0.1"]) == 0
    table = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "400")
    assert run(["events", "tail", "--help"]) == 0
    usage = capsys.readouterr().out
    page = DOCUMENTATION.read_text()
    for name, (short, full) in MEANINGS.items():
        assert re.search(rf"│ {name} +│ +\S+( s)? │ {short} *│", table), name
        assert f"{name}: {short}. {full}" in usage
        assert f"| {name} | {short} | {full} |" in page
