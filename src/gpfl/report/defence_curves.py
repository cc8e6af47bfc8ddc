"""What defences cost and bring: accuracy against ε, and what an attack rebuilds against accuracy; numbers, table, figures."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from gpfl.core import tree
from gpfl.defences.accounting import INSTALL_COMMAND, accountant_version, format_epsilon
from gpfl.engine import Engine
from gpfl.errors import GpflError
from gpfl.experiments.defence_study import FAMILIES, Spot, engine_of, loaded
from gpfl.experiments.definitions import display_name
from gpfl.experiments.grid import Job
from gpfl.io import files
from gpfl.privacy.attack import AttackConfig, AttackRunner, Case, Kept, ceiling_of
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.victims import Victim, choose_victims, state_at
from gpfl.report import attack_tables as table
from gpfl.report import plotting
from gpfl.report.attack_tables import Line
from gpfl.report.plotting import Box
from gpfl.training.defences import run_guarantee
from gpfl.training.run_dir import RunState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND = "geiping"
"""The attack of the curves: the strong one."""


@dataclass(frozen=True)
class Point:
    """A method under a defence: what it reaches, what it promises, and what an attack rebuilds."""

    method: str
    family: str  # "" without a defence
    variant: str  # the method's own settings as flags, "" as it is published
    value: float
    accuracy: float  # mean of the trials' best, as a share
    std: float
    trials: int
    bytes_up: float
    epsilon: float | None  # as it is run; None where nothing is promised, or nobody can say
    epsilon_if_poisson: float | None
    delta: float | None
    label_counts_known: bool  # at example level: the promise is for a row exchanged for another of its class
    target: str  # what leaks most
    psnr: float
    ssim: float
    floor: float
    verdict: str
    psnr_as_found: float  # without turning images that came back as negatives


@dataclass(frozen=True)
class Curves:
    """All points, with the ceiling that the attack reaches where nothing is protected."""

    points: tuple[Point, ...]
    ceiling: float
    images: int
    rounds: int
    which: str  # the round that is attacked
    failed: tuple[str, ...] = ()  # sentences about runs that did not end, such as those that noise drove to infinity
    doubt: str = ""  # what must be said where the attack does not win even there

    def of(self, method: str, family: str) -> list[Point]:
        """Gives a method's points of one family, by value."""
        held = [point for point in self.points if (point.method, point.family) == (method, family)]
        return sorted(held, key=lambda point: point.value)

    @property
    def methods(self) -> list[str]:
        """The methods, in order."""
        return list(dict.fromkeys(point.method for point in self.points))


# The numbers.


def curves(
    spots: Sequence[Spot],
    jobs: Mapping[Spot, Job],
    seeds: Sequence[int],
    out: Path,
    *,
    images: int,
    which: str,
    effort: AttackConfig,
    failed: Mapping[Path, str] | None = None,
    tell: Callable[[str, Line], None] = lambda words, line: None,
) -> Curves:
    """Gives the points of finished runs, each attacked in its own folder below `out`; cases that are there are not run again.

    Victims and starts are the same for all. Of a method's targets the one that leaks most counts. `failed` says by folder
    what went wrong with runs that have no point.
    """
    lost = {spot: (failed or {})[jobs[spot].folder] for spot in spots if jobs[spot].folder in (failed or {})}
    ended = [spot for spot in spots if spot not in lost]
    if not ended:
        raise GpflError(f"no run has ended: {next(iter(lost.values()))}")
    points: list[Point] = []
    victims: dict[int, list[Victim]] = {}
    ceiling, rounds, doubt = 0.0, 0, ""
    for spot in ended:
        job = jobs[spot]
        engine, state, rounds = opened(job, seeds[0], which)
        if not victims:
            victims = choose_victims(engine.federation, range(len(engine.federation)), images, [1], effort.seed)
            bench, case = ceiling_of(engine, victims, KIND, effort)
            top = table.line_of(case, bench.attack([case], out, quietly)[case])
            tell("ceiling", top)
            ceiling, doubt = top.psnr, "" if top.leaks else table.void(top)
        worst = attacked(engine, {which: state}, victims, effort, out / "points" / job.folder.name, which)
        tell(f"{spot.cell.column.heading}, {worst.case.words}", worst)
        points.append(point_of(spot, job, seeds, engine, worst))
    words = tuple(
        f"{display_name(spot.method)}, {spot.cell.column.heading}: {short(problem)}" for spot, problem in lost.items()
    )
    return Curves(tuple(points), ceiling, images, rounds, which, words, doubt)


