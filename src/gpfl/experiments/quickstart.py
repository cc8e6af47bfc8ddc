"""The quickstart: GPFL beside FedAvg and training alone, on one partition of the digits."""

from __future__ import annotations

from pathlib import Path

from gpfl.experiments.stored_runs import Trials
from gpfl.experiments.trials import CallbackFactory, run_trials
from gpfl.training.config import ConfigDict

METHODS = ("gpfl", "fedavg", "local")
SEEDS = (0, 1, 2)
SETTING: ConfigDict = {
    "data": {"name": "digits"},
    "partition": {"name": "pathological", "clients": 20, "classes_per_client": 4, "seed": 1},
    "net": {"name": "mlp", "hidden": [64]},
    "train": {"rounds": 40, "lr": 0.05},
}


def quickstart(out: Path, make_callback: CallbackFactory) -> list[Trials]:
    """Gives the trials of the three methods, each in its own folder of `out`; what it holds already is not run again."""
    return [run_trials({**SETTING, "method": {"name": name}}, SEEDS, out / name, make_callback, label=name) for name in METHODS]


def was_started(out: Path) -> bool:
    """Tells whether a quickstart was begun in a folder: the first method has its trials there, or was about to."""
    first = out / METHODS[0]
    return (first / "trials.json").is_file() or (first.is_dir() and list(out.iterdir()) == [first])
