"""What a user types wrong, one line each; and what a user gets for typing it right."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest

from kvcr_actors.cli.app import run
from kvcr_actors.replay.options import ReplayOptions, option_name

GOOD = '{"timestamp": 0, "input_length": 1500, "output_length": 3, "hash_ids": [0, 1, 2]}\n'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "good.jsonl"
    path.write_text(GOOD * 3)
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command line that must be refused; give the one line it says."""
    status = run(["replay", *map(str, arguments)])
    output = capsys.readouterr()
    assert status == 2
    assert output.out == ""
    assert output.err.startswith("kvcr-actors replay: ")
    assert output.err.endswith("\n")
    assert output.err.count("\n") == 1
    return output.err


def bad_trace(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ("nonsense", "line 2: not JSON"),
        ("[]", "line 2: a JSON list, not an object"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 3}', "line 2: the field 'hash_ids' is missing"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [5, -1]}', "line 2: hash_ids has -1"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], second: str, complaint: str
) -> None:
    path = bad_trace(tmp_path, "t.jsonl", f"{GOOD}{second}\n{GOOD}".encode())
    assert f"{path}, {complaint}" in fails(capsys, path, "--json", tmp_path / "report.json")
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_is_missing_a_folder_empty_or_damaged_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "absent.jsonl: no such trace" in fails(capsys, tmp_path / "absent.jsonl")
    assert f"{tmp_path}: this is a folder" in fails(capsys, tmp_path)
    assert "has no requests" in fails(capsys, bad_trace(tmp_path, "empty.jsonl", b""))
    cut = bad_trace(tmp_path, "cut.jsonl.gz", gzip.compress(GOOD.encode() * 9)[:-4])
    assert f"{cut}, line 10: damaged gzip data" in fails(capsys, cut)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_trace_is_named(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace.chmod(0)
    assert f"{trace}: cannot be read (Permission denied)" in fails(capsys, trace)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--device-blocks", "2"), "--device-blocks: 2 cannot hold the largest request; give 3 or more"),
        (("--host-blocks", "2"), "--host-blocks: 2 cannot hold the largest request"),
        (("--store-blocks", "2"), "--store-blocks: 2 cannot hold the largest request"),
        (("--page-bytes", str(1 << 50)), "--page-bytes: the device and host tiers take"),
        (("--store", "nope"), "--store: 'nope' is not installed; use none, disk, memory"),
        (("--store-option", "fsync=true"), "store memory: unknown option 'fsync'; it takes none"),
        (("--store", "disk", "--store-option", "speed=1"), "store disk: unknown option 'speed'; it takes fsync"),
        (("--store", "disk", "--store-option", "fsync=perhaps"), "store disk: option fsync='perhaps'"),
        (("--store-option", "speed"), "--store-option: 'speed' is not KEY=VALUE"),
        (("--store-option", "=x"), "--store-option: '=x' is not KEY=VALUE"),
        (("--pools", "kv,zzz"), "--pools: 'zzz' is not known"),
        (("--sequential", "--concurrency", "4"), "--concurrency: a --sequential replay runs one request at a time"),
        (("--device-blocks", "many"), 'Invalid value for --device-blocks: unable to convert "many" into int'),
        (("--device-blocks", "9" * 5_000), "--device-blocks"),
        (("--device-blocks", "9" * 4_000), "--device-blocks: 9999999999999999999999999999999999999... is too large"),
        (("--seed", "9" * 30), "--seed: 999999999999999999999999999999 is too large; the most is"),
        (("--block-tokens", "0"), "--block-tokens: 0 is not a whole number of 1 or more"),
        (("--block-tokens", "16"), "takes 94 blocks of 16 tokens; give an id for every 16 tokens"),
        (("--device-blocks", "0"), "--device-blocks: 0 is not a whole number of 1 or more"),
        (("--write-policy", "never"), "--write-policy"),
        (("--loop", "uvloop"), "--loop"),
        (("--nonsense",), "Unknown option: --nonsense"),
        (("--limit",), "--limit requires an argument"),
        (("--limit", "1", "--limit", "2"), "--limit specified multiple times"),
        (("extra.jsonl",), "extra.jsonl"),
        (("--json", "/proc/report.json"), "--json: /proc/report.json cannot be written"),
        (("--json", "/absent/report.json"), "--json: the folder /absent does not exist"),
        (("--plot", "/proc/hits.png"), "--plot: /proc/hits.png cannot be written"),
        (("--plot", "hits.bmp"), "--plot: hits.bmp has no picture's suffix"),
    ],
)
def test_a_bad_option_is_named_with_what_to_do(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    assert complaint in fails(capsys, trace, *arguments)


def test_bad_input_touches_neither_files_nor_the_store_folder(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "report.json"
    old.write_text("old")
    store = ("--store", "disk", "--store-path", tmp_path / "store")
    fails(capsys, trace, *store, "--json", old, "--device-blocks", 1)
    assert old.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [trace, old]


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("way", ["itself", "relative", "symlink", "hard link"])
def test_no_output_goes_over_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str, option: str
) -> None:
    path, alias = tmp_path / "trace.png", tmp_path / "alias.png"
    path.write_text(GOOD * 3)
    monkeypatch.chdir(tmp_path)
    if way == "symlink":
        alias.symlink_to(path)
    elif way == "hard link":
        alias.hardlink_to(path)
    output = {"itself": path, "relative": Path("../") / tmp_path.name / "trace.png"}.get(way, alias)
    assert f"{option}: {output} is the trace; name another file" in fails(capsys, path, option, output)
    assert path.read_text() == GOOD * 3


@pytest.mark.parametrize("way", ["relative", "symlink", "hard link"])
def test_two_outputs_are_two_files(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    if way == "relative":
        second = Path("./a.png")
    else:
        first.write_text("old")
        (second.symlink_to if way == "symlink" else second.hardlink_to)(first)
    assert "is the --json file too" in fails(capsys, trace, "--json", first, "--plot", second)


def test_no_output_goes_into_the_folder_of_the_store(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "store")
    words = ("--store", "disk", "--store-path", tmp_path / "store", "--json", tmp_path / "link" / "index.sqlite3")
    assert "is in the folder of the store; name a file elsewhere" in fails(capsys, trace, *words)


def shell(words: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m kvcr_actors {words}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("replay {trace} --no-progress > /dev/full", 1),
        ("--help > /dev/full", 1),
        ("replay {trace} --no-progress >&-", 0),
        ("replay {trace} --no-progress >&- 2>&- <&-", 0),
        ("replay {trace} --nonsense 2> /dev/full", 2),
    ],
)
def test_an_output_that_is_full_or_closed_leaves_no_traceback(trace: Path, words: str, status: int) -> None:
    done = shell(words.format(trace=trace))
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if "> /dev/full" in words and "2>" not in words:
        assert done.stderr.splitlines()[-1].endswith(
            "output cannot be written (No space left on device); make room for it, or name another place"
        )


def test_a_report_for_which_there_is_no_room_is_one_line(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path), text[:0])

    monkeypatch.setattr(Path, "write_text", full)
    assert run(["replay", str(trace), "--no-progress", "--json", str(tmp_path / "report.json")]) == 1
    assert "output cannot be written (No space left on device)" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [trace]


