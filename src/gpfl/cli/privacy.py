"""The command `gpfl privacy`: the paper's privacy table, label and membership inference, and the cost of defences."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

from gpfl.cli.attack import graph_option, print_case, print_graph_note, psnr_option
from gpfl.cli.command import Group
from gpfl.cli.data import download_datasets
from gpfl.cli.grid_plan import print_plan
from gpfl.cli.grid_progress import GridReporter
from gpfl.cli.options import CommaList, compose, option, out_option, seeds_option, set_option
from gpfl.cli.overrides import check_method_set, parse_method_set
from gpfl.cli.terminal import console, print_error, print_line
from gpfl.core.randomness import MAX_SEED
from gpfl.defences.accounting import accountant_version
from gpfl.defences.config import FULL_BITS
from gpfl.engine.distributed import require_single_process
from gpfl.errors import GpflError, pluralize
from gpfl.experiments import defence_study as study
from gpfl.experiments import definitions as experiments
from gpfl.experiments import grid, privacy_table
from gpfl.experiments.defence_points import attack_points, load_run
from gpfl.experiments.definitions import Cell
from gpfl.experiments.grid import FederationCache, GridPlan, Job
from gpfl.experiments.leaks import InferenceFindings, infer_from_runs
from gpfl.experiments.results import trial_commits
from gpfl.io import files
from gpfl.io.provenance import command_line, current_commit
from gpfl.methods import METHODS
from gpfl.privacy.attack_runner import records_to_json
from gpfl.privacy.case_summary import CaseSummary
from gpfl.privacy.reconstruction import ATTACKS, AttackConfig
from gpfl.privacy.uploads import ROUNDS, STEPS, check_images, choose_batches
from gpfl.report import privacy_figures, privacy_tables
from gpfl.report.paper_tables import Origin
from gpfl.report.tables import format_csv
from gpfl.training.devices import find_device

Function = Callable[..., None]

_DEFAULTS = study.study_defaults()
_POSITIVE, _SEED = click.IntRange(1), click.IntRange(0, MAX_SEED)


@click.group(cls=Group)
def privacy() -> None:
    """Reproduce the paper's privacy table and measure defences."""


# Options that commands share.


def _values_option(flag: str, description: str) -> Callable[[Function], Function]:
    default = ",".join(f"{value:g}" for value in _DEFAULTS["defences"][flag[2:].replace("-", "_")])  # type: ignore[attr-defined]
    return option(flag, default=default, metavar="X,…", help=description)


class _StudyFlags(NamedTuple):
    assignments: tuple[str, ...]
    device: str
    engine: str
    out: Path
    dry_run: bool

    def make_plan(
        self, cells: Sequence[Cell], seeds: Sequence[int], rounds: int, patience: int, *, keep_weights: bool
    ) -> GridPlan:
        """Return the plan of the runs."""
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
            own=own,
            weights=keep_weights,
        )
        grid.check_cells(cells, plan)
        return plan


