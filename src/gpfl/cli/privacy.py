"""The command `gpfl privacy`: the paper's privacy table, label and membership inference, and the cost of defences."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

import click

from gpfl.cli.attack import POSITIVE, SEED, case_options, effort_options, print_case, print_graph_note
from gpfl.cli.command import Group
from gpfl.cli.data import download_datasets
from gpfl.cli.grid_plan import print_plan
from gpfl.cli.grid_progress import GridReporter
from gpfl.cli.options import CommaList, Decorator, Function, compose, option, out_option, seeds_option, set_option
from gpfl.cli.overrides import check_method_set, parse_method_set
from gpfl.cli.terminal import console, print_error, print_line
from gpfl.defences.accounting import accountant_version
from gpfl.defences.config import FULL_BITS
from gpfl.engine import RunSpec
from gpfl.engine.distributed import require_single_process
from gpfl.errors import GpflError, pluralize
from gpfl.experiments import definitions as experiments
from gpfl.experiments import grid, grid_runner, privacy_table
from gpfl.experiments.attack_study import AttackStudy, load_run, study_defaults, undefended_cells
from gpfl.experiments.defence_points import attack_points
from gpfl.experiments.defence_study import FAMILIES, PrivacyBounds, Variants, find_noises, gpfl_variants, plan_points
from gpfl.experiments.definitions import Cell
from gpfl.experiments.grid import GridPlan, Job
from gpfl.experiments.leaks import InferenceFindings, infer_from_runs
from gpfl.experiments.results import trial_commits
from gpfl.io.provenance import command_line, current_commit
from gpfl.methods import METHODS
from gpfl.privacy.attack_runner import records_to_json
from gpfl.privacy.case_summary import CaseSummary
from gpfl.privacy.reconstruction import AttackConfig
from gpfl.privacy.uploads import ROUNDS, check_images, choose_batches
from gpfl.report import privacy_figures, privacy_tables
from gpfl.report.pages import write_texts
from gpfl.report.paper_tables import Origin
from gpfl.report.tables import format_csv
from gpfl.training.devices import find_device

_DEFAULTS = study_defaults()


@click.group(cls=Group)
def privacy() -> None:
    """Reproduce the paper's privacy table and measure defences."""


# Options that commands share.


class _RunOptions(NamedTuple):
    assignments: tuple[str, ...]
    device: str
    engine: str
    out: Path
    dry_run: bool

    def start_study(
        self, cells: Sequence[Cell], seeds: Sequence[int], rounds: int, patience: int, *, keep_weights: bool
    ) -> AttackStudy:
        """Return a study with the plan of its runs, after downloading the dataset unless it is a dry run."""
        require_single_process("gpfl privacy")
        settings, own = parse_method_set(self.assignments)
        check_method_set(settings, own, [cell.variant.method["name"] for cell in cells])
        if "defence" in settings:
            raise GpflError("--set defence.… does not apply: `gpfl privacy defences` has flags for its values")
        plan = GridPlan(
            out=self.out,
            seeds=tuple(seeds),
            rounds=rounds,
            patience=patience,
            run={"device": self.device, "engine": self.engine},
            common=settings,
            overrides=own,
            weights=keep_weights,
        )
        grid.check_cells(cells, plan)
        data = str(plan.config(cells[0])["data"]["name"])
        if not grid.has_data(data):
            if self.dry_run:
                raise GpflError(f"the dataset '{data}' is not downloaded: gpfl data get {data}")
            download_datasets([data])
        return AttackStudy(plan)


