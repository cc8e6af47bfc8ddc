"""The command `gpfl list`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Command

from gpfl.methods import METHODS
from gpfl.models import NETS


def test_list_names_everything(command: Command) -> None:
    result = command("list")
    assert result.code == 0
    for name in ("gpfl", "fedavg", "local", "digits", "pathological", "dirichlet", "cnn4", "mlp", "loop", "vmap"):
        assert re.search(rf"^  {name} +\S", result.out, re.M), name
    assert all(re.search(rf"^  {name} +\S", result.out, re.M) for name in METHODS)


def test_list_of_one_kind_has_nothing_else(command: Command) -> None:
    result = command("list", "nets")
    assert re.findall(r"^ {0,2}(\w+)", result.out, re.M) == ["nets", *NETS]


NOT_FOR_A_RUN = {
    "scipy",
    "sklearn",
    "polars",
    "matplotlib",
    "PIL",
    "pooch",
    "jinja2",
    "pandas",
    "flwr",
    "gpfl.privacy",
    "gpfl.deploy",
}
HEAVY = {"torch", "numpy", *NOT_FOR_A_RUN}
START = """
import sys
from gpfl.cli import main
try:
    main.main()
finally:
    print("imported:", *sys.modules)
"""


@pytest.mark.parametrize("arguments", ["list", "list methods", "--help", "--version"])
def test_help_and_lists_do_not_import_torch(arguments: str) -> None:
    result = subprocess.run([sys.executable, "-c", START, *arguments.split()], capture_output=True, text=True, check=True)
    printed, modules = result.stdout.split("imported:")
    assert printed.strip()
    assert HEAVY & set(modules.split()) == set()


def test_run_imports_only_what_it_needs(tmp_path: Path) -> None:
    arguments = ["run", "--data", "digits", "--rounds", "20", "--out", str(tmp_path / "run")]  # enough steps to be traced
    result = subprocess.run([sys.executable, "-c", START, *arguments], capture_output=True, text=True, check=True)
    modules = result.stdout.split("imported:")[1].split()
    assert {"gpfl.engine.compiler.program", "torch.fx.experimental.proxy_tensor"} <= set(modules)
    assert NOT_FOR_A_RUN & set(modules) == set()
