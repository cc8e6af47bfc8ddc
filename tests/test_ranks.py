"""Runs of several processes give the numbers of one, and go on with another number of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import without_time
from safetensors.torch import load_file

import gpfl
from gpfl.ranks import Ranks

SCRIPT = Path(__file__).parent / "ranked.py"


def launch(ranks: int, *arguments: object) -> None:
    """Starts the script in so many processes."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    path = os.pathsep.join([str(Path(gpfl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def close(first: Path, second: Path) -> None:
    """Both folders hold the same run: every line, and every client's model."""
    lines = [without_time(folder) for folder in (first, second)]
    assert len(lines[0]) == len(lines[1]) == 6
    for one, other in zip(*lines, strict=True):
        for key in ("round", "loss", "accuracy", "validation", "clients", "bytes_up", "joined", "train"):
            assert one.get(key) == pytest.approx(other.get(key), abs=1e-6), key
    for path in sorted((first / "models").iterdir()):
        models = load_file(path), load_file(second / "models" / path.name)
        for name, value in models[0].items():
            assert float((value - models[1][name]).abs().max()) < 1e-6


@pytest.fixture(scope="module", params=["gpfl", "fedproto"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("alone") / "run"
    launch(1, folder, request.param)
    return request.param, folder


def test_two_ranks_give_the_numbers_of_one_process(alone: tuple[str, Path], tmp_path: Path) -> None:
    method, folder = alone
    launch(2, tmp_path / "run", method)
    close(folder, tmp_path / "run")
    assert "on 2 ranks" in (tmp_path / "run" / "summary.json").read_text()


def test_a_run_goes_on_with_fewer_ranks(alone: tuple[str, Path], tmp_path: Path) -> None:
    goes_on(alone, tmp_path, before=2, after=1)


@pytest.mark.parametrize("alone", ["gpfl"], indirect=True)
def test_a_run_goes_on_with_more_ranks_than_clients(alone: tuple[str, Path], tmp_path: Path) -> None:
    goes_on(alone, tmp_path, before=1, after=6)


def goes_on(alone: tuple[str, Path], place: Path, before: int, after: int) -> None:
    method, folder = alone
    launch(before, place / "run", method, 3)
    assert not (place / "run" / "summary.json").exists()
    launch(after, place / "run", method, "resume")
    close(folder, place / "run")


def test_one_process_gathers_and_adds_nothing() -> None:
    one = Ranks()
    assert one.first
    assert one.gather(3) == [3]
    assert one.agree("x") == "x"
    assert one.add({}) == {}
