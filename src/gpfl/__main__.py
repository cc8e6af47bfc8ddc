"""The command `gpfl`, as the script and `python -m gpfl` start it."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command; Ctrl-C ends it alike while its modules, torch among them, are still being loaded."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # in the background of a script it is ignored, and stays so
        signal.signal(signal.SIGINT, stop)
    from gpfl.cli.main import main as run

    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, usual)
    run()


def stop(number: int, frame: FrameType | None) -> None:
    """Ends the process at once: nothing is begun, and modules that are half loaded swallow exceptions."""
    if os.environ.get("RANK", "0") == "0":
        os.write(sys.stderr.fileno(), b"gpfl: stopped\n")
    os._exit(130)


if __name__ == "__main__":
    main()
