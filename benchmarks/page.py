"""Writes docs/speed.md and its picture from the recorded results: python benchmarks/page.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from speed import page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "images" / "growth.svg"
INTRODUCTION = """# Speed, measured

Written by `python benchmarks/page.py` from the files in [`benchmarks/results`](../benchmarks/README.md), which hold the
command and the commit that each was made with. How engines work: [engines](engines.md).
"""


def main() -> None:
    (ROOT / "docs" / "speed.md").write_text(text(), encoding="utf-8")
    if growth(cases()):
        draw(growth(cases()))


def recorded() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def cases() -> dict[str, dict[str, Any]]:
    return {f"{name}: {key}": case for name, held in recorded().items() for key, case in held["cases"].items()}


def text() -> str:
    parts = [INTRODUCTION]
    if growth(cases()):
        parts.append("![Time of a step of all clients by their number](images/growth.svg)\n")
    parts += [page(held).replace("# Speed on", "## ", 1) for held in recorded().values()]
    return "\n".join(parts)


def growth(found: dict[str, dict[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """For each machine, task and method that was timed with several numbers of clients: (clients, step, floor)."""
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for key, case in found.items():
        name, _, rest = key.partition(": ")
        task, method, _, engine, precision, batch = rest.split("/")
        label = f"{name}: {task}, {method}" + (
            "" if (precision, batch) == ("float32", "10") else f", {precision}, batch {batch}"
        )
        floor = max(case["floor_bytes_ms"], case["floor_operations_ms"])
        if engine == "auto":
            lines.setdefault(label, []).append((case["clients"], case["step_ms"], floor))
    return {label: sorted(points) for label, points in lines.items() if len({point[0] for point in points}) > 1}


def draw(lines: dict[str, list[tuple[int, float, float]]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for label, points in lines.items():
        clients, steps, floors = zip(*points, strict=True)
        (line,) = axes.plot(clients, steps, marker="o", label=label)
        axes.plot(clients, floors, linestyle=":", color=line.get_color(), label=f"{label}: floor")
    axes.set(xscale="log", yscale="log", xlabel="clients", ylabel="a step of all clients, ms")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(PICTURE, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
