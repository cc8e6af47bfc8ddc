"""What GPFL's valve tells of clients' label distributions: by task, defence and variant.

    python benchmarks/label_leaks.py defences digits digits-all-classes heart har fmnist cifar100 amazon
    python benchmarks/label_leaks.py variants digits digits-all-classes heart har fmnist cifar100 amazon

Each task writes a JSON file to `--out`, row by row; rows that it has are skipped. The page is made of all files. Clients
train on `--device`, the server estimates on the CPU, both in `--jobs` processes. Published data are found as by `gpfl run`:
parsed before by `gpfl data get`, or as files in the folder GPFL_DATA.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from machine import cpu_name

import gpfl
from gpfl.core import tree
from gpfl.defences import DefenceConfig, defend, undefended
from gpfl.engine import RunSpec
from gpfl.engine.base import Engine, Loop
from gpfl.io.provenance import current_commit
from gpfl.methods.gpfl import GPFL, embeddings_of
from gpfl.privacy.label_inference import LabelInference, infer_label_distributions
from gpfl.privacy.uploads import AttackedBatch, initial_state, observe_uploads
from gpfl.privacy.valve_inference import counts_in_mean
from gpfl.training.run_dir import RunState

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
SUMS = (2, 5, 20)  # clients of a secure sum

Rows = dict[str, dict[str, object]]


@dataclass(frozen=True)
class Task:
    """A federation and the runs on it."""

    title: str
    data: str
    federation: Mapping[str, object]
    run: Mapping[str, object]
    rounds: int  # of the run whose best round is attacked, and of runs of variants
    clients: int = 8  # to attack


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
    "heart": Task("heart disease, 4 hospitals", "heart", {}, {}, 100),
    "har": Task("HAR, 30 people", "har", {}, {}, 60),
    "fmnist": Task(
        "FMNIST, 20 clients, 2 classes each", "fmnist",
        {"clients": 20, "partition": "pathological", "classes_per_client": 2},
        {"net": "mlp", "lr": 0.005, "client_fraction": 0.25}, 40,
    ),
    "cifar100": Task(
        "Cifar100, 10 of 50 clients, Dirichlet 0.1", "cifar100",
        {"clients": 10, "total_clients": 50, "partition": "dirichlet", "beta": 0.1},
        {"net": "cnn4", "lr": 0.005}, 60, clients=4,
    ),
    "amazon": Task("Amazon Review, 4 domains", "amazon", {}, {}, 30),
}  # fmt: skip
MU = 0.1  # of GPFL on all tasks
NOT_RUN = "not run"

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


@cache
def federation_of(name: str, seed: int) -> gpfl.Federation:
    task = TASKS[name]
    return gpfl.federate(task.data, **{"seed": seed, **task.federation})


def fit(name: str, method: str, *, seed: int = 0, **settings: object) -> gpfl.Result:
    """Train on a task, for its number of rounds unless another is given."""
    task, published = TASKS[name], {"mu": MU, "guidance": "features"} if method == "gpfl" else {}
    settings = {"select": "test", "rounds": task.rounds, **published, **task.run, **settings}
    return gpfl.fit(method, federation_of(name, seed), seed=seed, **settings)


def engine_with(engine: Engine, device: str, defence: DefenceConfig | None = None, clients: int = 1) -> Engine:
    """Return an engine of the run on a device, with a defence of `clients` clients a round."""
    method = undefended(engine.method)
    method.net.to(torch.device(device))
    if defence is not None:
        if defence.example_clip and isinstance(method, GPFL):
            method = method.replace(mlg_norm="sample_mean")  # the batch's norm is no mean over examples
        method = defend(method, defence, seed=0, min_clients=clients)
    return Loop(RunSpec(method, engine.federation.to(torch.device(device)), engine.schedule, engine.class_counts))


def attack(engine: Engine, state: RunState, clients: int) -> Leak:
    return Leak.of(infer_label_distributions(engine, state, range(min(clients, len(engine.federation)))))


def attack_sums(engine: Engine, state: RunState) -> dict[str, list[int]]:
    """Return for secure sums of several sizes how many clients' class counts they show, correctly and not, of how many."""
    found = {}
    everyone = [client for client in range(len(engine.federation)) if engine.can_train(client)][: max(SUMS)]
    views = observe_uploads(engine, state, [AttackedBatch(client, (0,)) for client in everyone], "epoch")
    views = [view.to(torch.device("cpu")) for view in views]
    truth = engine.client_info(everyone, state.round).label_counts.cpu()
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


