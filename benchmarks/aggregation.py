"""What robust aggregation costs personalised methods without attackers, and what it saves with one malicious client.

    python benchmarks/aggregation.py digits heart

Runs are kept in a JSON file for each task in `--out`; those that it has are skipped. The page is made of all files. The
malicious client trains as the others do and sends −10 times its update. Accuracies are those of the other clients' models after
the last round, over all their test samples. Published data are found as by `gpfl run`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
from pathlib import Path

from poison import poison

import gpfl
from gpfl.engine import make_engine
from gpfl.errors import DivergenceError
from gpfl.training.config import resolve_config
from gpfl.training.execute import PreparedRun, execute
from gpfl.training.prepare import prepare

ROOT = Path(__file__).parents[1]
METHODS = ("gpfl", "fedavg", "fedper", "ditto", "local")
SEEDS = (0, 1, 2)
FACTOR = -10.0
MALICIOUS = 0  # the client of this number
ROUNDS = 40
TASKS: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "digits": (
        "digits, 10 clients, 4 classes each, mlp",
        {"data": "digits", "clients": 10, "partition": "pathological", "classes_per_client": 4},
        {"net": {"name": "mlp"}, "lr": 0.05},
    ),
    "heart": ("heart disease, 4 hospitals", {"data": "heart"}, {}),
}
RULES: dict[str, dict[str, object]] = {
    "mean": {},
    "trimmed mean, β = 0.2": {"aggregation": "trimmed_mean"},
    "median": {"aggregation": "median"},
    "Krum": {"aggregation": "krum"},
}


def accuracy(task: str, method: str, rule: str, attacked: bool, seed: int) -> float | None:
    """Return the accuracy of the honest clients, None if the run diverged."""
    _, data, options = TASKS[task]
    federation = gpfl.federate(seed=seed, **data) if task == "digits" else gpfl.federate(**data)
    train = {"rounds": ROUNDS, **RULES[rule], **({"lr": options["lr"]} if "lr" in options else {})}
    if rule == "Krum" and len(federation) < 5:
        train["krum_byzantine"] = 0
    sections = {"run": {"seed": seed, "eval_every": ROUNDS}, "method": {"name": method}, "train": train}
    sections |= {"net": options["net"]} if "net" in options else {}
    config, spec = prepare(resolve_config(sections, federation=federation), federation)
    if attacked:
        spec = dataclasses.replace(spec, method=poison(spec.method, MALICIOUS, lambda update: FACTOR * update))
    try:
        last = execute(PreparedRun(config, spec), make_engine("vmap", spec)).history[-1]["client_accuracies"]
    except DivergenceError:
        return None
    sizes = federation.n_samples("test")
    honest = [client for client in range(len(federation)) if client != MALICIOUS]
    correct = sum(list(last.values())[client] * sizes[client] for client in honest)
    return 100 * float(correct / sizes[honest].sum())


def measure(task: str, folder: Path) -> None:
    """Run what the file of a task lacks."""
    path = folder / f"{task}.json"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    content = json.loads(path.read_text()) if path.exists() else {"gpfl": commit, "runs": {}}
    for method in METHODS:
        for rule in RULES if method != "local" else ("mean",):
            for attacked in (False, True) if method != "local" else (False,):
                for seed in SEEDS:
                    key = f"{method}; {rule}; {'attacked' if attacked else 'honest'}; {seed}"
                    if key not in content["runs"]:
                        content["runs"][key] = accuracy(task, method, rule, attacked, seed)
                        path.write_text(json.dumps(content, indent=1) + "\n")
                        print(task, key, content["runs"][key], flush=True)


def page(folder: Path) -> str:
    """Return the page of all files."""
    lines = [
        "# Robust aggregation: cost and benefit",
        "",
        f"Accuracy of the honest clients in %, after {ROUNDS} rounds, mean over seeds {', '.join(map(str, SEEDS))} (least to "
        f"greatest). One client is malicious in the columns “attacked”: it sends {FACTOR:g} times its update, in every round. "
        "That client's own model is left out of all columns. “diverged n×”: so many of the runs ended with a loss that is not "
        "finite; the mean is over the others. Krum expects one malicious client, on heart, which has four clients, none. Made "
        "by `python benchmarks/aggregation.py digits heart`.",
    ]
    for task, (title, _, _) in TASKS.items():
        path = folder / f"{task}.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text())
        lines += ["", f"## {title}", "", f"Commit {content['gpfl']}.", ""]
        lines += ["| method | " + " | ".join(f"{rule} | attacked" for rule in RULES) + " |"]
        lines += ["| --- |" + " ---: |" * (2 * len(RULES))]
        for method in METHODS:
            cells = []
            for rule in RULES:
                for attacked in ("honest", "attacked"):
                    values = [content["runs"].get(f"{method}; {rule}; {attacked}; {seed}", "–") for seed in SEEDS]
                    cells.append(_cell(values))
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float | str | None]) -> str:
    if "–" in values:
        return "–"
    numbers = [value for value in values if isinstance(value, float)]
    diverged = len(values) - len(numbers)
    text = f"{statistics.mean(numbers):.1f} ({min(numbers):.1f}–{max(numbers):.1f})" if numbers else ""
    return ", ".join(part for part in (text, f"diverged {diverged}×" if diverged else "") if part)


def main() -> None:
    """Run the tasks of the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[*TASKS, []])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "aggregation")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for task in arguments.tasks:
        measure(task, arguments.out)
    (arguments.out / "table.md").write_text(page(arguments.out))


if __name__ == "__main__":
    main()
