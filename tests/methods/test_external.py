"""A method from outside the package, as CONTRIBUTING shows it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from conftest import toy_federation

import gpfl

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def method_of_contributing() -> type[gpfl.Method]:
    (block,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), re.S)
    names: dict[str, type[gpfl.Method]] = {}
    exec(textwrap.dedent(block), names)
    return names["Anchored"]


def test_example_of_contributing_imports_from_gpfl_and_core_alone() -> None:
    imports = re.findall(r"^ +from (gpfl[\w.]*) import", CONTRIBUTING.read_text(encoding="utf-8"), re.M)
    assert set(imports) == {"gpfl", "gpfl.core"}


@pytest.mark.parametrize("engine", ["loop", "vmap", "workers"])
def test_example_of_contributing_trains_on_every_engine(engine: str) -> None:
    anchored = method_of_contributing()
    result = gpfl.fit(anchored(pull=0.5), toy_federation(), net="mlp", rounds=3, lr=0.1, engine=engine)
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    assert set(result.history[-1]["train"]) == {"ce", "anchor"}


def test_example_of_contributing_stays_near_the_shared_base() -> None:
    anchored = method_of_contributing()
    free, pulled = (
        gpfl.fit(anchored(pull=pull), toy_federation(), net="mlp", rounds=2, lr=0.1).history[-1]["train"]
        for pull in (1e-6, 1.0)
    )
    assert free["anchor"] / 1e-6 > pulled["anchor"] / 1.0
