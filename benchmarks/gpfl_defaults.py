"""GPFL's defaults, chosen on validation samples: guidance and μ by task, next to FedPer.

    python benchmarks/gpfl_defaults.py digits heart
    python benchmarks/gpfl_defaults.py --device cuda --jobs 3    # all tasks, in order of importance

A tenth of every client's training samples is held out. The candidates of a task begin with the authors' values. The one with
the highest validation accuracy over the last ten rounds, mean over seeds, is best; test accuracies are only reported. Seeds of
a candidate train at the same time. Finished runs are kept in `--out`, as validation and test accuracy of every round, and are
not repeated. The page is made from all of them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import multiprocessing
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from machine import cpu_name

from gpfl.experiments.definitions import load_experiments
from gpfl.experiments.stored_runs import merge_configs
from gpfl.federation import Federation
from gpfl.io import files
from gpfl.io.provenance import current_commit
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import ConfigDict
from gpfl.training.execute import PreparedRun, execute_trials
from gpfl.training.prepare import prepare
from gpfl.training.run_dir import MetricsRecord

ROOT = Path(__file__).parents[1]
VALIDATION = 0.1  # fraction of a client's training samples
LAST = 10  # rounds of a mean


@dataclass(frozen=True)
class Task:
    """A federation, and what is run on it."""

    title: str
    settings: ConfigDict
    rounds: int
    seeds: tuple[int, ...]
    candidates: tuple[str, ...]  # the authors' value first


def column(experiment: str, key: str) -> ConfigDict:
    """Return the settings of a column of the paper's tables."""
    return next(each.settings for each in load_experiments()[experiment].columns if each.key == key)


def features(*values: float) -> tuple[str, ...]:
    return tuple(f"features, μ = {mu:g}" for mu in values)


def embeddings(*values: float) -> tuple[str, ...]:
    return tuple(f"embeddings, μ = {mu:g}" for mu in values)


FEDPER = "FedPer"
TASKS = {
    "fmnist-pathological": Task(
        "FMNIST, 20 clients, 2 classes each", column("effectiveness", "fmnist/pathological"), 80, (0, 1, 2),
        (*features(0.1), *embeddings(0.1), FEDPER, *features(0)),
    ),
    "har": Task(
        "HAR, 30 people", column("real-world", "har/real-world"), 100, (0, 1, 2),
        (*features(1), *embeddings(0.1), FEDPER, *features(0, 0.1)),
    ),
    "amazon": Task(
        "Amazon Review, 4 domains", column("feature-shift", "amazon/feature-shift"), 60, (0, 1, 2),
        (*features(0.1), *embeddings(0.1), FEDPER, *features(0.01, 0), *embeddings(0)),
    ),
    "cifar100-10of50": Task(
        "Cifar100, 10 of 50 clients, Dirichlet 0.1", column("scalability", "cifar100/10of50"), 100, (0,),
        (*features(0.1), *embeddings(0.1), FEDPER, *features(0.01)),
    ),
    "agnews": Task(
        "AG News, 20 clients, Dirichlet 1", column("effectiveness", "agnews/practical"), 60, (0,),
        (*features(0), *embeddings(0), FEDPER, *features(0.1)),
    ),
    "fmnist-practical": Task(
        "FMNIST, 20 clients, Dirichlet 0.1", column("effectiveness", "fmnist/practical"), 60, (0,),
        (*features(0.1), *embeddings(0.1), FEDPER, *features(0), *embeddings(0)),
    ),
    "cifar100-pathological": Task(
        "Cifar100, 20 clients, 10 classes each", column("effectiveness", "cifar100/pathological"), 120, (0,),
        (*features(0.1), *embeddings(0.1), FEDPER, *features(0.01)),
    ),
    "cifar100-practical": Task(
        "Cifar100, 20 clients, Dirichlet 0.1", column("effectiveness", "cifar100/practical"), 120, (0,),
        (*features(0.1), *embeddings(0.1), FEDPER, *features(0.01)),
    ),
    "digits": Task(
        "digits, 20 clients, 4 classes each",
        {
            "data": {"name": "digits"},
            "partition": {"name": "pathological", "clients": 20, "classes_per_client": 4},
            "net": {"name": "mlp"},
            "train": {"lr": 0.05},
        },
        60, (0, 1, 2), (*features(0.1), *embeddings(0.1), FEDPER, *features(0.01, 0), *embeddings(0.01, 0)),
    ),
    "heart": Task(
        "heart disease, 4 hospitals", {"data": {"name": "heart"}}, 100, (0, 1, 2),
        (*features(0.1), *embeddings(0.1), FEDPER, *features(0.01, 0), *embeddings(0.01, 0)),
    ),
}  # fmt: skip