def test_blocks_of_another_size_are_replayed_and_published(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    record = {"timestamp": 0, "input_length": 521, "output_length": 1, "hash_ids": list(range(33))}
    path.write_text(json.dumps(record) + "\n")
    words = ["replay", str(path), "--no-progress", "--page-bytes", "64"]
    assert run(words) == 2
    assert run([*words, "--block-tokens", "16"]) == 0


def test_an_unknown_command_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["reply"]) == 2
    assert capsys.readouterr().err.startswith('kvcr-actors: Unknown command "reply".')


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--help"]) == 0
    text = capsys.readouterr().out
    for field in attrs.fields(ReplayOptions):
        assert option_name(field.name) in text
    assert "--no-progress" in text
    assert "[default: 512]" in text


def test_version_and_help_import_neither_torch_nor_matplotlib() -> None:
    program = (
        "import sys\nfrom kvcr_actors.cli.app import run\nassert run(['--version']) == 0\n"
        "assert run(['replay', '--help']) == 0\n"
        "assert not {'torch', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_signals_wait_while_the_temporary_folder_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[object] = []
    real = tempfile.TemporaryDirectory.cleanup

    def cleanup(self: tempfile.TemporaryDirectory[str]) -> None:
        heard.extend((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))
        os.kill(os.getpid(), signal.SIGINT)
        real(self)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", cleanup)
    assert run(["replay", "--limit", "5", "--page-bytes", "64", "--store", "disk", "--no-progress"]) == 0
    assert heard == [signal.SIG_IGN, signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before