def train_victim(name: str, rounds: int, folder: Path, device: str) -> None:
    fit(name, "gpfl", rounds=rounds, out=folder, device=device)


def attack_victim(name: str, folder: Path, state_name: str, defence_name: str, device: str) -> dict[str, object]:
    """Return the leak of a state of a run in a folder: before training, after the last round or in the best one."""
    result = gpfl.load(folder, federation=federation_of(name, 0))
    states = {
        "start": lambda: initial_state(result.engine),
        "last": lambda: result.outcome.last,
        "best": lambda: result.outcome.selected,
    }
    state, defence = states[state_name](), DEFENCES[defence_name]
    engine = engine_with(result.engine, device, defence, len(result.engine.federation))
    leak = attack(engine, state, TASKS[name].clients)
    if defence is None:
        leak.sums = attack_sums(engine, state)
    return vars(leak)


def measure_defences(name: str, rows: Rows, pool: ProcessPoolExecutor, device: str, save: Callable[[], None]) -> None:
    """Add a row for each state and defence."""
    rounds = TASKS[name].rounds
    with tempfile.TemporaryDirectory() as folder:
        early, long = Path(folder) / "early", Path(folder) / "long"
        runs = [pool.submit(train_victim, name, n, run, device) for n, run in ((5, early), (rounds, long))]
        for run in runs:
            run.result()
        best = json.loads((long / "summary.json").read_text())["selected_round"]
        states = {"0": (early, "start"), "5": (early, "last"), f"best ({best} of {rounds})": (long, "best")}
        keys = {
            f"{round_}/{defence}": (name, *state, defence, device) for round_, state in states.items() for defence in DEFENCES
        }
        add_rows(rows, pool, attack_victim, keys, save)


def measure_variant(name: str, variant: str, seed: int, device: str) -> dict[str, object]:
    """Return the accuracy of a variant, and its leak before training and after the last round."""
    method, options = VARIANTS[variant]
    result = fit(name, method, seed=seed, device=device, **options)
    engine = engine_with(result.engine, device)
    states = (initial_state(engine), result.outcome.last)
    return {
        "last_ten": 100 * float(result.summary["last_ten_accuracy"]),
        "best": 100 * float(result.summary["best_accuracy"]),
        "leaks": [vars(attack(engine, state, TASKS[name].clients)) for state in states],
    }


def measure_variants(name: str, rows: Rows, pool: ProcessPoolExecutor, device: str, save: Callable[[], None]) -> None:
    """Add a row for each variant and seed."""
    keys = {f"{variant}/{seed}": (name, variant, seed, device) for variant in VARIANTS for seed in SEEDS}
    add_rows(rows, pool, measure_variant, keys, save)


def add_rows(
    rows: Rows,
    pool: ProcessPoolExecutor,
    measure: Callable[..., dict[str, object]],
    keys: Mapping[str, tuple[object, ...]],
    save: Callable[[], None],
) -> None:
    """Measure the rows that are missing, in parallel, save each when it is done, and put all into the order of `keys`."""
    waiting = {pool.submit(measure, *arguments): key for key, arguments in keys.items() if key not in rows}
    for done in as_completed(waiting):
        rows[waiting[done]] = done.result()
        print(f"{waiting[done]}: {rows[waiting[done]]}", flush=True)
        save()
    for key in keys:
        rows[key] = rows.pop(key)


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


def rounds_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(key.split("/")[0] for key in rows))


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
        rows: Rows = result["rows"]
        for round_ in rounds_of(rows):
            leaks = {name: rows[f"{round_}/{name}"] for name in names if f"{round_}/{name}" in rows}
            cells = [cell(leaks[name]) if name in leaks else NOT_RUN for name in names]
            uniform = next(iter(leaks.values()))["uniform"]
            lines.append(f"| {result['title']} | {round_} | {uniform:.3f} | {' | '.join(cells)} |")
            if "none" in leaks:
                shown = [leaks["none"]["sums"].get(str(size)) for size in SUMS]
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
        for name in VARIANTS:
            seeds = [result["rows"][f"{name}/{seed}"] for seed in SEEDS if f"{name}/{seed}" in result["rows"]]
            if not seeds:
                continue
            accuracy = [with_spread([row[key] for row in seeds]) for key in ("last_ten", "best")]
            leaks = [cell(pool_leaks([row["leaks"][index] for row in seeds])) for index in (0, 1)]
            count = "" if len(seeds) == len(SEEDS) else f" ({len(seeds)} of {len(SEEDS)} seeds)"
            lines.append(f"| {result['title']} | {name}{count} | {' | '.join([*accuracy, *leaks])} |")
    return "\n".join(lines)