Curves = dict[str, list[float]]  # "validation" and "test", in percent, by round from 1
Rows = dict[str, dict[str, dict[str, dict]]]  # by task, candidate and seed: curves, command, commit, machine


class Recorder(Callback):
    """Keeps the accuracies of every round after the first evaluation."""

    def __init__(self) -> None:
        self.curves: Curves = {"validation": [], "test": []}

    def on_evaluate(self, record: MetricsRecord) -> None:
        if record["round"]:
            self.curves["validation"].append(round(100 * record["validation_accuracy"], 3))
            self.curves["test"].append(round(100 * record["accuracy"], 3))


@cache
def federation_of(name: str) -> Federation:
    return configs.resolve_config(settings_of(name, FEDPER, 0, {})).federation()


def settings_of(name: str, candidate: str, seed: int, run: ConfigDict) -> ConfigDict:
    """Return the config of a run."""
    task = TASKS[name]
    method: dict[str, object] = {"name": "fedper"}
    if candidate != FEDPER:
        guidance, _, mu = candidate.partition(", μ = ")
        method = {"name": "gpfl", "guidance": guidance, "mu": float(mu)}
    flags: ConfigDict = {
        "partition": {"validation_fraction": VALIDATION},
        "train": {"rounds": task.rounds},
        "run": {"seed": seed},
        "method": method,
    }
    return merge_configs(task.settings, flags, run)


def train(name: str, candidate: str, seeds: Sequence[int], rounds: int, device: str) -> dict[str, Curves]:
    """Return the accuracies of a candidate by seed. Seeds train at the same time."""
    recorders = {seed: Recorder() for seed in seeds}
    runs = []
    for seed, recorder in recorders.items():
        extra: ConfigDict = {"run": {"device": device}, **({"train": {"rounds": rounds}} if rounds else {})}
        config = configs.resolve_config(settings_of(name, candidate, seed, extra))
        runs.append(PreparedRun(*prepare(config, federation_of(name)), None, [recorder]))
    execute_trials(runs)
    return {str(seed): recorder.curves for seed, recorder in recorders.items()}


# The page.


def mean_of_last(values: Sequence[float]) -> float:
    return float(np.mean(values[-LAST:]))


def fall(values: Sequence[float]) -> float:
    """Return how far the last rounds lie below the best ten in a row: a single best round is above its level by noise alone."""
    means = np.convolve(values, np.ones(LAST) / LAST, "valid") if len(values) >= LAST else np.array([np.mean(values)])
    return max(0.0, float(means.max()) - mean_of_last(values))


def describe(runs: dict[str, Curves]) -> dict[str, list[float]]:
    """Return the numbers of the table, a value for each seed; a run that diverged ends early and counts as it ended."""
    finished = [runs[seed] for seed in sorted(runs) if runs[seed]["test"]]
    return {
        "validation": [mean_of_last(curves["validation"]) for curves in finished],
        "selected": [curves["test"][int(np.argmax(curves["validation"]))] for curves in finished],
        "last": [mean_of_last(curves["test"]) for curves in finished],
        "best": [max(curves["test"]) for curves in finished],
        "fall": [fall(curves["test"]) for curves in finished],
    }


def with_spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}" + (f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "")