def _study_options(function: Function) -> Function:
    """Add the options of all studies, which the function gets as `flags`."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        function(flags=_StudyFlags(*(values.pop(name) for name in _StudyFlags._fields)), **values)

    return compose(
        set_option("Set any option of the runs, such as data.name=digits or gpfl.lam=0.1."),
        option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N or mps."),
        option("--engine", default="auto", metavar="NAME", help="auto, loop, vmap or workers."),
        out_option("Folder for results; runs and attacks that it holds are not repeated.", "results"),
        click.option("--dry-run", is_flag=True, help="List the runs with their state, time and memory; run nothing."),
    )(command)


def _attack_options(section: str) -> Callable[[Function], Function]:
    """Add the options of attacks, which the function gets as `config`, with the defaults of a section."""
    defaults = _DEFAULTS[section]

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(*, iterations: int, restarts: int, attack_seed: int, graph: bool, **values: Any) -> None:
            config = AttackConfig(iterations=iterations, restarts=restarts, seed=attack_seed, graph=graph)
            function(config=config, **values)

        return compose(
            option("--images", default=20, metavar="N", help="Images to reconstruct in each case."),
            option(
                "--iterations", default=defaults["iterations"], type=_POSITIVE, metavar="N", help="Iterations of an attack."
            ),
            option("--restarts", default=defaults["restarts"], type=_POSITIVE, metavar="N", help="Random starts of an attack."),
            option(
                "--attack-seed", default=defaults["seed"], type=_SEED, metavar="N", help="Seed of images and random starts."
            ),
            graph_option,
        )(command)

    return decorate


_seed_option = option("--seed", default=0, type=_SEED, metavar="N", help="Seed of the runs.")
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
@option("--kind", default="geiping,dlg", type=CommaList(str, ATTACKS), help="geiping (stronger), dlg (the paper's), or both.")
@option("--batch", default="1,4", type=CommaList(int, min=1), help="Images in one upload.")
@option("--steps", default="one,epoch", type=CommaList(str, STEPS), help="one: a step on these images; epoch: a local epoch.")
@option("--round", "round_", default="0,best", type=CommaList(str, ROUNDS), help="0: before training; best: the best round.")
@psnr_option
@_attack_options("attack")
@_seed_option
@_round_options
@_study_options
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
    flags: _StudyFlags,
) -> None:
    """Reproduce the paper's privacy table: train five methods on Cifar100 and attack their uploads."""
    cells = study.undefended_cells()
    plan = flags.make_plan(cells, [seed], rounds, patience, keep_weights=True)
    cache = _get_federations(cells, plan, flags.dry_run)
    _check_attackable(cells[0], plan, cache, images, sorted({1, *batch}), config)
    jobs = study.make_study_jobs(cells, plan, cache)
    if flags.dry_run:
        cases = len(privacy_table.COLUMNS) * len(kind) * len(round_) * len(batch) * len(steps) + len(kind)
        _print_plan(jobs, plan, f"{cases} attacks of {config.iterations} iterations on {images} images follow")
        return
    print_graph_note(config.graph, find_device(flags.device))
    if _train(jobs, plan):
        _exit_incomplete()
    folder = plan.out / "privacy"
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
@_study_options
def leaks(methods: list[str], seed: int, rounds: int, patience: int, flags: _StudyFlags) -> None:
    """Infer label distributions from uploads, and training samples from personal models, method by method."""
    cells = study.undefended_cells(list(METHODS) if "all" in methods else methods)
    plan = flags.make_plan(cells, [seed], rounds, patience, keep_weights=True)
    jobs = study.make_study_jobs(cells, plan, _get_federations(cells, plan, flags.dry_run))
    if flags.dry_run:
        _print_plan(jobs, plan, "label and membership inference on all clients follows")
        return
    failed = _train(jobs, plan)
    finished = [job for job in jobs.values() if job.folder not in failed]
    if finished:
        folder = plan.out / "leaks"
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
@_attack_options("defences")
@seeds_option("0", "Seeds of the runs; the uploads of the first are attacked.")
@option("--rounds", default=_DEFAULTS["defences"]["rounds"], type=_POSITIVE, metavar="N", help="Number of rounds.")
@_study_options
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
    flags: _StudyFlags,
    **values: str,
) -> None:
    """Measure defences: accuracy against ε, and what an attack reconstructs against accuracy."""
    families = {name: _parse_values(name, text) for name, text in values.items()}
    bounds, keep_weights = study.PrivacyBounds(clip, example_clip, delta), round_ == "best"
    for name in methods:
        if "base" not in METHODS[name].shares:
            raise GpflError(f"--methods names '{name}', which uploads no update of weights that could be attacked or defended")
    plain = study.plan_points(methods, {}, bounds, keep_weights)
    cells = [point.cell for point in plain]
    plan = flags.make_plan(cells, seeds, rounds, 0, keep_weights=keep_weights)
    cache = _get_federations(cells, plan, flags.dry_run)
    _check_attackable(cells[0], plan, cache, images, [1], config)
    variants = study.gpfl_variants(plain, plan, cache)
    points = []
    for name in methods:
        noises = _find_noises(epsilon, values, name, bounds, variants, plan, cache) if epsilon else {}
        points += study.plan_points([name], families | noises, bounds, keep_weights, variants)
    jobs = study.make_study_jobs([point.cell for point in points], plan, cache)
    if flags.dry_run:
        runs = pluralize(len(points), "run")
        _print_plan(jobs, plan, f"attacks of {config.iterations} iterations on the uploads of {runs} follow")
        return
    print_graph_note(config.graph, find_device(flags.device))
    if not accountant_version():
        print_line("ε is not stated: dp-accounting is not installed. Once it is, the same command adds ε and repeats no run.")
    failed = _train(jobs, plan)
    folder = plan.out / "defences"
    found = attack_points(
        points,
        {point: jobs[point.cell] for point in points},
        seeds,
        folder,
        config,
        images=images,
        attacked_round=round_,
        failed=failed,
        on_summary=_print_summary,
    )
    figures = privacy_figures.draw_study(found, folder)
    page = privacy_tables.defence_page(found, _describe_origin(jobs.values(), seeds), figures)
    points_csv = format_csv([asdict(point) for point in found.points])
    _write(folder, {"table.md": page, "points.csv": points_csv, "points.json": found.to_json()}, figures)


