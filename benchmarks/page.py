"""Write docs/speed.md and its figure from the recorded results: python benchmarks/page.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import curve
import startup
from cpu import goals_page, growth_page, rounds_page
from memory import sentence
from scale import page as scale_page
from speed import LISTS, page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURE = ROOT / "docs" / "images" / "growth.svg"
INTRODUCTION = """# Speed

`python benchmarks/page.py` writes this page from the files in [`benchmarks/results`](../benchmarks/README.md), which record
the command and the commit of each measurement. [Engines](engines.md) explains how rounds are executed.
"""
PEERS = """*Ours* has traced steps and channels-last weights. By default, steps are compiled in long runs;
[Engines](engines.md#on-a-cpu) says what each change gained.

### Other libraries

Measured once, not by this benchmark, as multiples of our time before channels-last weights and compiled steps: rounds with test
evaluation on 2 cores of an AMD EPYC, torch 2.13, with the same net, data, split and batch size.

| case | PFLlib | fluke | FL-bench |
| --- | ---: | ---: | ---: |
| 28×28 CNN, GPFL | 1.34 | – | – |
| 28×28 CNN, FedAvg | 1.50 | 1.46 | 1.44 |
| CIFAR CNN, GPFL | 1.39 | – | – |
| digits MLP, GPFL | 5.0 | – | – |
| AG News fastText, GPFL | 3.4 | – | – |
| 5,000 samples, 20 / 100 / 500 clients | 1.47 / 1.58 / 2.21 | – | – |
| their peak memory, MB | 714 / 1,653 / 6,316 | – | – |
| ours, MB | 564 / 513 / 549 | – | – |
"""
CAPTION = "![Time of a step of all clients by number of clients, batch size and net](images/growth.svg)\n"

Points = list[tuple[Any, float, float]]
"""The varied value, the time of a step of all clients, and its floor, both in milliseconds."""


def main() -> None:
    (ROOT / "docs" / "speed.md").write_text(text(), encoding="utf-8")
    if panels := growth(load_results()):
        draw_figure(panels)
    for result in load_results("curves").values():
        curve.draw(result, FIGURE.with_name("time_to_accuracy.svg"))


def load_results(folder: str = ".") -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / folder).glob("*.json"))}


def text() -> str:
    results = load_results()
    parts = [INTRODUCTION]
    rounds = load_results("rounds").values()
    beside_loops = [result for result in rounds if any("plain" in case["seconds"] for case in result["cases"].values())]
    parts += ["## Rounds on a CPU beside hand-written loops\n", goals_page(beside_loops), "Milliseconds of a round:\n"]
    parts += [*(rounds_page(result) for result in rounds), PEERS]
    parts += [growth_page(result) for result in load_results("growth").values()]
    parts += [curve.page(result) for result in load_results("curves").values()]
    parts += [startup.page(result) for result in load_results("startup").values()]
    parts += [page(result).replace("# Speed on", "##", 1) for result in results.values()] + [CAPTION] * bool(growth(results))
    memory = load_results("memory").values()
    parts += ["## Memory over rounds\n", *(f"{sentence(result)}\n" for result in memory)] if memory else []
    scale = load_results("scale").values()
    parts += ["## Many clients\n", *(scale_page(result) for result in scale)] if scale else []
    return "\n".join(parts)


def growth(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Points]]:
    """Return the points by panel and line, for machines on which every case of a list was timed."""
    panels: dict[str, dict[str, Points]] = {}
    for name, result in results.items():
        cases = result["cases"]
        for panel, keys in (("clients", LISTS["growth"]), ("batch size", ["cifar100/gpfl/20", *LISTS["batches"]])):
            if all(key in cases for key in keys):
                for key in keys:
                    case = cases[key]
                    line = panels.setdefault(panel, {}).setdefault(f"{name}: {key.split('/')[1]}", [])
                    line.append((case["clients" if panel == "clients" else "batch_size"], *times(case)))
        if all(key in cases for key in LISTS["nets"]):
            line = panels.setdefault("task and net, 20 clients", {}).setdefault(f"{name}: gpfl", [])
            line += [(key.split("/")[0], *times(cases[key])) for key in LISTS["nets"]]
    return {panel: {name: sorted_points(points) for name, points in lines.items()} for panel, lines in panels.items()}


def sorted_points(points: Points) -> Points:
    return points if isinstance(points[0][0], str) else sorted(points)


def times(case: dict[str, Any]) -> tuple[float, float]:
    return case["step_ms"], max(case["floor_bytes_ms"], case["floor_operations_ms"])


def draw_figure(panels: dict[str, dict[str, Points]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "gpfl", "svg.fonttype": "none"})  # text as text: a third of the size
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), squeeze=False)
    for axis, (panel, lines) in zip(axes[0], panels.items(), strict=True):
        for (label, points), marker in zip(lines.items(), "osv^D", strict=False):
            values, steps, floors = zip(*points, strict=True)
            solid, dotted = ("none", "none") if isinstance(values[0], str) else ("-", ":")  # nets have no order
            (line,) = axis.plot(values, steps, linestyle=solid, marker=marker, label=label)
            style = {"linestyle": dotted, "marker": marker, "markersize": 3, "color": line.get_color()}
            axis.plot(values, floors, **style, label=f"{label}, floor")
        axis.set(yscale="log", xlabel=panel, ylabel="step of all clients, ms" if axis is axes[0][0] else "")
        if isinstance(values[0], str):
            axis.tick_params("x", rotation=60)
        else:
            axis.set_xscale("log")
        axis.legend(fontsize=7, loc="lower right" if isinstance(values[0], str) else "best")
        axis.grid(alpha=0.3)
    figure.savefig(FIGURE, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
