"""Where numbers come from: the command that was called, and the commit of the code that ran it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path


def command_words() -> str:
    """Gives this very command."""
    return f"gpfl {shlex.join(sys.argv[1:])}"


def commit() -> str:
    """Gives the commit of a checkout, with -dirty where it was changed, or the version of the installed package.

    GPFL_COMMIT says it where the sources are without their history.
    """
    if told := os.environ.get("GPFL_COMMIT"):
        return told
    root = Path(__file__).resolve().parents[3]
    with suppress(OSError, subprocess.CalledProcessError):
        if (root / ".git").exists():
            words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    with suppress(metadata.PackageNotFoundError):
        return f"none, version {metadata.version('gpfl')}"
    return "unknown"