def short(problem: str) -> str:
    """Gives a problem without the ways out of it, which are for a single run."""
    return problem.split(": lower train.lr")[0]


def quietly(case: Case, kept: Kept) -> None:
    """Says nothing."""


def opened(job: Job, seed: int, which: str) -> tuple[Engine, RunState, int]:
    """Gives the engine of a run, the state that is attacked, and the run's planned rounds."""
    if which == "0":
        engine: Engine = engine_of(job, seed)
        shared, private = engine.method.init(engine.schedule.seed)
        everyone = tree.to(tree.repeat(private, len(engine.federation)), engine.device)
        return engine, RunState(0, tree.to(shared, engine.device), everyone), engine.schedule.rounds
    result = loaded(job, seed)
    return result.engine, state_at(result, which), result.engine.schedule.rounds


def attacked(
    engine: Engine,
    states: Mapping[str, RunState],
    victims: Mapping[int, list[Victim]],
    effort: AttackConfig,
    folder: Path,
    which: str,
) -> Line:
    """Gives the line of the target that leaks most."""
    bench = AttackRunner(engine, states, victims, effort)
    cases = [Case(engine.method.name, target, KIND, which, "one", 1) for target in gradient_targets(engine.method)]
    lines = [table.line_of(case, kept) for case, kept in bench.attack(cases, folder, quietly).items()]
    return max(lines, key=lambda line: line.psnr)


def point_of(spot: Spot, job: Job, seeds: Sequence[int], engine: Engine, line: Line) -> Point:
    """Gives a point."""
    trials = job.trials(spot.method, seeds)
    if trials is None:
        raise ValueError(f"{job.folder} has no finished trials")
    level = spot.family.level if spot.family else ""
    promise = run_guarantee(engine.method, engine.federation, engine.schedule) if level else {}
    facts = cast(dict[str, float | None], promise.get(level, {}))
    return Point(
        method=spot.method,
        family=spot.family.name if spot.family else "",
        variant=spot.variant,
        value=spot.value,
        accuracy=trials.mean("best_accuracy"),
        std=trials.std("best_accuracy"),
        trials=len(trials.summaries),
        bytes_up=trials.mean("bytes_up"),
        epsilon=facts.get("epsilon"),
        epsilon_if_poisson=facts.get("epsilon_if_poisson"),
        delta=facts.get("delta"),
        label_counts_known=bool(facts.get("label_counts_known")),
        target=line.case.target,
        psnr=line.psnr,
        ssim=line.ssim,
        floor=line.floor,
        verdict=table.verdict(line),
        psnr_as_found=line.psnr_as_found,
    )


# The files.


def save(found: Curves, out: Path, origin: str) -> list[Path]:
    """Writes table, numbers and figures, and gives the files."""
    stated = any(point.epsilon is not None for point in found.points)
    pictures = [*(draw_epsilon(found, out / "epsilon") if stated else []), *draw_leak(found, out / "leak")]
    files.write_text(out / "table.md", markdown(found, origin) + plotting.markdown_images(pictures))
    files.write_text(out / "points.csv", as_csv(found))
    files.write_text(out / "points.json", json.dumps([asdict(point) for point in found.points], indent=1) + "\n")
    return [out / "table.md", out / "points.csv", out / "points.json", *pictures]


