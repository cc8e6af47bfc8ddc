"""Runs of several processes match those of one, and can be resumed with another number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import metrics_without_time
from safetensors.torch import load_file

import gpfl
from gpfl.cli import attack as attack_command
from gpfl.cli import privacy as privacy_command
from gpfl.engine import distributed
from gpfl.engine.distributed import ProcessFailedError, ProcessGroup
from gpfl.errors import GpflError
from gpfl.experiments import grid_runner
from gpfl.experiments.grid import GridPlan, Job
from gpfl.experiments.stored_runs import StoredTrials
from gpfl.training.callbacks import Callback

HERE = Path(__file__).parents[1]


def launch(ranks: int, *arguments: object, script: str = "distributed_run.py", code: int = 0) -> str:
    """Run a script in `ranks` processes, check their exit code, and return what they wrote to stderr."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    path = os.pathsep.join([str(Path(gpfl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr


def assert_same_run(method: str, first: Path, second: Path) -> None:
    """Check that two folders hold the same metrics and models: to the bit unless sums are grouped by process."""
    limit = 0.0 if "+" in method else 1e-6  # `distributed_run` runs these methods client by client
    metrics = [metrics_without_time(folder) for folder in (first, second)]
    assert len(metrics[0]) == len(metrics[1]) == 6
    for expected, found in zip(*metrics, strict=True):
        for key in expected.keys() - {"bytes_down", "mean", "std", "cov"}:
            tolerance = 10 * limit if key.endswith("log_loss") else limit  # logarithms of float32 probabilities
            assert expected.get(key) == pytest.approx(found.get(key), rel=0, abs=tolerance), key
        assert expected["log_loss"] == pytest.approx(expected["loss"], abs=1e-6)
    for path in sorted((first / "models").iterdir()):
        models = load_file(path), load_file(second / "models" / path.name)
        for name, value in models[0].items():
            assert float((value - models[1][name]).abs().max()) <= limit


SLOW_METHODS = [
    pytest.param(method, marks=pytest.mark.slow) for method in ("fedproto", "fedavg-ft", "gpfl+median", "gpfl+secure_sum")
]


@pytest.fixture(scope="module", params=["gpfl", *SLOW_METHODS])
def single_process_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("single") / "run"
    launch(1, folder, request.param)
    return request.param, folder


def test_two_ranks_match_one_process(single_process_run: tuple[str, Path], tmp_path: Path) -> None:
    method, folder = single_process_run
    launch(2, tmp_path / "run", method)
    assert_same_run(method, folder, tmp_path / "run")
    assert "on 2 ranks" in (tmp_path / "run" / "summary.json").read_text()


@pytest.mark.slow
def test_run_is_resumed_with_fewer_ranks(single_process_run: tuple[str, Path], tmp_path: Path) -> None:
    assert_resumes(single_process_run, tmp_path, before=2, after=1)


@pytest.mark.slow
@pytest.mark.parametrize("single_process_run", ["gpfl"], indirect=True)
def test_run_is_resumed_with_more_ranks_than_clients(single_process_run: tuple[str, Path], tmp_path: Path) -> None:
    assert_resumes(single_process_run, tmp_path, before=1, after=6)


def assert_resumes(single_process_run: tuple[str, Path], tmp_path: Path, before: int, after: int) -> None:
    method, folder = single_process_run
    launch(before, tmp_path / "run", method, 3)
    assert not (tmp_path / "run" / "summary.json").exists()
    launch(after, tmp_path / "run", method, "resume")
    assert_same_run(method, folder, tmp_path / "run")


def test_experiments_of_two_ranks_follow_the_main_process_and_only_it_writes(tmp_path: Path) -> None:
    errors = launch(2, tmp_path, script="distributed_experiments.py", code=1)
    assert "1 cell of 2 failed" in errors, errors
    assert "gpfl:   toy/wild fedavg: seed 0: round 0: the loss of client 0 is nan" in errors
    table = (tmp_path / "results" / "toys" / "table.md").read_text()
    assert "failed" in table


@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_one_rank_in_collective_work_ends_all(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    suffix = rf" \(process {rank} of 2 failed; the others cannot continue without it\)"
    with pytest.raises(ProcessFailedError, match=f"^no room{suffix}$"), ProcessGroup(rank, 2).abort_all_on_error():
        raise GpflError("no room")
    assert ("Traceback" in capsys.readouterr().err) == (rank > 0)
    with pytest.raises(ProcessFailedError, match=rf"^OSError\('odd'\){suffix}$"), ProcessGroup(rank, 2).abort_all_on_error():
        raise OSError("odd")
    assert "OSError: odd" in capsys.readouterr().err


def test_grid_stops_after_an_error_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_runner, "run", lambda *args: fail(ProcessFailedError("no room")))
    with pytest.raises(ProcessFailedError, match="no room"):
        grid_runner.run_all([Job((), {}, StoredTrials(tmp_path), "")], GridPlan(out=tmp_path), lambda label: Callback(), {})


def test_error_of_a_single_process_is_raised_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    error = OSError("odd")
    with pytest.raises(OSError, match="odd") as raised, ProcessGroup().abort_all_on_error():
        ProcessGroup().run_on_main(lambda: fail(error))
    assert raised.value is error
    assert capsys.readouterr().err == ""


def fail(error: Exception) -> None:
    raise error


def test_attacks_run_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "process_group", lambda: ProcessGroup(0, 2))
    for study in (privacy_command.attacks, privacy_command.leaks, privacy_command.defences):
        with pytest.raises(GpflError, match=r"^gpfl privacy runs in one process, not in 2: start it without torchrun$"):
            study.main([], standalone_mode=False)
    with pytest.raises(GpflError, match=r"^gpfl attack runs in one process, not in 2: start it without torchrun$"):
        attack_command.attack.main(["run"], standalone_mode=False)


def test_collectives_of_one_process_return_their_input() -> None:
    group = ProcessGroup()
    assert group.is_main
    assert group.all_gather(3) == [3]
    assert group.broadcast("x") == "x"
    assert group.run_on_main(lambda: "y") == "y"
    assert group.all_reduce({}) == {}
