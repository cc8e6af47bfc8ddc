"""How near counted times come to recorded ones: python benchmarks/estimates.py (the data must be on this machine).

Runs nothing: `gpfl reproduce --dry-run` counts the operations of a round where nothing like it was timed, and this counts those
of the recorded benchmarks of the paper's tasks in the same way, on the machines on which they were timed. Digits are left out:
a round of theirs takes milliseconds, most of them around its steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from gpfl.experiments.estimate import speed_of
from gpfl.experiments.grid import has_data
from gpfl.experiments.work import round_of, sample_of
from gpfl.federation.federation import Federation
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict
from gpfl.training.prepare import prepare

RESULTS = Path(__file__).parent / "results"
TASKS = ("fmnist", "cifar100", "tiny", "agnews", "amazon", "har")
BETAS = {"agnews": 1.0}
"""Of the practical splits; others have 0.1."""


def main() -> None:
    found = [times for name, kind in (("cpu-2-cores", "cpu"), ("h200", "cuda")) for times in compare(name, torch.device(kind))]
    print(f"{len(found)} cases: {min(found):.2f} to {max(found):.2f} times as long as timed")


def compare(name: str, device: torch.device) -> Iterator[float]:
    """Gives, for each benchmark of a machine, how many times as long as timed its counted time is."""
    for key, case in json.loads((RESULTS / f"{name}.json").read_text())["cases"].items():
        speed = speed_of(key, case, name)
        if speed is None or speed.precision != "float32" or speed.task.data not in TASKS or not has_data(speed.task.data):
            continue
        counted = count(*speed.task, speed.clients, speed.trials, device)
        if counted is not None:
            print(f"{name} {key}: counted {counted * 1e6:.0f} µs for a client's batch, timed {speed.step * 1e6:.0f}")
            yield counted / speed.step


def count(data: str, net: str, method: str, clients: int, trials: int, device: torch.device) -> float | None:
    given: ConfigDict = {"data": {"name": data}, "net": {"name": net}, "method": {"name": method}, "run": {"device": "cpu"}}
    config, whole = configs.resolve_config(given), federation(data, clients)
    sample = sample_of(prepare(config, whole, None, None)[1])
    found = round_of(prepare(config, sample.federation, None, None)[1], clients * trials, device)
    return found.of_step(sample) if found else None


@cache
def federation(data: str, clients: int) -> Federation:
    natural = data in ("amazon", "har")
    split = {} if natural else {"partition": {"name": "dirichlet", "clients": clients, "beta": BETAS.get(data, 0.1)}}
    return configs.resolve_config({"data": {"name": data}, "method": {"name": "fedavg"}, **split}).federation()


if __name__ == "__main__":
    main()
