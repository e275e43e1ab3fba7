"""The program around the commands: parsing, one line for each error, and the exit status."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from cyclopts import App, CycloptsError

from kvcr_actors.cli.doctor_command import doctor
from kvcr_actors.cli.events_command import events
from kvcr_actors.cli.replay_command import replay
from kvcr_actors.cli.sweep_command import sweep_trace
from kvcr_actors.errors import ConfigError, KvcrActorsError, ReplayError, StoreError, TraceError
from kvcr_actors.logs import configure_logging

PROGRAM = "kvcr-actors"
EXIT_HEALTHY, EXIT_UNHEALTHY, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 130, 143

_OUTPUT_FAILED: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_LONGEST: Final = 1_000
_STANDARD_ERROR: Final = 2

app = App(
    name=PROGRAM,
    help="A KV-cache controller for LLM inference engines, built from actors.",
    version=lambda: version(PROGRAM),
    suppress_keyboard_interrupt=False,
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
)
app.command(replay)
app.command(sweep_trace, name="sweep")
app.command(events)
app.command(doctor)
app.command(  # imported when it is called: the simulator and trio's testing half take longer than a small sweep
    "kvcr_actors.cli.simulate_command:simulate",
    name="simulate",
    help="Run whole clusters in virtual time, with faults of every kind, and check what must always hold.",
)


class _Terminated(KeyboardInterrupt):
    """SIGTERM ends a command the way Ctrl-C does: what it began is undone or drained."""


def main() -> NoReturn:
    """Run the command line of this process, and exit with its status."""
    _open_what_is_closed()
    signal.signal(signal.SIGTERM, _terminate)
    status = run(sys.argv[1:])
    sys.exit(_flushed(status))


def run(arguments: Sequence[str]) -> int:
    """Run one command and give its exit status: 0 healthy, 1 unhealthy, 2 bad input, 130 interrupted, 143 terminated.

    Every error that a user can mend is one line on standard error.
    """
    command = next((word for word in arguments if not word.startswith("-")), "")
    name = f"{PROGRAM} {command}" if command in app else PROGRAM
    return _guarded(lambda: _dispatch(arguments), name)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated


def _dispatch(arguments: Sequence[str]) -> int:
    configure_logging()
    return app(arguments) or EXIT_HEALTHY


def _guarded(call: Callable[[], int], name: str) -> int:
    try:
        return call()
    except _Terminated as end:
        _complain(name, f"terminated; {_done(end)}")
        return EXIT_TERMINATED
    except KeyboardInterrupt as end:
        _complain(name, f"interrupted; {_done(end)}")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _mute_output()
        return EXIT_UNHEALTHY
    except OSError as error:
        if error.errno not in _OUTPUT_FAILED:
            raise
        _complain(name, _no_room(error))
        return EXIT_UNHEALTHY
    except CycloptsError as error:
        _complain(name, f"{error}; see {name} --help")
        return EXIT_BAD_INPUT
    except (ConfigError, TraceError, StoreError) as error:
        _complain(name, str(error))
        return EXIT_BAD_INPUT
    except ReplayError as error:
        _complain(name, str(error))
        return EXIT_UNHEALTHY
    except KvcrActorsError as error:
        _complain(name, f"{type(error).__name__}: {error}")
        return EXIT_UNHEALTHY


def _done(end: KeyboardInterrupt) -> str:
    """What a command says that it did until then; most have nothing to show."""
    return str(end) or "no output was written"


def _complain(name: str, message: str) -> None:
    words = " ".join(message.split())
    with suppress(OSError):  # nobody can be told
        print(f"{name}: {words if len(words) <= _LONGEST else f'{words[:_LONGEST]}...'}", file=sys.stderr)


def _open_what_is_closed() -> None:
    """Give standard streams that are closed the null device: else the next file that is opened would be one of them."""
    while (handle := os.open(os.devnull, os.O_RDWR)) <= _STANDARD_ERROR:
        pass
    os.close(handle)
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the process's life
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _flushed(status: int) -> int:
    """Write what is still buffered; a status of failure if that fails."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _mute_output()
    except OSError as error:
        _mute_output()
        if not status:
            _complain(PROGRAM, _no_room(error))
        return status or EXIT_UNHEALTHY
    return status


def _no_room(error: OSError) -> str:
    return f"output cannot be written ({error.strerror}); make room for it, or name another place"


def _mute_output() -> None:
    """The reader of standard output is gone: let what is still buffered go nowhere, at exit too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