def _run_options(function: Function) -> Function:
    """Add the options of the runs of all studies, which the function gets as `options`."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        function(options=_RunOptions(*(values.pop(name) for name in _RunOptions._fields)), **values)

    return compose(
        set_option("Set any option of the runs, such as data.name=digits or gpfl.lam=0.1."),
        option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N or mps."),
        option("--engine", default="auto", metavar="NAME", help="auto, loop, vmap or workers."),
        out_option("Folder for results; runs and attacks that it holds are not repeated.", "results"),
        click.option("--dry-run", is_flag=True, help="List the runs with their state, time and memory; run nothing."),
    )(command)


class _DefenceValues(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on
    """The values of a family of defences: numbers separated by commas, or none."""

    name = "X,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        """Return the values, each once. Raise if the defence cannot have one of them."""
        if value.strip() == "none":
            return []
        flag = param.opts[0] if param else ""
        try:
            values = [float(number) for number in value.split(",")]
        except ValueError:
            raise GpflError(f"{flag} is '{value}'; it must be numbers separated by commas, or none") from None
        if not all(math.isfinite(number) and number > 0 for number in values):
            raise GpflError(f"{flag} is '{value}'; its values must be above 0 and finite")
        if flag == "--bits" and any(number % 1 or number >= FULL_BITS for number in values):
            raise GpflError(f"--bits is '{value}'; bits must be whole numbers from 2 to {FULL_BITS - 1}")
        if flag == "--top-k" and max(values) >= 1:
            raise GpflError(f"--top-k is '{value}'; fractions must be below 1")
        return list(dict.fromkeys(values))


def _values_option(flag: str, description: str) -> Decorator:
    values = cast(Sequence[float], _DEFAULTS["defences"][flag[2:].replace("-", "_")])
    return option(flag, default=",".join(f"{value:g}" for value in values), type=_DefenceValues(), help=description)


_seed_option = option("--seed", default=0, type=SEED, metavar="N", help="Seed of the runs.")
_round_options = compose(
    option("--rounds", default=experiments.ROUNDS, metavar="N", help="Maximum number of rounds."),
    option(
        "--patience",
        default=experiments.PATIENCE,
        metavar="N",
        help="End a run after this many rounds without a better accuracy; 0 = never.",
    ),
)


# Commands.


@privacy.command
@case_options("geiping,dlg", batch="1,4", steps="one,epoch", round="0,best")
@effort_options(_DEFAULTS["attack"], "--attack-seed")
@_seed_option
@_round_options
@_run_options
def attacks(
    kind: list[str],
    batch: list[int],
    steps: list[str],
    round_: list[str],
    formula: str,
    images: int,
    config: AttackConfig,
    seed: int,
    rounds: int,
    patience: int,
    options: _RunOptions,
) -> None:
    """Reproduce the paper's privacy table: train five methods on Cifar100 and attack their uploads."""
    cells = undefended_cells(privacy_table.METHODS)
    study = options.start_study(cells, [seed], rounds, patience, keep_weights=True)
    _check_attackable(study.prepare(cells[0]), images, sorted({1, *batch}), config)
    jobs = study.make_jobs(cells)
    if options.dry_run:
        cases = len(privacy_table.COLUMNS) * len(kind) * len(round_) * len(batch) * len(steps) + len(kind)
        _print_plan(jobs, study.plan, f"{cases} attacks of {config.iterations} iterations on {images} images follow")
        return
    print_graph_note(config.graph, find_device(options.device))
    if _train(jobs, study.plan):
        _exit_incomplete()
    folder = options.out / "privacy"
    table = privacy_table.attack_methods(
        {cell.variant.label: load_run(job, seed) for cell, job in jobs.items()},
        folder,
        config,
        attacks=kind,
        images=images,
        batch_sizes=batch,
        steps=steps,
        rounds=round_,
        on_result=functools.partial(print_case, formula=formula),
    )
    grids = privacy_figures.draw_table_grids(table, folder)
    page = privacy_tables.privacy_page(table, formula, _describe_origin(jobs.values(), [seed]), grids)
    records = records_to_json(privacy_table.table_records(table))
    _write(folder, {"table.md": page, "results.json": records}, [path for paths in grids.values() for path in paths])