def as_csv(found: Curves) -> str:
    """Gives the points as CSV."""
    text = io.StringIO()
    rows = [asdict(point) for point in found.points]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown(found: Curves, origin: str) -> str:
    """Gives the table of all points and what must be known of it."""
    words = {family.name: family.words for family in FAMILIES}
    headings = (
        "method",
        "defence",
        "variant",
        "leaks most",
        "verdict",
        "value",
        "accuracy, %",
        "ε",
        "ε if Poisson",
        "PSNR, dB",
        "SSIM",
        "MB up",
    )
    rows = []
    for point in found.points:
        spread = f" ± {100 * point.std:.2f}" if point.trials > 1 else ""
        rows.append(
            [
                *(
                    display_name(point.method),
                    words.get(point.family, "none"),
                    f"`{point.variant}`" if point.variant else "",
                    point.target,
                ),
                *(point.verdict, f"{point.value:g}" if point.family else ""),
                f"{100 * point.accuracy:.2f}{spread}",
                *(format_epsilon(value) if value is not None else "" for value in (point.epsilon, point.epsilon_if_poisson)),
                *(f"{point.psnr:.2f}", f"{point.ssim:.3f}", f"{point.bytes_up / 1e6:.1f}"),
            ]
        )
    floor = float(np.mean([point.floor for point in found.points]))
    when = "round 0" if found.which == "0" else "the best round"
    notes = [
        f"Accuracy: best of {found.rounds} rounds on test rows, all clients. PSNR: what the attack '{KIND}' rebuilds of "
        f"{found.images} images from one step of one image at {when}, of the method's targets the one that leaks most; lower "
        f"is more private. Floor {floor:.2f} dB, ceiling (fedavg, no defence, untrained) {found.ceiling:.2f} dB.",
        found.doubt,
        EITHER_SIGN.format(as_found=max(point.psnr - point.psnr_as_found for point in found.points)),
        stated(found),
        within_classes(found),
        *(f"Not ended: {words}." for words in found.failed),
        BY_ROWS if any("--mlg-norm" in point.variant for point in found.points) else "",
        UNDECAYED if any("--mu" in point.variant for point in found.points) else "",
        origin,
    ]
    return "\n".join([*table.rows_of(headings, rows, 5), ""]) + "\n" + "\n\n".join(note for note in notes if note) + "\n"


BY_ROWS = (
    "GPFL at example level has its magnitude term by rows (--mlg-norm sample_mean, λ·√B), as that of a batch couples rows."
)
UNDECAYED = (
    "GPFL under clipped updates and few entries has no weight decay (--mu 0), which would fill them: it moves valve and "
    "embeddings many times as far as the data move anything."
)
EITHER_SIGN = table.EITHER + " As found (points.csv) PSNR is at most {as_found:.2f} dB lower."


def stated(found: Curves) -> str:
    """Gives the sentence about ε."""
    deltas = {point.delta for point in found.points if point.delta is not None}
    if not deltas:
        return ""
    if all(point.epsilon is None for point in found.points):
        return f"ε is not stated: dp-accounting is not installed. {INSTALL_COMMAND}, then run the same command."
    return (
        f"ε by {accountant_version()} for δ = {', '.join(f'{delta:g}' for delta in sorted(deltas))}, over all planned rounds. "
        "ε holds as it is run (one client or row exchanged, cohorts of fixed size, batches in order); ε if Poisson is what "
        "papers mostly state (one more or less, Poisson samples). Client level: for who sees aggregates, not single uploads. "
        "Above a hundred or so an ε promises next to nothing, and those for Poisson samples are far from tight."
    )


def within_classes(found: Curves) -> str:
    """Gives the sentence about promises that leave labels out."""
    names = dict.fromkeys(display_name(point.method) for point in found.points if point.label_counts_known)
    if not names:
        return ""
    return (
        f"At example level the ε of {', '.join(names)} is for a row exchanged for another of its class: the loss uses the "
        "client's label counts, which are not hidden."
    )


# Figures.


def draw_epsilon(found: Curves, stem: Path) -> list[Path]:
    """Draws accuracy against ε, a panel a level: filled marks as run, hollow ones if samples were Poisson."""
    families = [family for family in FAMILIES if family.level and any(found.of(m, family.name) for m in found.methods)]
    figure = plotting.new_figure(3.6 * len(families) + 0.4, 3.6)
    looks = plotting.method_styles(found.methods)
    panels = figure.subplots(1, len(families), squeeze=False, sharey=True)[0]
    for axes, family in zip(panels, families, strict=True):
        for method in found.methods:
            look, points = looks[method], found.of(method, family.name)
            accuracies = [100 * point.accuracy for point in points]
            known = [(p.epsilon, y) for p, y in zip(points, accuracies, strict=True) if p.epsilon is not None]
            usual = [
                (p.epsilon_if_poisson, y) for p, y in zip(points, accuracies, strict=True) if p.epsilon_if_poisson is not None
            ]
            if known:
                axes.plot(*zip(*known, strict=True), **look.line, markersize=5, label=display_name(method))
            hollow = {**look.line, "linestyle": ":", "linewidth": 1.0, "markerfacecolor": "white"}
            if usual:
                axes.plot(*zip(*usual, strict=True), **hollow, markersize=5, label=f"{display_name(method)}, if Poisson")
            for point in found.of(method, ""):
                axes.axhline(100 * point.accuracy, color=look.colour, linestyle=look.dash, linewidth=0.8, alpha=0.6)
        axes.set_xscale("log")
        axes.set(xlabel="ε", title=f"{family.level} level")
        tidy(axes)
    panels[0].set_ylabel("accuracy, %")
    legend(figure, panels[:1])
    plotting.add_footnote(figure, [f"Horizontal lines: without a defence{several(found)}. Left is more private."])
    return plotting.save_png_and_pdf(figure, stem)


