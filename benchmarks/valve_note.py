"""Measure and draw what docs/valve.md shows of GPFL's valve.

    python benchmarks/valve_note.py measure    # exactness and rank: benchmarks/results/valve/rank.json, two minutes of one core
    python benchmarks/valve_note.py figures    # docs/images/valve-*.svg, from that file and the other recorded results

The costs are measured by `valve.py`, the label leak by `label_leaks.py`.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from valve import CASES

import gpfl
from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo
from gpfl.core.tree import Tree
from gpfl.defences import DefenceConfig, defend
from gpfl.engine import RunSpec
from gpfl.engine.base import Loop
from gpfl.io.provenance import current_commit
from gpfl.methods.gpfl import GPFL, init_valve, valve
from gpfl.models.architectures import CNN4, HARCNN, FastText, net_from_architecture
from gpfl.privacy.uploads import AttackedBatch, observe_uploads

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "valve"
STEPS, CLASSES, LR, MU = 100, 10, 0.01, 0.1
NETS = {
    "fastText": (FastText(hidden=32, vocabulary=200), None),
    "4-layer CNN": (CNN4(), (3, 32, 32)),
    "HAR-CNN": (HARCNN(), (9, 1, 128)),
}
PROTOCOLS: dict[str, dict[str, object]] = {
    "corrected": {},
    "paper": {"p_scale": "mean", "mlg_norm": "sample_mean", "reg": "norm"},
    "reference": {"cond_source": "stale_local"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "figures"))
    warnings.simplefilter("ignore")
    if parser.parse_args().action == "figures":
        draw_rank()
        draw_cost()
        draw_leak()
        return
    torch.set_num_threads(1)
    results = {"torch": torch.__version__, "commit": current_commit(), "exactness": exactness(), **optimizers(), **spectra()}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "rank.json").write_text(json.dumps(results, indent=1) + "\n")


# Exactness: a client's rounds with both forms of the valve.


def exactness() -> dict[str, dict[str, object]]:
    """Return the largest difference of any weight after `STEPS` steps, relative to the largest of its tensor above 1."""
    out = {}
    for name, (architecture, shape) in NETS.items():
        rng = torch.Generator().manual_seed(1)
        x = torch.randn((STEPS, 10, *shape), generator=rng) if shape else torch.randint(0, 200, (STEPS, 10, 20), generator=rng)
        net = net_from_architecture(architecture, name, x[0], CLASSES)
        row: dict[str, object] = {"width": net.width}
        for protocol, options in PROTOCOLS.items():
            for dtype in (torch.float64, torch.float32):
                full, factored = (
                    run_rounds(GPFL(lam=0.01, mu=MU, valve=form, **options).bind(net, lr=LR, epochs=1), x, dtype)  # type: ignore[arg-type]
                    for form in ("full", "factored")
                )
                pairs = tree.zip_leaves(factored, full)
                row[f"{protocol}/{dtype}"] = max(float((a - b).abs().max() / b.abs().max().clamp_min(1)) for a, b in pairs)
        out[name] = row
        print(name, row, flush=True)
    return out


def exactness_rows(results: dict[str, Any]) -> list[str]:
    """Return the lines of the table of exactness."""
    kinds = (torch.float64, torch.float32)
    lines = [
        f"| net | K | {' | '.join(f'{protocol}, {str(kind)[6:]}' for kind in kinds for protocol in PROTOCOLS)} |",
        "| --- | ---: |" + " ---: |" * (len(kinds) * len(PROTOCOLS)),
    ]
    for name, row in results["exactness"].items():
        cells = [f"{row[f'{protocol}/{kind}']:.0e}" for kind in kinds for protocol in PROTOCOLS]
        lines.append(f"| {name} | {row['width']} | {' | '.join(cells)} |")
    return lines


def run_rounds(method: GPFL, x: Tensor, dtype: torch.dtype) -> Tree:
    """Return the upload of one client after two rounds of half of all steps; stale contexts are zero in the first."""
    shared, private = (tree.map_leaves(lambda t: t.to(dtype), state) for state in method.init(0))
    for number, batches in enumerate(x.chunk(2)):
        counts = torch.tensor([50, 30, 20] + [0] * (CLASSES - 3), dtype=dtype)
        client = ClientInfo(counts.sum(), counts, *(torch.tensor(v, dtype=dtype) for v in (number, 2, 0)))
        state = method.download(shared, private, client)
        for step, batch in enumerate(batches):
            y = (torch.arange(len(batch)) + step) % 3
            samples = batch.to(dtype) if batch.is_floating_point() else batch
            state, _ = method.step(shared, state, Batch(samples, y, torch.ones(len(y))), client)
        upload, private = method.upload(shared, state, private, client)
        shared = method.aggregate(shared, upload)
    return upload


# Other optimizers: the valve alone, on a loss of both routes.


def optimizers() -> dict[str, object]:
    """Return the difference of V under momentum from the recursion of its factors, and the ranks of its change."""
    width, rate, momentum = 64, 0.05, 0.9
    rng = torch.Generator().manual_seed(0)
    g, p, features = (torch.randn(*shape, generator=rng).double() for shape in ((width,), (width,), (10, width)))
    target, y = torch.randn(10, width, generator=rng).double(), torch.arange(10) % 3
    head = torch.randn(3, width, generator=rng).double() / 8
    start = {name: value.double() for name, value in tree.flatten(init_valve(width, 0)).items()}
    layers = [name for name in start if name.endswith("linear.weight")]

    def loss(weights: Tree) -> Tensor:
        personal, guided = (valve(weights, features, context) for context in (p, g))
        return F.cross_entropy(personal @ head.T, y) + (guided - target).square().mean()

    def train(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> dict[str, Tensor]:
        weights = {name: nn.Parameter(value.clone()) for name, value in start.items()}
        optimizer = make(list(weights.values()))
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(dict(weights)).backward()
            optimizer.step()
        return {name: value.detach() for name, value in weights.items()}

    sgd = train(lambda ps: torch.optim.SGD(ps, lr=rate, momentum=momentum, weight_decay=MU))
    factored = train_factors(loss, start, layers, torch.stack([g, p]), rate, momentum)
    difference = max(float((factored[name] - sgd[name]).abs().max()) for name in start)
    ranks = {}
    for name, trained in (("SGD with momentum", sgd), ("Adam", train(lambda ps: torch.optim.Adam(ps, lr=1e-3)))):
        a, b = start[layers[0]], trained[layers[0]]
        complement = torch.linalg.svd(torch.stack([g, p])).Vh[2:]  # what V has outside the contexts' span gives d
        d = ((a @ complement.T) * (b @ complement.T)).sum() / (a @ complement.T).square().sum()
        values = torch.linalg.svdvals(b - d * a)
        ranks[name] = int((values > 1e-10 * values[0]).sum())
    return {"momentum_difference": difference, "ranks": ranks}


def train_factors(
    loss: Callable[[Tree], Tensor], start: dict[str, Tensor], layers: list[str], c: Tensor, rate: float, momentum: float
) -> dict[str, Tensor]:
    """Return the weights after SGD with momentum, of which those of linear layers are d V₀ + A gᵀ + B p_iᵀ.

    Velocities have the same form, e V₀ + a gᵀ + b p_iᵀ.
    """
    factors = {name: torch.zeros(2, len(start[name])).double() for name in layers}
    speeds = {name: torch.zeros_like(value) for name, value in factors.items()}
    others = {name: value.clone() for name, value in start.items() if name not in layers}
    velocities = {name: torch.zeros_like(value) for name, value in others.items()}
    d, e = 1.0, 0.0

    def matrices() -> dict[str, Tensor]:
        return {name: d * start[name] + factors[name].T @ c for name in layers}

    for _ in range(STEPS):
        weights = {name: value.clone().requires_grad_() for name, value in {**others, **matrices()}.items()}
        gradients = dict(zip(weights, torch.autograd.grad(loss(dict(weights)), list(weights.values())), strict=True))
        e = momentum * e + MU * d
        for name in layers:
            deltas = torch.linalg.lstsq(c.T, gradients[name].T).solution  # gradient = Σ δ cᵀ
            speeds[name] = momentum * speeds[name] + deltas + MU * factors[name]
            factors[name] = factors[name] - rate * speeds[name]
        for name in others:
            velocities[name] = momentum * velocities[name] + gradients[name] + MU * others[name]
            others[name] = others[name] - rate * velocities[name]
        d = d - rate * e
    return {**others, **matrices()}


# Rank: singular values of uploads.


def spectra() -> dict[str, object]:
    """Return the singular values of V_i − d V₀ for one client of digits after five rounds, by variant."""
    federation = gpfl.federate("digits", clients=20, partition="pathological", classes_per_client=4, seed=0)
    settings = {"net": "mlp", "lr": 0.05, "rounds": 5, "device": "cpu", "mu": MU, "seed": 0}
    out = {}
    for name, options, defence in (
        ("as published", {}, None),
        ("--valve-gradient global", {"valve_gradient": "global"}, None),
        ("clip 1, noise 0.001", {}, DefenceConfig(clip=1.0, noise=0.001)),
    ):
        result = gpfl.fit("gpfl", federation, **{**settings, **options})
        engine, method = result.engine, result.engine.method
        if defence is not None:
            method = defend(method, defence, seed=0, min_clients=20)
        engine = Loop(RunSpec(method, engine.federation, engine.schedule, engine.class_counts))
        (view,) = observe_uploads(engine, result.outcome.last, [AttackedBatch(0, (0,))], "epoch")
        before, after = (
            tree.leaf(tree.branch(state, "cov"), "gamma.linear.weight").double() for state in (view.sent, view.upload)
        )
        basis = torch.linalg.qr(tree.leaf(tree.branch(view.sent, "gce"), "weight").double().T).Q
        rest = [weight - weight @ basis @ basis.T for weight in (before, after)]
        d = (rest[0] * rest[1]).sum() / rest[0].square().sum()  # as the attack finds it
        out[name] = torch.linalg.svdvals(after - d * before).tolist()
    return {"spectra": out}


# Figures.


def start_figure(panels: int, size: tuple[float, float]) -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "gpfl", "svg.fonttype": "none"})  # outlines of text take several times the room
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot as plt

    return plt.subplots(1, panels, figsize=size, squeeze=False, layout="constrained")


def save_figure(figure: Any, name: str) -> None:
    figure.savefig(ROOT / "docs" / "images" / f"{name}.svg", metadata={"Date": None})


def draw_rank() -> None:
    spectra = json.loads((RESULTS / "rank.json").read_text())["spectra"]
    figure, ((axis,),) = start_figure(1, (5.6, 3.2))
    for (name, values), marker in zip(spectra.items(), "os^", strict=True):
        axis.plot(range(1, len(values) + 1), values, marker=marker, markersize=3.5, linewidth=0.8, label=name)
    axis.set(yscale="log", xlabel="number of the singular value", ylabel="singular value of V_i − d V₀")
    axis.legend(frameon=False)
    save_figure(figure, "valve-rank")


def draw_cost() -> None:
    cases = json.loads((RESULTS / "cpu-1-thread.json").read_text())["cases"]
    figure, ((axis,),) = start_figure(1, (5.6, 3.2))
    rows = [(name, cases[name]) for name in reversed(CASES) if name in cases]
    forms = {
        "full": ("V full", "tab:gray"),
        "factored": ("V factored", "tab:blue"),
        "low rank": ("… sent as low rank", "tab:cyan"),
    }
    for offset, (form, (label, color)) in zip((0.27, 0, -0.27), forms.items(), strict=True):
        ratios = [case["loop"]["round_s"][form] / case["loop"]["round_s"]["FedPer"] for _, case in rows]
        y = [i + offset for i in range(len(rows))]
        bars = axis.barh(y, [ratio - 1 for ratio in ratios], 0.25, left=1, color=color, label=label)
        axis.bar_label(bars, [f"{ratio:.2f} ×" for ratio in ratios], padding=2, fontsize=8)
    axis.set_yticks(range(len(rows)), [f"{name}\nK = {case['loop']['width']}" for name, case in rows])
    axis.set(xscale="log", xlim=(1, 50), xlabel="round of GPFL in rounds of FedPer, engine loop (log scale)")
    axis.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axis.minorticks_off()
    axis.legend(frameon=False, loc="upper right")
    save_figure(figure, "valve-cost")


def draw_leak() -> None:
    folder = ROOT / "docs" / "results" / "label-leaks"
    figure, ((left, right),) = start_figure(2, (7.6, 3.2))
    noises = {"none": "0", "noise 0.001": "0.001", "noise 0.01": "0.01", "noise 0.1": "0.1"}
    sizes = ("2", "5", "20")
    labels = {
        "digits": "digits, 4 classes",
        "digits-all-classes": "digits, all classes",
        "fmnist": "FMNIST, 2 classes",
        "har": "HAR, 30 people",
        "cifar100": "Cifar100, 10 of 50",
    }
    for (task, label), marker in zip(labels.items(), "os^Dv", strict=True):
        if not (path := folder / f"defences-{task}.json").exists():
            continue
        rows = json.loads(path.read_text())["rows"]
        distances = {text: rows[f"5/{name}"]["distance"] for name, text in noises.items() if f"5/{name}" in rows}
        (line,) = left.plot(list(distances), list(distances.values()), marker=marker, label=label)
        left.axhline(rows["5/none"]["uniform"], color=line.get_color(), linestyle=":", linewidth=1)
        sums = {size: rows["5/none"]["sums"][size] for size in sizes if size in rows["5/none"]["sums"]}
        right.plot(list(sums), [shown / total for shown, _, total in sums.values()], marker=marker, color=line.get_color())
    left.set(
        xlabel="noise, in multiples of the clipping norm 1", ylabel="total variation distance of the guess", ylim=(-0.03, 1)
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    right.set(xlabel="clients in a secure sum", ylabel="clients whose class counts it shows", ylim=(-0.03, 1.03))
    save_figure(figure, "valve-leak")


if __name__ == "__main__":
    main()