def page(rows: Rows) -> str:
    """Return the page of the recorded runs."""
    lines = [
        "# GPFL's defaults on validation samples\n",
        f"A tenth of every client's training samples is held out. **Bold**: highest validation accuracy over the last {LAST} "
        "rounds. The other columns are test accuracies: in the round that validation samples "
        f"select, mean of the last {LAST} rounds, best round, and the fall from the best {LAST} rounds in a row to the last "
        f"{LAST}. Mean over seeds ± standard deviation, %. The authors' values come first.\n",
        "| task | GPFL's guidance, μ | seeds | rounds | validation, last ten | selected round | last ten | best | fall |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    commands: dict[str, None] = {}
    for name, task in TASKS.items():
        found = {each: rows[name][each] for each in task.candidates if each in rows.get(name, {})}
        numbers = {candidate: describe(runs) for candidate, runs in found.items()}
        validation = {candidate: np.mean(values["validation"]) for candidate, values in numbers.items() if candidate != FEDPER}
        for candidate, runs in found.items():
            cells = [with_spread(numbers[candidate][key]) for key in ("validation", "selected", "last", "best", "fall")]
            if candidate != FEDPER and validation[candidate] == max(validation.values()):
                cells[0] = f"**{cells[0]}**"
            rounds = max(len(run["test"]) for run in runs.values())
            lines.append(f"| {task.title} | {candidate} | {len(runs)} | {rounds} | {' | '.join(cells)} |")
            commands.update({f"{run['command']}  # commit {run['commit']}, {run['machine']}": None for run in runs.values()})
    missing = {name: [each for each in task.candidates if each not in rows.get(name, {})] for name, task in TASKS.items()}
    texts = [name + f" ({'; '.join(missing[name])})" * (name in rows) for name in TASKS if missing[name]]
    if texts:
        lines.append(f"\nNot run: {', '.join(texts)}.")
    return "\n".join([*lines, "", "```sh", *commands, "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), metavar="TASK", help=f"of {', '.join(TASKS)}; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "defaults")
    parser.add_argument("--rounds", type=int, default=0, help="in place of those of the task, to try the command")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="the first N seeds of each task alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.tasks} - {*TASKS}):
        parser.error(f"unknown task '{unknown[0]}'; choose from {', '.join(TASKS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "runs.json.xz"
    rows = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    gpu = f", {torch.cuda.get_device_name()}" if arguments.device.startswith("cuda") else ""
    options = [f"--device {arguments.device} --jobs {arguments.jobs}"] if gpu else []
    options += [f"--seeds {arguments.seeds}"] if arguments.seeds < 3 else []
    torch.set_num_threads(1 if arguments.jobs > 1 else torch.get_num_threads())
    origin = {
        "command": " ".join(["python benchmarks/gpfl_defaults.py", *arguments.tasks, *options]),
        "commit": current_commit()[:7],
        "machine": f"torch {torch.__version__.split('+')[0]}, {cpu_name()}{gpu}",
    }
    context = multiprocessing.get_context("spawn")  # a fork cannot use the GPU
    with ProcessPoolExecutor(arguments.jobs, context, start_worker, (torch.get_num_threads(),)) as pool:
        waiting = {}
        for name in arguments.tasks:
            for candidate in TASKS[name].candidates:
                done = rows.get(name, {}).get(candidate, {})
                if seeds := [seed for seed in TASKS[name].seeds[: arguments.seeds] if str(seed) not in done]:
                    job = pool.submit(train, name, candidate, seeds, arguments.rounds, arguments.device)
                    waiting[job] = name, candidate
        start = time.perf_counter()
        for job in as_completed(waiting):
            name, candidate = waiting[job]
            if (problem := job.exception()) is not None:
                print(f"{name}, {candidate}: {problem}", flush=True)
                continue
            runs = {seed: {**curves, **origin} for seed, curves in job.result().items()}
            rows.setdefault(name, {}).setdefault(candidate, {}).update(runs)
            files.write_bytes(path, lzma.compress(json.dumps(rows).encode()))
            numbers = {key: np.round(values, 2).tolist() for key, values in describe(runs).items()}
            print(f"{time.perf_counter() - start:.0f} s {name}, {candidate}: {numbers}", flush=True)
    (arguments.out / "table.md").write_text(page(rows), encoding="utf-8")


def start_worker(threads: int) -> None:
    """Prepare a process."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
