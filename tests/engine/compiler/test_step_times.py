"""Times of steps: one file for each step and machine, written once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graphs import random
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gpfl.engine.compiler import step_times
from gpfl.engine.compiler.step_times import StepTimes

TIMES = StepTimes(uncompiled=2e-3, compiled=1e-3, compiling=5.0)


def graph(x: Tensor, rate: float = 0.1) -> fx.Graph:
    return make_fx(lambda x: [x * rate])(x).graph


def test_compiling_pays_if_the_calls_save_more_time_than_it_takes() -> None:
    assert TIMES.compiling_pays(5001)
    assert not TIMES.compiling_pays(4999)
    assert not TIMES._replace(compiled=3e-3).compiling_pays(10**9)


def test_the_first_stored_times_stay(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "times.json"
    assert step_times.load(path) is None
    assert step_times.store(path, TIMES) == TIMES
    assert step_times.store(path, TIMES._replace(compiled=9.0)) == TIMES
    assert step_times.load(path) == TIMES
    assert [each.name for each in path.parent.iterdir()] == ["times.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"uncompiled": 1}'])
def test_damaged_times_are_as_if_there_were_none(content: str, tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(content)
    assert step_times.load(tmp_path / "times.json") is None


def test_times_depend_on_operations_shapes_and_machine_but_not_on_the_learning_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    path = step_times.path_of(graph(random(2, 3)))
    assert step_times.path_of(graph(random(2, 3), rate=0.2)) == path
    assert step_times.path_of(graph(random(3, 2))) != path
    assert step_times.path_of(graph(random(3, 2).t())) != path
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert step_times.path_of(graph(random(2, 3))) != path


def test_processor_has_a_name() -> None:
    assert step_times.cpu_model()
