"""Experiments of several processes, for test_distributed: torchrun … distributed_experiments.py FOLDER.

The main process and the others see different files here, as they may when one is slower than the other.
"""

import dataclasses
import sys
import time
from pathlib import Path

import pytest
from conftest import ToyDataset

import gpfl.cli.privacy  # noqa: F401  (reads its defaults from the real configs, which are replaced below)
from gpfl.cli import main as cli
from gpfl.data import DATASETS
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError
from gpfl.experiments import definitions as experiments
from gpfl.experiments import grid, grid_runner
from gpfl.experiments.definitions import select_cells
from gpfl.experiments.grid import GridPlan, Job
from gpfl.experiments.stored_runs import StoredTrials
from gpfl.experiments.trials import resume_trials, run_trials
from gpfl.io import files
from gpfl.training.callbacks import Callback
from gpfl.training.run_dir import RunDir

SECTIONS = {"data": {"name": "toy"}, "method": {"name": "gpfl"}}
TOYS = """
title = "Toys"
caption = "The accuracy (%) on toys."
measure = "accuracy"
aliases = ["table9"]
rows = ["fedavg", "gpfl"]

[[columns]]
key = "toy/whole"
heading = "Whole"
group = "toys"
data = { name = "toy" }

[[columns]]
key = "toy/wild"
heading = "Wild"
group = "toys"
data = { name = "toy" }
train = { lr = 1e30 }
"""


def main() -> None:
    out = Path(sys.argv[1])
    DATASETS["toy"] = ToyDataset()
    experiments.config_dir = lambda: out / "experiments"
    if process_group().is_main:
        files.write_text(out / "experiments" / "toys.toml", TOYS)
        files.write_text(out / "file", "")
    else:
        files.write_bytes = fail_to_write
    process_group().barrier()
    with pytest.MonkeyPatch.context() as patch:
        check_trials(out / "trials", patch)
    with pytest.MonkeyPatch.context() as patch:
        check_grid(out, patch)
    arguments = "reproduce toys --methods fedavg --seeds 0,1 --rounds 2 --out"
    sys.argv[1:] = [*arguments.split(), str(out / "results")]
    cli.main()


def fail_to_write(path: Path, content: bytes) -> None:
    raise AssertionError(f"rank {process_group().rank} writes {path}")


def check_trials(out: Path, patch: pytest.MonkeyPatch) -> None:
    """Check that trials run, are not overwritten, and can be resumed."""

    def delay_others(label: str) -> Callback:
        """Delay the other processes until the main process has started the trial."""
        started, end = out / f"seed-{label[-1]}" / "config.toml", time.monotonic() + 2
        while not process_group().is_main and not started.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return Callback()

    trials = run_trials(SECTIONS, [0, 1], out, delay_others)
    assert [summary["seed"] for summary in trials.summaries] == [0, 1]
    try:
        run_trials(SECTIONS, [0, 1], out, delay_others)
        message = "no error"
    except GpflError as error:
        message = str(error)
    expected = f"--out {out} is not empty and nothing is overwritten: gpfl resume {out}, or choose another --out"
    assert process_group().all_gather(message) == [expected] * 2
    if not process_group().is_main:
        patch.setattr(RunDir, "finished", False)
    assert resume_trials(out, delay_others).summaries == trials.summaries


def check_grid(out: Path, patch: pytest.MonkeyPatch) -> None:
    """Check that a damaged job and one without a folder fail in all processes, and that the other runs."""
    plan = GridPlan(out=out / "grid", seeds=(0,), rounds=2, patience=0)
    jobs, _ = grid.make_jobs(select_cells(experiments.find_experiments(["toys"]), "toy/whole", "fedavg,gpfl,local").cells, plan)
    damaged, intact, lost = jobs
    lost = dataclasses.replace(lost, stored=StoredTrials(out / "file" / "runs" / "lost"))
    if process_group().is_main:
        files.write_text(damaged.folder / "config.toml", "[run")
    else:
        patch.setattr(Job, "finished", lambda job, seeds: list(seeds))
    unfinished = grid_runner.unfinished_jobs([damaged, lost, intact], plan)
    problems = grid_runner.run_all(
        unfinished, plan, lambda label: Callback(), {"command": "gpfl reproduce toys", "commit": "none"}
    )
    assert list(problems) == [damaged.folder, lost.folder]
    assert "is not a TOML file" in problems[damaged.folder]
    assert "cannot write to" in problems[lost.folder]
    assert process_group().all_gather(problems) == [problems] * 2
    assert RunDir(intact.folder / "seed-0").finished


if __name__ == "__main__":
    main()
