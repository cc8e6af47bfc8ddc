"""What GPFL's valve tells of clients' label distributions: by task, defence and variant.

    python benchmarks/label_leaks.py defences digits heart har fmnist cifar100
    python benchmarks/label_leaks.py variants digits heart har

Each task writes a JSON file to `--out`; tasks that have one are skipped. The page is made of all files.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import gpfl
from gpfl.core import tree
from gpfl.defences import DefenceConfig, defend, undefended
from gpfl.engine import RunSpec
from gpfl.engine.base import Engine
from gpfl.engine.loop import Loop
from gpfl.methods.gpfl import GPFL, embeddings_of
from gpfl.privacy.label_inference import LabelInference, infer_label_distributions
from gpfl.privacy.uploads import AttackedBatch, initial_state, observe_uploads
from gpfl.privacy.valve_inference import counts_in_mean
from gpfl.training.run_dir import RunState

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
SUMS = (2, 5, 20)  # clients of a secure sum


@dataclass(frozen=True)
class Task:
    """A federation and the runs on it."""

    title: str
    data: str
    federation: Mapping[str, object]
    run: Mapping[str, object]
    rounds: int  # of a run, of which the best round is attacked; 0: only rounds 0 and 5
    clients: int = 8  # to attack
    variant_rounds: int = 40


DIGITS = {"net": "mlp", "lr": 0.05}
TASKS = {
    "digits": Task(
        "digits, 20 clients, 4 classes each", "digits", {"clients": 20, "partition": "pathological", "classes_per_client": 4},
        DIGITS, 40,
    ),
    "digits-all-classes": Task(
        "digits, 20 clients, Dirichlet 10 (all classes)", "digits", {"clients": 20, "partition": "dirichlet", "beta": 10.0},
        DIGITS, 40,
    ),
    "heart": Task("heart disease, 4 hospitals", "heart", {}, {}, 100, variant_rounds=100),
    "har": Task("HAR, 6 people", "har", {"clients": 6}, {"mu": 0.1}, 0, clients=3, variant_rounds=25),
    "fmnist": Task(
        "FMNIST, 20 clients, 2 classes each", "fmnist",
        {"clients": 20, "partition": "pathological", "classes_per_client": 2},
        {"net": "mlp", "lr": 0.005, "client_fraction": 0.25}, 0, clients=3,
    ),
    "cifar100": Task(
        "Cifar100, 50 clients, 10 classes each", "cifar100",
        {"clients": 50, "partition": "pathological", "classes_per_client": 10},
        {"net": "cnn4", "lr": 0.005, "client_fraction": 0.1}, 0, clients=2,
    ),
}  # fmt: skip

DEFENCES: dict[str, DefenceConfig | None] = {
    "none": None,
    "clip 1": DefenceConfig(clip=1.0),
    "noise 0.001": DefenceConfig(clip=1.0, noise=0.001),
    "noise 0.01": DefenceConfig(clip=1.0, noise=0.01),
    "noise 0.1": DefenceConfig(clip=1.0, noise=0.1),
    "8 bits": DefenceConfig(bits=8),
    "4 bits": DefenceConfig(bits=4),
    "top 10 %": DefenceConfig(top_k=0.1),
    "example noise 0.1": DefenceConfig(example_clip=1.0, example_noise=0.1),
    "example noise 1": DefenceConfig(example_clip=1.0, example_noise=1.0),
}

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "as published": ("gpfl", {}),
    "`--valve-gradient global`": ("gpfl", {"valve_gradient": "global"}),
    "`--no-share-valve`": ("gpfl", {"share_valve": False}),
    "`--alpha-levels 1`": ("gpfl", {"alpha_levels": 1}),
    "`--alpha-levels 4`": ("gpfl", {"alpha_levels": 4}),
    "`--alpha-noise 0.05`": ("gpfl", {"alpha_noise": 0.05}),
    "FedPer": ("fedper", {}),
}


@dataclass
class Leak:
    """The outcome of the attack on several clients."""

    distance: float | None  # mean total variation distance of the guess
    uniform: float
    exact: int
    clients: int
    interval: list[float] | None = None  # mean, over the clients that have one
    sums: dict[str, list[int]] = field(default_factory=dict)  # by size: clients shown, false counts, all clients

    @classmethod
    def of(cls, labels: Sequence[LabelInference]) -> Leak:
        guesses = [each.guess for each in labels if each.guess is not None]
        intervals = [each.interval for each in labels if each.interval is not None]
        return cls(
            float(np.mean(guesses)) if guesses else None,
            float(np.mean([each.uniform for each in labels])),
            sum(each.is_exact for each in labels),
            len(labels),
            np.mean(intervals, axis=0).tolist() if intervals else None,
        )


# Runs and attacks.


def defended_engine(engine: Engine, defence: DefenceConfig | None, clients: int) -> Engine:
    """Return the engine of the run with a defence of `clients` clients a round."""
    method = undefended(engine.method)
    if defence is not None:
        if defence.example_clip and isinstance(method, GPFL):
            method = method.replace(mlg_norm="sample_mean")  # the batch's norm is no mean over examples
        method = defend(method, defence, seed=0, min_clients=clients)
    return Loop(RunSpec(method, engine.federation, engine.schedule, engine.class_counts))


def states(task: Task, federation: gpfl.Federation) -> Iterator[tuple[str, Engine, RunState]]:
    """Yield the states to attack: before training, after five rounds and, in a longer run, the best round."""
    early = fit("gpfl", federation, task, rounds=5)
    yield "0", early.engine, initial_state(early.engine)
    yield "5", early.engine, early.outcome.last
    if task.rounds:
        long = fit("gpfl", federation, task, rounds=task.rounds)
        yield f"best ({long.summary['selected_round']} of {task.rounds})", long.engine, long.outcome.selected


def fit(method: str, federation: gpfl.Federation, task: Task, *, rounds: int, **settings: object) -> gpfl.Result:
    run = {key: value for key, value in task.run.items() if key != "mu" or method == "gpfl"}
    return gpfl.fit(method, federation, **{"device": "cpu", "select": "test", "seed": 0, **run, "rounds": rounds, **settings})


def attack(engine: Engine, state: RunState, clients: Sequence[int]) -> Leak:
    return Leak.of(infer_label_distributions(engine, state, clients))


def attack_sums(engine: Engine, state: RunState) -> dict[str, list[int]]:
    """Return for secure sums of several sizes how many clients' class counts they show, correctly and not, of how many."""
    found = {}
    everyone = [client for client in range(len(engine.federation)) if engine.can_train(client)][: max(SUMS)]
    views = observe_uploads(engine, state, [AttackedBatch(client, (0,)) for client in everyone], "epoch")
    truth = engine.client_info(everyone, state.round).label_counts
    for size in SUMS:
        groups = [range(first, first + size) for first in range(0, len(everyone) - size + 1, size)]
        right = wrong = 0
        for group in groups:
            sizes = [views[index].n_samples for index in group]
            weights = torch.tensor(sizes, dtype=torch.float32) / sum(sizes)
            stacked = tree.stack([tree.branch(views[index].upload, "cov") for index in group])
            mean = tree.map_leaves(lambda values, weights=weights: torch.tensordot(weights, values, 1), stacked)
            sent = views[0].sent
            shown = counts_in_mean(tree.branch(sent, "cov"), mean, embeddings_of(sent), sizes).values()
            found_counts, true_counts = ({tuple(map(int, counts)) for counts in each} for each in (shown, truth[list(group)]))
            right, wrong = right + len(found_counts & true_counts), wrong + len(found_counts - true_counts)
        if groups:
            found[str(size)] = [right, wrong, size * len(groups)]
    return found