# Checks and values.


def _get_federations(cells: Sequence[Cell], plan: GridPlan, dry_run: bool) -> FederationCache:
    """Return the cache of federations, having downloaded the dataset unless it is a dry run."""
    data = str(plan.given(cells[0])["data"]["name"])
    if not grid.has_data(data):
        if dry_run:
            raise GpflError(f"the dataset '{data}' is not downloaded: gpfl data get {data}")
        download_datasets([data])
    return FederationCache()


def _check_attackable(
    cell: Cell, plan: GridPlan, cache: FederationCache, images: int, batch_sizes: Sequence[int], config: AttackConfig
) -> None:
    """Raise before training if the data cannot be attacked."""
    spec = study.cell_spec(cell, plan, cache)
    check_images(spec.federation)
    choose_batches(spec.federation, range(len(spec.federation)), images, batch_sizes, config.seed)
    net = spec.method.net
    if min(batch_sizes) < net.min_batch:
        raise GpflError(
            f"net '{net.name}' trains on batches of at least {net.min_batch} samples, but the ceiling is one step on one "
            "image: use another net, or attack single runs with gpfl attack --batch"
        )


def _parse_values(name: str, text: str) -> list[float]:
    """Return the values of a family of defences."""
    if text.strip() == "none":
        return []
    flag = f"--{name.replace('_', '-')}"
    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        raise GpflError(f"{flag} is '{text}'; it must be numbers separated by commas, or none") from None
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise GpflError(f"{flag} is '{text}'; its values must be above 0 and finite")
    if name == "bits" and any(value % 1 or value >= FULL_BITS for value in values):
        raise GpflError(f"--bits is '{text}'; bits must be whole numbers from 2 to {FULL_BITS - 1}")
    if name == "top_k" and max(values) >= 1:
        raise GpflError(f"--top-k is '{text}'; fractions must be below 1")
    return list(dict.fromkeys(values))


def _find_noises(
    epsilons: Sequence[float],
    texts: Mapping[str, str],
    method: str,
    bounds: study.PrivacyBounds,
    variants: study.Variants,
    plan: GridPlan,
    cache: FederationCache,
) -> dict[str, list[float]]:
    """Return the noise of a method for each ε by family, without families that were left out."""
    if min(epsilons) <= 0:
        raise GpflError(f"--epsilon is {min(epsilons):g}; it must be above 0")
    noises = {}
    for family in (family for family in study.FAMILIES if family.level):
        if texts[family.option].strip() == "none":
            continue
        if click.get_current_context().get_parameter_source(family.option) != click.core.ParameterSource.DEFAULT:
            raise GpflError(f"--epsilon and --{family.option.replace('_', '-')} exclude each other: leave one out")
        *_, point = study.plan_points([method], {family.option: [1.0]}, bounds, keep_weights=False, variants=variants)
        noises[family.option] = study.find_noises(family, epsilons, point.cell, plan, cache)
    return noises


# Runs and output.


def _train(jobs: Mapping[Cell, Job], plan: GridPlan) -> dict[Path, str]:
    """Run what is missing and return the problems by folder."""
    unique = {job.folder: job for job in jobs.values()}
    missing = grid.unfinished_jobs(unique.values(), plan)
    if len(missing) < len(unique):
        print_line(f"Already finished: {len(unique) - len(missing)} of {pluralize(len(unique), 'run')}.")
    with GridReporter(console, missing, plan.seeds) as reporter:
        provenance = {"command": command_line(), "commit": current_commit()}
        problems = grid.run_all(missing, plan, reporter.callback, provenance, reporter.end)
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
    for name, text in texts.items():
        files.write_text(folder / name, text)
    print_line(re.sub(r"\n!\[.*\]\(.*\)\n", "", texts["table.md"]))
    print_line(f"Written to {folder}: {', '.join([*texts, *(path.name for path in figures)])}")
