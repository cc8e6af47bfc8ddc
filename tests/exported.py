"""Exported models: run without gpfl, in a process in which it cannot be imported."""

from __future__ import annotations

import contextlib
import csv
import io
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ABSENT = ("gpfl", "pandas", "polars", "safetensors.numpy", "scipy", "sklearn")
RUNNER = """
import runpy, sys
absent, folder, *files = sys.argv[1:]
sys.modules.update(dict.fromkeys(absent.split(",")))  # their import raises
sys.path.insert(0, folder)
sys.argv = ["example.py", *files]
try:
    import gpfl
except ImportError:
    runpy.run_path(folder + "/example.py", run_name="__main__")
"""


def run_process(folder: Path, *files: Path) -> subprocess.CompletedProcess[str]:
    """Run the example of an exported model without gpfl; one of ONNX also without torch."""
    absent = ABSENT if (folder / "model.safetensors").exists() else (*ABSENT, "torch", "safetensors")
    command = [sys.executable, "-I", "-c", RUNNER, ",".join(absent), str(folder), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_here(folder: Path, *files: Path) -> str:
    """Return what the example of an exported model prints, run in this process: another one takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["example.py", *map(str, files)])
        patch.syspath_prepend(folder)
        for name in ("encode", "net"):
            sys.modules.pop(name, None)  # of another model
        runpy.run_path(str(folder / "example.py"), run_name="__main__")
    return printed.getvalue()


def run_example(folder: Path, *files: Path, alone: bool = False) -> tuple[list[str], np.ndarray]:
    """Return the predicted classes and the probabilities that the example of an exported model prints.

    Args:
        folder: Folder of the exported model.
        files: Files to predict.
        alone: Run it in a process without gpfl.

    """
    if alone:
        done = run_process(folder, *files)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
    _, *rows = csv.reader(io.StringIO(done.stdout if alone else run_here(folder, *files)))
    return [row[0] for row in rows], np.array([[float(cell) for cell in row[1:]] for row in rows])
