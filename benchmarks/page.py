"""Writes docs/speed.md and its picture from the recorded results: python benchmarks/page.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memory import sentence
from speed import LISTS, page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "growth.svg"
INTRODUCTION = """# Speed, measured

Written by `python benchmarks/page.py` from the files in [`benchmarks/results`](../benchmarks/README.md), which hold the
command and the commit that each was made with. How engines work: [engines](engines.md).
"""
CAPTION = "![Time of a step of all clients by their number, by the size of batches, and by net](images/growth.svg)\n"

Points = list[tuple[Any, float, float]]
"""What varies, the time of a step of all clients, and its floor, both in milliseconds."""


def main() -> None:
    (ROOT / "docs" / "speed.md").write_text(text(), encoding="utf-8")
    if found := growth(recorded()):
        draw(found)


def recorded() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def text() -> str:
    results = recorded()
    parts = [INTRODUCTION, *([CAPTION] if growth(results) else [])]
    parts += [page(held).replace("# Speed on", "##", 1) for held in results.values()]
    kept = [json.loads(path.read_text()) for path in sorted((RESULTS / "memory").glob("*.json"))]
    parts += ["## Memory over rounds\n", *(f"{sentence(held)}\n" for held in kept)] if kept else []
    return "\n".join(parts)


def growth(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Points]]:
    """By panel and line: how a step grows with clients, batches and nets, for machines on which all of a list was timed."""
    panels: dict[str, dict[str, Points]] = {}
    for name, held in results.items():
        cases = held["cases"]
        for panel, keys in (("clients", LISTS["growth"]), ("rows in a batch", ["cifar100/gpfl/20", *LISTS["batches"]])):
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


def draw(panels: dict[str, dict[str, Points]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "gpfl"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.8), squeeze=False)
    for place, (panel, lines) in zip(axes[0], panels.items(), strict=True):
        for (label, points), mark in zip(lines.items(), "osv^D", strict=False):
            values, steps, floors = zip(*points, strict=True)
            solid, dotted = ("none", "none") if isinstance(values[0], str) else ("-", ":")  # nets have no order
            (line,) = place.plot(values, steps, linestyle=solid, marker=mark, label=label)
            below = {"linestyle": dotted, "marker": mark, "markersize": 3, "color": line.get_color()}
            place.plot(values, floors, **below, label=f"{label}, floor")
        place.set(yscale="log", xlabel=panel, ylabel="a step of all clients, ms" if place is axes[0][0] else "")
        if isinstance(values[0], str):
            place.tick_params("x", rotation=60)
        else:
            place.set_xscale("log")
        place.legend(fontsize=7, loc="lower right" if isinstance(values[0], str) else "best")
        place.grid(alpha=0.3)
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