@privacy.command
@option("--methods", default="all", type=CommaList(str, [*METHODS, "all"]), help="Methods, or all.")
@_seed_option
@_round_options
@_run_options
def leaks(methods: list[str], seed: int, rounds: int, patience: int, options: _RunOptions) -> None:
    """Infer label distributions from uploads, and training samples from personal models, method by method."""
    cells = undefended_cells(list(METHODS) if "all" in methods else methods)
    study = options.start_study(cells, [seed], rounds, patience, keep_weights=True)
    jobs = study.make_jobs(cells)
    if options.dry_run:
        _print_plan(jobs, study.plan, "label and membership inference on all clients follows")
        return
    failed = _train(jobs, study.plan)
    finished = [job for job in jobs.values() if job.folder not in failed]
    if finished:
        folder = options.out / "leaks"
        runs = {job.folder / f"seed-{seed}": functools.partial(load_run, job, seed) for job in finished}
        findings = infer_from_runs(runs, folder, _print_findings)
        results = json.dumps([asdict(each) for each in findings], indent=1, allow_nan=False) + "\n"
        page = privacy_tables.inference_page(findings, _describe_origin(finished, [seed]))
        _write(folder, {"table.md": page, "results.json": results})
    if failed:
        _exit_incomplete()


@privacy.command
@option("--methods", default="gpfl,fedavg", type=CommaList(str, METHODS), help="Methods.")
@_values_option("--noise", "Client level: noise values, or none.")
@_values_option("--example-noise", "Example level: noise values, or none.")
@_values_option("--top-k", "Fractions of entries to send, or none.")
@_values_option("--bits", "Bits per entry, or none.")
@click.option("--epsilon", type=CommaList(float), help="ε instead of --noise and --example-noise; needs dp-accounting.")
@option("--delta", default=1e-5, metavar="X", help="δ of the stated ε.")
@option("--clip", default=_DEFAULTS["defences"]["clip"], metavar="X", help="Client level: largest norm of an update.")
@option("--example-clip", default=_DEFAULTS["defences"]["example_clip"], metavar="X", help="Example level: of a gradient.")
@option("--round", "round_", default="0", type=click.Choice(ROUNDS), help="Round to attack.")
@effort_options(_DEFAULTS["defences"], "--attack-seed")
@seeds_option("0", "Seeds of the runs; the uploads of the first are attacked.")
@option("--rounds", default=_DEFAULTS["defences"]["rounds"], type=POSITIVE, metavar="N", help="Number of rounds.")
@_run_options
def defences(
    methods: list[str],
    epsilon: list[float] | None,
    delta: float,
    clip: float,
    example_clip: float,
    images: int,
    round_: str,
    config: AttackConfig,
    seeds: list[int],
    rounds: int,
    options: _RunOptions,
    **values: list[float],
) -> None:
    """Measure defences: accuracy against ε, and what an attack reconstructs against accuracy."""
    bounds, keep_weights = PrivacyBounds(clip, example_clip, delta), round_ == "best"
    for name in methods:
        if "base" not in METHODS[name].shares:
            raise GpflError(f"--methods names '{name}', which uploads no update of weights that could be attacked or defended")
    plain = plan_points(methods, {}, bounds, keep_weights=keep_weights)
    study = options.start_study([point.cell for point in plain], seeds, rounds, 0, keep_weights=keep_weights)
    _check_attackable(study.prepare(plain[0].cell), images, [1], config)
    variants = gpfl_variants(plain, study)
    points = []
    for name in methods:
        noises = _find_noises(epsilon, values, name, bounds, variants, study) if epsilon else {}
        points += plan_points([name], values | noises, bounds, variants, keep_weights=keep_weights)
    jobs = study.make_jobs(point.cell for point in points)
    if options.dry_run:
        runs = pluralize(len(points), "run")
        _print_plan(jobs, study.plan, f"attacks of {config.iterations} iterations on the uploads of {runs} follow")
        return
    print_graph_note(config.graph, find_device(options.device))
    if not accountant_version():
        print_line("ε is not stated: dp-accounting is not installed. Once it is, the same command adds ε and repeats no run.")
    failed = _train(jobs, study.plan)
    folder = options.out / "defences"
    results = attack_points(
        points,
        jobs,
        seeds,
        folder,
        config,
        images=images,
        attacked_round=round_,
        failed=failed,
        on_summary=_print_summary,
    )
    figures = privacy_figures.draw_study(results, folder)
    page = privacy_tables.defence_page(results, _describe_origin(jobs.values(), seeds), figures)
    points_csv = format_csv([asdict(point) for point in results.points])
    _write(folder, {"table.md": page, "points.csv": points_csv, "points.json": results.to_json()}, figures)


# Checks.


