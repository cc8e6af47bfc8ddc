"""The quickstart: training alone, one global model and personalised models on repeated splits of the digits."""

from __future__ import annotations

from pathlib import Path

from gpfl.experiments.compare import parse_methods
from gpfl.experiments.repeats import REPEATS_FILE, RepeatedResults, run_repeats
from gpfl.experiments.trials import CallbackFactory
from gpfl.training.config import ConfigDict

ALONE = "local"
METHODS = (ALONE, "fedavg", "fedavg-ft", "fedper", "ditto", "gpfl")
REPEATS = 10
SETTING: ConfigDict = {
    "data": {"name": "digits"},
    "partition": {"name": "pathological", "clients": 50, "classes_per_client": 5, "test_fraction": 0.4},
    "net": {"name": "mlp", "hidden": [64]},
    "train": {"rounds": 40, "batch_size": 5, "lr": 0.05},
}


def quickstart(out: Path, make_callback: CallbackFactory) -> RepeatedResults:
    """Run the repeats of the methods that `out` does not hold yet."""
    return run_repeats(SETTING, parse_methods(",".join(METHODS)), REPEATS, out, make_callback)


def was_started(out: Path) -> bool:
    """Return whether a folder holds a quickstart that was started."""
    return any((out / name / REPEATS_FILE).is_file() for name in METHODS)
