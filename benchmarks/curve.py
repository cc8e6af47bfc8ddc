"""Record accuracy over wall-clock time of our engines and of hand-written loops, on digits enlarged to 28×28 pixels.

    python benchmarks/curve.py --threads 2 --out benchmarks/results/curves/cpu

The clock includes tracing and compiling. Writes NAME.json, of which `page.py` draws the figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu import LOOPS, problem, round_function, run_spec
from machine import cpu_name

import gpfl
from gpfl.engine import RunSpec, make_engine
from gpfl.engine.allocator import retain_freed_memory
from gpfl.errors import GpflError
from gpfl.io.provenance import current_commit

CONTESTANTS = ("plain", "tight", "loop", "ours", "compiled")
TASKS = {"digits": ({"name": "mlp"}, 0.05), "digits at 28×28": ({"name": "cnn4"}, 0.02)}
SHARE = 0.9  # of the final accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("curves"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--method", default="gpfl", choices=("gpfl", "fedavg"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    retain_freed_memory()
    results: dict[str, Any] = {
        "machine": f"{cpu_name()}, {args.threads} thread{'s' * (args.threads > 1)}",
        "torch": torch.__version__,
        "commit": current_commit(),
        "command": " ".join(["python", *sys.argv]),
        "method": args.method,
        "curves": {},
    }
    for task, (net, lr) in TASKS.items():
        table = gpfl.federate("digits").table
        federation = gpfl.federate(enlarged(table) if "28" in task else table, clients=20, classes_per_client=4)
        spec = run_spec(federation, net, args.method, lr=lr)
        for name in CONTESTANTS:
            curve = record(name, spec, args.rounds)
            if len(curve["seconds"]) == 1:  # not a single round
                continue
            results["curves"].setdefault(task, {})[name] = curve
            print(f"{task}, {name}: {time_to_share(curve):.2f} s to {SHARE:.0%} of the final accuracy {final(curve):.3f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(results, indent=1))


def enlarged(table: gpfl.Table) -> gpfl.Table:
    """Return the 8×8 images at 28×28 pixels, each pixel three to four times in both directions."""
    index = torch.arange(28) * 8 // 28
    x = table.x[:, :, index][..., index]
    return gpfl.Table(np.asarray(x), np.asarray(table.y), classes=10, name="digits28", pixel_max=16)


def record(name: str, spec: RunSpec, rounds: int) -> dict[str, list[float]]:
    """Return the accuracy after each round and the seconds since the start."""
    start, curve = time.perf_counter(), {"seconds": [0.0], "accuracy": [0.0]}
    spec = dataclasses.replace(spec, compile="on" if name == "compiled" else "off")
    run = (
        LOOPS[name](problem(spec)).run_round
        if name in LOOPS
        else round_function(make_engine("loop" if name == "loop" else "auto", spec), spec)
    )
    for _ in range(rounds):
        try:
            accuracy = run()
        except GpflError as error:  # no compiler on the machine
            print(f"without '{name}': {error}", file=sys.stderr)
            break
        curve["seconds"].append(round(time.perf_counter() - start, 4))
        curve["accuracy"].append(round(accuracy, 5))
    return curve


def final(curve: dict[str, list[float]]) -> float:
    """Return the mean accuracy of the last five rounds."""
    return float(np.mean(curve["accuracy"][-5:]))


def time_to_share(curve: dict[str, list[float]]) -> float:
    """Return the seconds after which the accuracy first reaches 90 % of the final one."""
    reached = [t for t, accuracy in zip(curve["seconds"], curve["accuracy"], strict=True) if accuracy >= SHARE * final(curve)]
    return reached[0]


def page(results: dict[str, Any]) -> str:
    """Return the table of the times to 90 % of the final accuracy."""
    lines = [
        "## Time to 90 % of the final accuracy",
        "",
        f"Seconds on the wall clock with tracing and compiling: {results['method']}, 20 clients, {results['machine']}, torch "
        f"{results['torch']}, commit {results['commit']}, `{results['command']}`.",
        "",
        "![Accuracy over seconds on the wall clock](images/time_to_accuracy.svg)",
        "",
        f"| task | {' | '.join(CONTESTANTS)} |",
        f"| --- {'| ---: ' * len(CONTESTANTS)}|",
    ]
    for task, curves in results["curves"].items():
        cells = [
            f"{time_to_share(curves[name]):.2f} ({final(curves[name]):.1%})" if name in curves else "–" for name in CONTESTANTS
        ]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "In brackets: the final accuracy, the mean of the last five rounds."]) + "\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw accuracy over time, a panel for each task."""
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "gpfl"
    figure, axes = plt.subplots(1, len(results["curves"]), figsize=(9, 3.6), squeeze=False)
    for axis, (task, curves) in zip(axes[0], results["curves"].items(), strict=True):
        for name, curve in curves.items():
            (line,) = axis.plot(curve["seconds"][1:], curve["accuracy"][1:], label=name)
            axis.plot([time_to_share(curve)], [SHARE * final(curve)], "o", color=line.get_color())
        axis.set(xscale="log", xlabel="seconds", title=task, ylabel="test accuracy" if axis is axes[0][0] else "")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