def _check_attackable(spec: RunSpec, images: int, batch_sizes: Sequence[int], config: AttackConfig) -> None:
    """Raise before training if the data cannot be attacked."""
    check_images(spec.federation)
    choose_batches(spec.federation, range(len(spec.federation)), images, batch_sizes, config.seed)
    net = spec.method.net
    if min(batch_sizes) < net.min_batch:
        raise GpflError(
            f"net '{net.name}' trains on batches of at least {net.min_batch} samples, but the ceiling is one step on one "
            "image: use another net, or attack single runs with gpfl attack --batch"
        )


def _find_noises(
    epsilons: Sequence[float],
    values: Mapping[str, Sequence[float]],
    method: str,
    bounds: PrivacyBounds,
    variants: Variants,
    study: AttackStudy,
) -> dict[str, list[float]]:
    """Return the noise of a method for each ε by family, without families that were left out."""
    if min(epsilons) <= 0:
        raise GpflError(f"--epsilon is {min(epsilons):g}; it must be above 0")
    noises = {}
    for family in (family for family in FAMILIES if family.level and values[family.option]):
        if click.get_current_context().get_parameter_source(family.option) != click.core.ParameterSource.DEFAULT:
            raise GpflError(f"--epsilon and --{family.option.replace('_', '-')} exclude each other: leave one out")
        *_, point = plan_points([method], {family.option: [1.0]}, bounds, variants, keep_weights=False)
        noises[family.option] = find_noises(family, epsilons, point.cell, study)
    return noises


# Runs and output.


def _train(jobs: Mapping[Cell, Job], plan: GridPlan) -> dict[Path, str]:
    """Run what is missing and return the problems by folder."""
    unique = {job.folder: job for job in jobs.values()}
    missing = grid_runner.unfinished_jobs(unique.values(), plan)
    if len(missing) < len(unique):
        print_line(f"Already finished: {len(unique) - len(missing)} of {pluralize(len(unique), 'run')}.")
    with GridReporter(console, missing, plan.seeds) as reporter:
        provenance = {"command": command_line(), "commit": current_commit()}
        problems = grid_runner.run_all(missing, plan, reporter.callback, provenance, reporter.end)
    for text in dict.fromkeys(problems.values()):
        print_error(f"{', '.join(unique[path].label for path in problems if problems[path] == text)}: {text}")
    return problems


def _exit_incomplete() -> None:
    print_error("finished runs are kept; the same command repeats the others")
    raise click.exceptions.Exit(1)


def _print_plan(jobs: Mapping[Cell, Job], plan: GridPlan, next_step: str) -> None:
    unique = list({job.folder: job for job in jobs.values()}.values())
    can_run = print_plan(unique, plan, {})
    print_line(f"{next_step[0].upper()}{next_step[1:]}, except those that {plan.out} holds.")
    if not can_run:
        raise click.exceptions.Exit(1)


def _describe_origin(jobs: Iterable[Job], seeds: Sequence[int]) -> str:
    runs = [trials for job in jobs if (trials := job.trials("", seeds))]
    commits, current = {each for trials in runs for each in trial_commits(trials)}, current_commit()
    later = "" if current in commits else f" The commit is that of the runs; attacks and page are of {current}."
    return f"{Origin(command_line(), current).describe(runs, commits, seeds)}{later}"


def _print_summary(description: str, summary: CaseSummary) -> None:
    print_line(f"{description}: {summary.psnr:.2f} dB (floor {summary.floor:.2f}): {summary.verdict}")


def _print_findings(findings: InferenceFindings) -> None:
    for round_, labels in findings.labels.items():
        print_line(f"Round {round_}. {privacy_tables.describe_label_inference(labels, findings.method, findings.clients)}")
    print_line(privacy_tables.describe_membership_inference(findings.members, findings.method))


def _write(folder: Path, texts: Mapping[str, str], figures: Sequence[Path] = ()) -> None:
    """Write files and print the page, table.md, without its images."""
    paths = write_texts(folder, texts)
    print_line(re.sub(r"\n!\[.*\]\(.*\)\n", "", texts["table.md"]))
    print_line(f"Written to {folder}: {', '.join(path.name for path in [*paths, *figures])}")
