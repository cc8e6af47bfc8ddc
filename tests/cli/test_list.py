"""The command `gpfl list`."""

from __future__ import annotations

import re

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
