"""Write docs/speed.md and its figure from the recorded results: python benchmarks/page.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import curve
import startup
from cpu import growth_page
from cpu import page as rounds_page
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
PEERS = """
The table is one run on a machine shared with other work: ratios within a case are comparable, times between cases and runs
differ by up to a fifth. The recorded commit was rebased; its library code is that of b6e04b4. Steps are compiled by default
only in long runs ([engines](engines.md)), so the first ratio holds for short ones.

Other libraries, not run by this benchmark: rounds with test evaluation on 2 cores of an AMD EPYC, torch 2.13, the same net,
data, split and batch size, as multiples of our time before these changes. Not comparable with the table above, which has one
thread and CPU time:

| case | PFLlib | fluke | FL-bench |
| --- | ---: | ---: | ---: |
| 28×28 CNN, GPFL | 1.34 | – | – |
| 28×28 CNN, FedAvg | 1.50 | 1.46 | 1.44 |
| CIFAR CNN, GPFL | 1.39 | – | – |
| digits MLP, GPFL | 5.0 | – | – |
| AG News fastText, GPFL | 3.4 | – | – |
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


def load_results(folder: str = ".") -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted((RESULTS / folder).glob("*.json"))}


def text() -> str:
    results = load_results()
    parts = [INTRODUCTION, *([CAPTION] if growth(results) else [])]
    rounds = load_results("rounds").values()
    parts += [rounds_page(result).replace("#", "##", 1) for result in rounds] + ([PEERS] if rounds else [])
    parts += [growth_page(list(clients.values()))] if (clients := load_results("growth")) else []
    parts += [curve.page(result) for result in load_results("curves").values()]
    parts += [startup.page(list(starts.values()))] if (starts := load_results("startup")) else []
    parts += [page(result).replace("# Speed on", "##", 1) for result in results.values()]
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
    mpl.rcParams["svg.hashsalt"] = "gpfl"
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