def with_spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}" + (f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "")


def missing_rows(kind: str, result: Mapping[str, object]) -> list[str]:
    """Return what a task's file lacks: states of a run or variants of which no row was run."""
    if kind == "variants":
        return [name for name in VARIANTS if not any(f"{name}/{seed}" in result["rows"] for seed in SEEDS)]
    return [] if any(each.startswith("best") for each in rounds_of(result["rows"])) else ["the best round"]


def pool_leaks(leaks: Sequence[Mapping[str, object]]) -> dict[str, object]:
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
    "variants": f"{DISTANCE} Test accuracy over three seeds, unless stated, with standard deviation. Where "
    "the valve tells nothing, the guess comes from the embeddings.",
}


def page(kind: str, out: Path) -> str:
    """Return the page of the results in a folder."""
    files = [out / f"{kind}-{name}.json" for name in TASKS]
    results = {name: json.loads(path.read_text()) for name, path in zip(TASKS, files, strict=True) if path.exists()}
    commands = "\n".join(f"{each['command']}  # {each['minutes']} minutes, {each['machine']}" for each in results.values())
    missing = [name for name in TASKS if name not in results]
    missing += [f"{name}: {', '.join(rows)}" for name, each in results.items() if (rows := missing_rows(kind, each))]
    left = f"Not run: {'; '.join(missing)}.\n\n" if missing else ""
    table = PAGES[kind][1](list(results.values()))
    return f"# Label leak of GPFL: {kind}\n\n{NOTES[kind]}\n\n{table}\n\n{left}```sh\n{commands}\n```\n"


def measure(kind: str, name: str, path: Path, pool: ProcessPoolExecutor, arguments: argparse.Namespace) -> None:
    """Add the missing rows of a task to its file."""
    start, threads = time.perf_counter(), torch.get_num_threads()
    title = TASKS[name].title + (f", {TASKS[name].rounds} rounds" if kind == "variants" else "")
    result = json.loads(path.read_text()) if path.exists() else {"title": title, "rows": {}, "minutes": 0.0}
    before = result["minutes"]
    gpu = f", {torch.cuda.get_device_name()}" if arguments.device.startswith("cuda") else ""
    options = [
        *(["--device", arguments.device] if gpu else []),
        *(["--jobs", str(arguments.jobs)] if arguments.jobs > 1 else []),
    ]
    machine = f"{arguments.jobs} process{'es' * (arguments.jobs > 1)} of {threads} thread{'s' * (threads > 1)}"

    def save() -> None:
        result["command"] = " ".join(["python benchmarks/label_leaks.py", kind, name, *options])
        result["machine"] = (
            f"torch {torch.__version__.split('+')[0]}, {machine}, {cpu_name()}{gpu}, commit {current_commit()[:7]}"
        )
        result["minutes"] = round(before + (time.perf_counter() - start) / 60, 1)
        path.with_suffix(".tmp").write_text(json.dumps(rounded(result)) + "\n", encoding="utf-8")
        path.with_suffix(".tmp").replace(path)

    PAGES[kind][0](name, result["rows"], pool, arguments.device, save)
    save()


def rounded(value: object) -> object:
    """Return a JSON value with numbers of six digits after the point."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


def start_worker(threads: int) -> None:
    """Prepare a process: those of all threads each would be many times slower."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=PAGES)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "label-leaks")
    parser.add_argument("--device", default="cpu", help="device of training, such as cuda")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")  # a fork cannot use the GPU
    if arguments.jobs > 1:
        torch.set_num_threads(1)
    with ProcessPoolExecutor(arguments.jobs, context, start_worker, (torch.get_num_threads(),)) as pool:
        for name in arguments.tasks:
            pool.submit(federation_of, name, 0).result()  # parse the data once
            measure(arguments.kind, name, arguments.out / f"{arguments.kind}-{name}.json", pool, arguments)
    (arguments.out / f"{arguments.kind}.md").write_text(page(arguments.kind, arguments.out), encoding="utf-8")


if __name__ == "__main__":
    main()