def draw_leak(found: Curves, stem: Path) -> list[Path]:
    """Draws PSNR against accuracy, a panel a method, a mark and a dash for each family; the values stand at the points."""
    figure = plotting.new_figure(3.9 * len(found.methods) + 0.4, 3.8)
    panels = figure.subplots(1, len(found.methods), squeeze=False, sharey=True)[0]
    for axes, method in zip(panels, found.methods, strict=True):
        values: list[tuple[float, float, str, str]] = []
        for place, family in enumerate(FAMILIES):
            points = found.of(method, family.name)
            if not points:
                continue
            look = plotting.style_at(place + 1)
            x, y = [100 * point.accuracy for point in points], [point.psnr for point in points]
            axes.plot(x, y, **look.line, markersize=5, label=family.words)
            values += [(here, there, f"{point.value:g}", look.colour) for point, here, there in zip(points, x, y, strict=True)]
        for point in found.of(method, ""):
            axes.plot([100 * point.accuracy], [point.psnr], "k*", markersize=9, label="no defence")
        axes.margins(0.08, 0.18)
        write_at(axes, values)
        floor = float(np.mean([point.floor for point in found.points if point.method == method]))
        axes.axhline(floor, color="#555555", linewidth=0.8, linestyle=(0, (1, 2)))
        axes.annotate("floor", (0.01, floor), (0, 2), ("axes fraction", "data"), "offset points", fontsize=6)
        axes.set(xlabel="accuracy, %", title=display_name(method))
        tidy(axes)
    panels[0].set_ylabel("PSNR of what is rebuilt, dB")
    legend(figure, panels)
    words = f"Numbers at the marks: noise, share of entries, bits. Stars: no defence{several(found)}."
    plotting.add_footnote(figure, [f"Right and down is better. {words}"])
    return plotting.save_png_and_pdf(figure, stem)


def several(found: Curves) -> str:
    """Gives what must be said where methods stand there several times without a defence."""
    return ", with the settings of defended runs too" if any(p.variant for p in found.points if not p.family) else ""


def write_at(axes: Axes, marks: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes words at marks in their colours, above, below or beside them where no others stand, and off the axis."""
    across, up = 240 / np.ptp(axes.get_xlim()), 190 / np.ptp(axes.get_ylim())  # points of a panel, about
    lowest = up * axes.get_ylim()[0] + 3
    taken = [Box(across * x - 3, up * y - 3, 6.0) for x, y, _, _ in marks]
    for x, y, words, colour in marks:
        wide = 3.8 * len(words)
        near, far = ([(-wide / 2, above) for above in heights] for heights in ((5, -11, 12, -18), (-25, 19, 26, 33)))
        sides = [*near, (-wide - 5, -3), (5, -3), (-wide - 5, 4), (5, 4), *far]
        sides = [side for side in sides if up * y + side[1] > lowest]
        boxes = [Box(across * x + right, up * y + above, wide) for right, above in sides]
        place = plotting.first_clear(boxes, taken)
        taken.append(boxes[place])
        behind = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        axes.annotate(words, (x, y), sides[place], textcoords="offset points", fontsize=6, color=colour, bbox=behind)


def legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Writes above the panels what their marks mean, each once."""
    known = {str(line.get_label()): line for axes in panels for line in axes.get_lines()}
    shown = {label: line for label, line in known.items() if not label.startswith("_")}
    figure.legend(list(shown.values()), list(shown), loc="outside upper left", ncols=5, fontsize=plotting.SMALL, frameon=False)


def tidy(axes: Axes) -> None:
    """Gives axes the look of the others, with a title of a middle size."""
    plotting.tidy(axes)
    axes.title.set_fontsize(plotting.MIDDLE)
