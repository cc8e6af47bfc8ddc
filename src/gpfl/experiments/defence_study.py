"""Runs that are trained to be attacked, and the defence study.

The study has methods under defences of increasing strength: their accuracy, their guarantee and what attacks reconstruct.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

from gpfl.defences import Defended
from gpfl.defences.accounting import client_guarantee, example_guarantee, find_noise
from gpfl.defences.coupling import check_coupling
from gpfl.engine import Engine
from gpfl.engine.base import Loop
from gpfl.errors import GpflError
from gpfl.experiments import definitions as experiments
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, TableColumn
from gpfl.experiments.grid import GridPlan, Job, make_jobs, prepare_cell
from gpfl.experiments.stored_runs import Trials
from gpfl.io import toml
from gpfl.methods.gpfl import GPFL
from gpfl.privacy.attack_runner import AttackPlan, AttackRunner, CaseSummary, attack_ceiling, summarize_case
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.uploads import AttackedBatch, initial_state, state_at
from gpfl.training.config import SECTIONS, ConfigDict
from gpfl.training.execute import load, open_run
from gpfl.training.prepare import accounting_inputs, probe_samples, run_guarantee
from gpfl.training.result import Result
from gpfl.training.run_dir import RunState

ATTACK = "geiping"  # the attack of the study, the stronger one


@dataclass(frozen=True)
class DefenceFamily:
    """Defences that differ in the value of one option."""

    option: str
    description: str
    level: str = ""  # of the guarantee, if there is one
    bounds: tuple[str, ...] = ()  # options that stay the same in a study

    def defence(self, value: float, bounds: Mapping[str, float]) -> Mapping[str, object]:
        """Return the options of the defence with a value."""
        return {name: bounds[name] for name in self.bounds} | {self.option: int(value) if self.option == "bits" else value}

    def key(self, value: float) -> str:
        """Return the key of the runs with a value."""
        return f"{self.option.replace('_', '-')}-{value:g}"


FAMILIES = (
    DefenceFamily("noise", "clip and noise, client level", "client", ("clip", "delta")),
    DefenceFamily("example_noise", "clip and noise, example level", "example", ("example_clip", "delta")),
    DefenceFamily("top_k", "largest entries"),
    DefenceFamily("bits", "few bits"),
)


@dataclass(frozen=True)
class PlannedPoint:
    """A point of the study before it is run."""

    method: str
    family: DefenceFamily | None
    value: float
    cell: Cell

    @property
    def flags(self) -> str:
        """The options in which the method differs from its default, as flags."""
        options = {key: value for key, value in self.cell.variant.method.items() if key != "name"}
        texts = {key: f"{value:g}" if isinstance(value, float) else value for key, value in options.items()}
        return " ".join(f"--{key.replace('_', '-')} {value}" for key, value in texts.items())


Variants = Mapping[tuple[str, str], MethodVariant]
"""The variants in which methods are defended, by method and option of the family."""


def plan_points(
    method: str, values: Mapping[str, Sequence[float]], bounds: Mapping[str, float], variants: Variants
) -> list[PlannedPoint]:
    """Return a method without a defence, in each of its variants, and under every value of the families."""
    plain = MethodVariant(method, {"name": method})
    used = {family: variants.get((method, family.option), plain) for family in FAMILIES if values.get(family.option)}
    different = [plain]
    for variant in used.values():
        if variant not in different:
            different.append(variant)
    points = [PlannedPoint(method, None, 0.0, make_cell(each)) for each in different]
    for family, variant in used.items():
        for value in values[family.option]:
            heading, defence = f"{family.description}, {value:g}", family.defence(value, bounds)
            points.append(PlannedPoint(method, family, value, make_cell(variant, family.key(value), heading, defence)))
    return points


def gpfl_variants(cells: Sequence[Cell], plan: GridPlan) -> Variants:
    """Return the variants of GPFL that suit the defences.

    Example-level defences need a loss that is a mean over examples, so the magnitude term becomes one, with weight λ·√B.
    Clipped and sparse updates have no weight decay, which changes valve and embeddings far more than the data do.
    """
    variants = {}
    for name, cell in ((cell.variant.label, cell) for cell in cells):
        _, spec = prepare_cell(cell, plan)
        method = spec.method
        if isinstance(method, GPFL) and method.mlg_norm == "batch":
            lam = round(method.lam * math.sqrt(spec.schedule.batch_size), 6)
            sample_mean = {"name": name, "mlg_norm": "sample_mean", "lam": lam}
            variants[name, "example_noise"] = MethodVariant(name, sample_mean)
        if isinstance(method, GPFL) and method.reg == "wd" and method.mu:
            without_decay = MethodVariant(name, {"name": name, "mu": 0.0})
            variants |= {(name, option): without_decay for option in ("noise", "top_k")}
    return variants


def find_noises(
    family: DefenceFamily,
    epsilons: Sequence[float],
    method: str,
    bounds: Mapping[str, float],
    variants: Variants,
    plan: GridPlan,
) -> list[float]:
    """Return the noise multiplier that gives each ε for a method with the schedule of its runs."""
    *_, point = plan_points(method, {family.option: [1.0]}, bounds, variants)
    _, spec = prepare_cell(point.cell, plan)
    defended = cast(Defended, spec.method)
    inputs = accounting_inputs(defended, spec.federation, spec.schedule)
    if family.level == "example":
        inputs = replace(inputs, coupling=check_coupling(defended, spec.federation.table, probe_samples(spec.federation)))
    guarantee = client_guarantee if family.level == "client" else example_guarantee

    def epsilon_of(noise: float) -> float:
        defence = replace(defended.defence, **{family.option: noise})  # type: ignore[arg-type]
        return cast(float, guarantee(defence, inputs)["epsilon"])

    return [find_noise(epsilon, epsilon_of) for epsilon in epsilons]


@dataclass(frozen=True)
class DefencePoint:
    """A method under a defence."""

    method: str
    family: str  # option of the family, "" without a defence
    variant: str  # options in which the method differs from its default, as flags
    value: float
    accuracy: float  # mean of the trials' best, as a fraction
    std: float
    trials: int
    bytes_up: float
    epsilon: float | None  # as run; None without a guarantee or without the accountant
    epsilon_if_poisson: float | None
    delta: float | None
    label_counts_known: bool  # the example-level guarantee is for replacing an example by one of the same class
    target: str  # the one that leaks most
    psnr: float
    ssim: float
    floor: float
    verdict: str
    psnr_as_found: float  # without inverting images that came back as negatives


@dataclass(frozen=True)
class DefenceStudy:
    """All points, and the ceiling that the attack reaches without a defence."""

    points: tuple[DefencePoint, ...]
    ceiling: float
    ceiling_floor: float
    ceiling_leaks: bool
    images: int
    rounds: int
    attacked_round: str
    failed: tuple[str, ...] = ()  # "method, defence: problem" of runs without a point, such as those that noise made diverge

    def curve(self, method: str, family: str) -> list[DefencePoint]:
        """Return a method's points of one family, sorted by value."""
        points = [point for point in self.points if (point.method, point.family) == (method, family)]
        return sorted(points, key=lambda point: point.value)

    @property
    def methods(self) -> list[str]:
        """The methods, in order."""
        return list(dict.fromkeys(point.method for point in self.points))

    def to_json(self) -> str:
        """Return the study as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "DefenceStudy":
        """Return the study of a JSON file."""
        values = json.loads(path.read_text(encoding="utf-8"))
        points = tuple(DefencePoint(**point) for point in values.pop("points"))
        return cls(points=points, failed=tuple(values.pop("failed")), **values)


def attack_points(
    planned: Sequence[PlannedPoint],
    jobs: Mapping[Cell, Job],
    seeds: Sequence[int],
    folder: Path,
    plan: AttackPlan,
    *,
    failed: Mapping[Path, str],
    on_summary: Callable[[str, CaseSummary], None],
) -> DefenceStudy:
    """Attack the finished runs of the first seed, with the same images and random starts for all; the worst target counts.

    `plan` has one attack from one step on single images, at one round. `failed` has the problems of the runs that did not
    finish, by folder. Cases that `folder` holds are reused.
    """
    problems = {point: problem for point in planned if (problem := failed.get(jobs[point.cell].folder))}
    finished = [point for point in planned if point not in problems]
    if not finished:
        raise GpflError(f"no run has finished: {next(iter(problems.values()))}")
    (round_,) = plan.round
    points: list[DefencePoint] = []
    batches: dict[int, list[AttackedBatch]] = {}
    for point in finished:
        job = jobs[point.cell]
        engine, state = _open_run(job, seeds[0], round_)
        if not batches:
            batches = plan.choose_batches(engine.federation, engine.method.net, range(len(engine.federation)))
            ceiling = summarize_case(*attack_ceiling(engine, batches, ATTACK, plan, folder))
            on_summary("ceiling", ceiling)
        runner = AttackRunner(engine, {round_: state}, batches, plan)
        cases = plan.cases(engine.method.name, gradient_targets(engine.method), ATTACK)
        results = runner.run(cases, folder / "points" / job.folder.name)
        worst = max((summarize_case(*each) for each in results.items()), key=lambda summary: summary.psnr)
        on_summary(f"{point.cell.column.heading}, {worst.case.description}", worst)
        points.append(_make_point(point, job, seeds, engine, worst))
    return DefenceStudy(
        tuple(points),
        ceiling=ceiling.psnr,
        ceiling_floor=ceiling.floor,
        ceiling_leaks=ceiling.leaks,
        images=plan.images,
        rounds=engine.schedule.rounds,
        attacked_round=round_,
        # The fixes after the first colon are for single runs.
        failed=tuple(
            f"{point.method}, {point.cell.column.heading}: {problem.split(': lower train.lr')[0]}"
            for point, problem in problems.items()
        ),
    )


def _open_run(job: Job, seed: int, round: str) -> tuple[Engine, RunState]:
    """Return a run and its state at a round. Round 0 follows from the seed, so the weights may be missing."""
    if round == "0":
        engine = Loop(open_run(job.folder / f"seed-{seed}").spec)
        return engine, initial_state(engine)
    result = load_run(job, seed)
    return result.engine, state_at(result, round)


def _make_point(planned: PlannedPoint, job: Job, seeds: Sequence[int], engine: Engine, summary: CaseSummary) -> DefencePoint:
    trials = cast(Trials, job.trials(planned.method, seeds))  # not None: the run has finished
    level = planned.family.level if planned.family else ""
    guarantees = run_guarantee(engine.method, engine.federation, engine.schedule) if level else {}
    guarantee = cast(Mapping[str, float | None], guarantees.get(level, {}))
    return DefencePoint(
        method=planned.method,
        family=planned.family.option if planned.family else "",
        variant=planned.flags,
        value=planned.value,
        accuracy=trials.mean("best_accuracy"),
        std=trials.std("best_accuracy"),
        trials=len(trials.summaries),
        bytes_up=trials.mean("bytes_up"),
        epsilon=guarantee.get("epsilon"),
        epsilon_if_poisson=guarantee.get("epsilon_if_poisson"),
        delta=guarantee.get("delta"),
        label_counts_known=bool(guarantee.get("label_counts_known")),
        target=summary.case.target,
        **{name: getattr(summary, name) for name in ("psnr", "ssim", "floor", "verdict", "psnr_as_found")},
    )


def study_defaults() -> ConfigDict:
    """Return the sections of configs/attacks/privacy.toml."""
    content = toml.read(experiments.config_dir() / "attacks" / "privacy.toml")
    return {name: dict(values) for name, values in content.items() if isinstance(values, dict)}


def make_cell(
    variant: MethodVariant, key: str = "none", heading: str = "no defence", defence: Mapping[str, object] | None = None
) -> Cell:
    """Return the cell of a method, without a defence unless one is given."""
    config = {section: values for section, values in study_defaults().items() if section in SECTIONS}
    config |= {"defence": dict(defence)} if defence else {}
    column = TableColumn(f"privacy/{key}", heading, "privacy", config)
    return Cell(Experiment("privacy", "Privacy", "", "accuracy", (variant,), (column,), {}), column, variant)


def undefended_cells(methods: Sequence[str]) -> list[Cell]:
    """Return the cells of methods without a defence."""
    return [make_cell(MethodVariant(name, {"name": name})) for name in methods]


def make_study_jobs(cells: Iterable[Cell], plan: GridPlan) -> dict[Cell, Job]:
    """Return the job of each cell. Raise for a cell that cannot run, with the flags of the study in the message."""
    jobs, problems = make_jobs(cells, plan)
    for key, problem in problems.items():
        text = re.sub("leave out --example-clip( and --example-noise)?", "use --example-noise none", problem)
        raise GpflError(f"{' '.join(key)}: {text}")
    return {cell: job for job in jobs for cell in job.cells}


def load_run(job: Job, seed: int) -> Result:
    """Return a finished run of a job with its models."""
    path = job.folder / f"seed-{seed}"
    if not (path / "checkpoint.safetensors").is_file():
        raise GpflError(f"the weights of the run in {path} are missing: remove the folder {job.folder} to repeat the run")
    return load(path)
