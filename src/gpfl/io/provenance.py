"""Where results come from: the command line, and the commit of the code."""

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def command_line() -> str:
    """Return the command line of this process."""
    return f"gpfl {shlex.join(sys.argv[1:])}"


def current_commit() -> str:
    """Return the commit of the checkout, with -dirty if it has changes, or the version of the installed package.

    The environment variable GPFL_COMMIT overrides it, for copies without git history.
    """
    if override := os.environ.get("GPFL_COMMIT"):
        return override
    root = Path(__file__).resolve().parents[3]
    with suppress(OSError, subprocess.CalledProcessError):
        if (root / ".git").exists():
            command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with suppress(metadata.PackageNotFoundError):
        return f"none, version {metadata.version('gpfl')}"
    return "unknown"