def measure_defences(task: Task) -> dict[str, object]:
    federation = gpfl.federate(task.data, seed=0, **task.federation)
    clients = range(min(task.clients, len(federation)))
    rows = {}
    for round_, engine, state in states(task, federation):
        for name, defence in DEFENCES.items():
            leak = attack(defended_engine(engine, defence, len(federation)), state, clients)
            if defence is None:
                leak.sums = attack_sums(defended_engine(engine, None, 1), state)
            rows[f"{round_}/{name}"] = vars(leak)
            print(f"{task.title}, round {round_}, {name}: {leak}", flush=True)
    return {"title": task.title, "rows": rows}


def measure_variants(task: Task) -> dict[str, object]:
    rows = {}
    for name, (method, options) in VARIANTS.items():
        accuracies, bests, leaks = [], [], []
        for seed in SEEDS:
            federation = gpfl.federate(task.data, seed=seed, **task.federation)
            result = fit(method, federation, task, rounds=task.variant_rounds, seed=seed, **options)
            accuracies.append(100 * float(result.summary["last_ten_accuracy"]))
            bests.append(100 * float(result.summary["best_accuracy"]))
            clients = range(min(task.clients, len(federation)))
            leaks.append(
                [vars(attack(result.engine, state, clients)) for state in (initial_state(result.engine), result.outcome.last)]
            )
        rows[name] = {"last_ten": accuracies, "best": bests, "leaks": leaks}
        print(f"{task.title}, {name}: {rows[name]}", flush=True)
    return {"title": f"{task.title}, {task.variant_rounds} rounds", "rows": rows}


# The page.


