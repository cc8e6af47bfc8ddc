"""Ctrl-C: how it ends a command, and the command that resumes."""

import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class StoppedError(Exception):
    """Ctrl-C during a command; the text is the command that resumes it, or empty."""


@contextmanager
def interruptible(resume_command: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C in the block, raise `StoppedError` with the command that resumes it."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(resume_command()) from None


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Exit at once on Ctrl-C while modules are imported: half-imported ones swallow KeyboardInterrupt."""
    default = signal.getsignal(signal.SIGINT)
    if default is signal.default_int_handler:  # a background job ignores SIGINT, and continues to
        signal.signal(signal.SIGINT, _exit)
    yield
    signal.signal(signal.SIGINT, default)


def _exit(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(sys.stderr.fileno(), b"gpfl: stopped\n")
    os._exit(130)


def program() -> str:
    """Return how gpfl was started: "gpfl", or "python -m gpfl"."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m gpfl"
    return "gpfl" if shutil.which("gpfl") else sys.argv[0]


def resume_command(folder: Path) -> str:
    """Return the command that resumes the run or the trials of a folder; "" if nothing was written yet."""
    return f"{program()} resume {shlex.quote(str(folder))}" if (folder / "config.toml").is_file() else ""


def same_command(*extra: str) -> str:
    """Return the command line of this process."""
    return f"{program()} {shlex.join([*sys.argv[1:], *extra])}"
