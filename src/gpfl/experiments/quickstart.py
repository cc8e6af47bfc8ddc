"""The quickstart: GPFL, FedAvg and local training on one partition of the digits."""

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
    """Run the trials of the three methods that `out` does not hold yet, each in its own folder."""
    return [run_trials({**SETTING, "method": {"name": name}}, SEEDS, out / name, make_callback, label=name) for name in METHODS]


def was_started(out: Path) -> bool:
    """Return whether a folder holds a quickstart that was started."""
    first = out / METHODS[0]
    return (first / "trials.json").is_file() or (first.is_dir() and list(out.iterdir()) == [first])
