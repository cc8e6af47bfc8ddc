"""Runs of several processes give the numbers of one, and go on with another number of them."""

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
from gpfl.engine import distributed as processes
from gpfl.engine.distributed import ProcessFailedError, ProcessGroup
from gpfl.errors import GpflError
from gpfl.experiments import grid
from gpfl.experiments.grid import GridPlan, Job
from gpfl.training.round_loop import Silent

HERE = Path(__file__).parents[1]


def launch(ranks: int, *arguments: object, script: str = "ranked.py", code: int = 0) -> str:
    """Starts a script in so many processes, which end with a code; gives what they complain of."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    path = os.pathsep.join([str(Path(gpfl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stderr


def close(first: Path, second: Path) -> None:
    """Both folders hold the same run: every line, and every client's model."""
    lines = [metrics_without_time(folder) for folder in (first, second)]
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


def test_studies_of_two_ranks_go_by_what_the_first_sees_and_it_alone_writes(tmp_path: Path) -> None:
    complaints = launch(2, tmp_path, script="ranked_studies.py", code=1)
    assert "1 cell of 2 failed" in complaints, complaints
    assert "gpfl:   toy/wild fedavg: seed 0: round 0: the loss of client 0 is nan" in complaints
    table = (tmp_path / "results" / "toys" / "table.md").read_text()
    assert "failed" in table


@pytest.mark.parametrize("rank", [0, 1])
def test_error_of_one_rank_in_step_with_others_ends_all(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = rf" \(process {rank} of 2 failed; the others cannot continue without it\)"
    with pytest.raises(ProcessFailedError, match=f"^no room{words}$"), ProcessGroup(rank, 2).abort_all_on_error():
        raise GpflError("no room")
    assert ("Traceback" in capsys.readouterr().err) == (rank > 0)
    with pytest.raises(ProcessFailedError, match=rf"^OSError\('odd'\){words}$"), ProcessGroup(rank, 2).abort_all_on_error():
        raise OSError("odd")
    assert "OSError: odd" in capsys.readouterr().err


def test_grid_does_not_go_on_after_an_error_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "run", lambda *given: fail(ProcessFailedError("no room")))
    with pytest.raises(ProcessFailedError, match="no room"):
        grid.run_all([Job((), {}, tmp_path, "")], GridPlan(out=tmp_path), lambda label: Silent(), {})


def test_error_of_one_process_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    problem = OSError("odd")
    with pytest.raises(OSError, match="odd") as raised, ProcessGroup().abort_all_on_error():
        ProcessGroup().run_on_main(lambda: fail(problem))
    assert raised.value is problem
    assert capsys.readouterr().err == ""


def fail(problem: Exception) -> None:
    raise problem


def test_attacks_run_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "process_group", lambda: ProcessGroup(0, 2))
    for study in (privacy_command.columns, privacy_command.leaks, privacy_command.curves):
        with pytest.raises(GpflError, match=r"^gpfl privacy runs in one process, not in 2: start it without torchrun$"):
            study.main([], standalone_mode=False)
    with pytest.raises(GpflError, match=r"^gpfl attack runs in one process, not in 2: start it without torchrun$"):
        attack_command.attack.main(["run"], standalone_mode=False)


def test_one_process_gathers_and_adds_nothing() -> None:
    one = ProcessGroup()
    assert one.is_main
    assert one.all_gather(3) == [3]
    assert one.broadcast("x") == "x"
    assert one.run_on_main(lambda: "y") == "y"
    assert one.all_reduce({}) == {}