def cell(leak: Mapping[str, object]) -> str:
    if leak["distance"] is None:
        return "–"
    if leak["exact"] == leak["clients"]:
        return "**exact**"
    text = f"{leak['distance']:.3f}"
    if leak["exact"]:
        text += f", {leak['exact']} of {leak['clients']} exact"
    low, high = leak["interval"] or (0, 0)
    return f"{text} [{low:.2f}, {high:.2f}]"


def defences_page(results: Sequence[Mapping[str, object]]) -> str:
    names = list(DEFENCES)
    lines = [
        f"| task | round | guess without an upload | {' | '.join(names)} |",
        "| --- | ---: | ---: |" + " --- |" * len(names),
    ]
    sums = [
        "| task | round | " + " | ".join(f"{size} clients" for size in SUMS) + " |",
        "| --- | ---: |" + " ---: |" * len(SUMS),
    ]
    for result in results:
        rows: Mapping[str, dict] = result["rows"]
        for round_ in dict.fromkeys(key.split("/")[0] for key in rows):
            leaks = [rows[f"{round_}/{name}"] for name in names]
            lines.append(f"| {result['title']} | {round_} | {leaks[0]['uniform']:.3f} | {' | '.join(map(cell, leaks))} |")
            shown = [leaks[0]["sums"].get(str(size)) for size in SUMS]
            texts = [
                "–" if each is None else f"{each[0]} of {each[2]}" + f", {each[1]} wrong" * bool(each[1]) for each in shown
            ]
            sums.append(f"| {result['title']} | {round_} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", "Clients whose class counts a secure sum still shows exactly, without a defence:", "", *sums])


def variants_page(results: Sequence[Mapping[str, object]]) -> str:
    lines = [
        "| task | variant | last ten rounds, % | best, % | labels, round 0 | labels, last round |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for name, row in result["rows"].items():
            accuracy = [f"{np.mean(row[key]):.2f} ± {np.std(row[key], ddof=1):.2f}" for key in ("last_ten", "best")]
            leaks = [cell(pool([leak[index] for leak in row["leaks"]])) for index in (0, 1)]
            lines.append(f"| {result['title']} | {name} | {' | '.join([*accuracy, *leaks])} |")
    return "\n".join(lines)


def pool(leaks: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the leak of several seeds as one."""
    intervals = [leak["interval"] for leak in leaks if leak["interval"]]
    return {
        "distance": None if leaks[0]["distance"] is None else float(np.mean([leak["distance"] for leak in leaks])),
        "exact": sum(leak["exact"] for leak in leaks),
        "clients": sum(leak["clients"] for leak in leaks),
        "interval": np.mean(intervals, axis=0).tolist() if intervals else None,
    }


PAGES = {"defences": (measure_defences, defences_page), "variants": (measure_variants, variants_page)}
DISTANCE = (
    "Total variation distance between the label distribution and the server's guess from one upload, mean over clients; "
    "**exact**: the upload of every client allows the true distribution alone. In brackets the least and greatest distance to "
    "the distributions that the upload allows."
)
NOTES = {
    "defences": f"{DISTANCE} States are those of an undefended run of GPFL as published; each defence changes the upload of "
    "one local round from there, with noise as of a round of all clients. Columns of noise clip updates to norm 1, those of "
    "example noise gradients. 4 bits and top 10 % leave most entries unchanged, so that no bounds are given.",
    "variants": f"{DISTANCE} Test accuracy over three seeds with standard deviation. Where "
    "the valve tells nothing, the guess comes from the embeddings.",
}


def page(kind: str, out: Path) -> str:
    """Return the page of the results in a folder."""
    results = [json.loads(path.read_text()) for path in sorted(out.glob(f"{kind}-*.json"))]
    commands = "\n".join(f"{each['command']}  # {each['minutes']} minutes, {each['machine']}" for each in results)
    done = {path.stem.removeprefix(f"{kind}-") for path in out.glob(f"{kind}-*.json")}
    missing = ", ".join(name for name in TASKS if name not in done)
    left = f"Not run: {missing}.\n\n" if missing else ""
    return f"# Label leak of GPFL: {kind}\n\n{NOTES[kind]}\n\n{PAGES[kind][1](results)}\n\n{left}```sh\n{commands}\n```\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=PAGES)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "label-leaks")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.tasks:
        path = arguments.out / f"{arguments.kind}-{name}.json"
        if path.exists():
            continue
        start = time.perf_counter()
        result = PAGES[arguments.kind][0](TASKS[name])
        result |= {
            "command": f"python benchmarks/label_leaks.py {arguments.kind} {name}",
            "machine": f"torch {torch.__version__.split('+')[0]}, {torch.get_num_threads()} CPU thread of a busy machine",
            "minutes": round((time.perf_counter() - start) / 60, 1),
        }
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (arguments.out / f"{arguments.kind}.md").write_text(page(arguments.kind, arguments.out), encoding="utf-8")


if __name__ == "__main__":
    main()
