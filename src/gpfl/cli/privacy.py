"""The command `gpfl privacy`: the paper's privacy table, label and membership inference, and the cost of defences."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click

from gpfl.cli import options
from gpfl.cli.attack import parse_attack, print_case, print_graph_note
from gpfl.cli.command import Group
from gpfl.cli.data import download_datasets
from gpfl.cli.grid import print_plan, run_missing
from gpfl.cli.options import CommaList, Decorator, compose, option, parse_options
from gpfl.cli.overrides import parse_method_set
from gpfl.cli.terminal import print_error, print_line
from gpfl.core import options as core_options
from gpfl.core.randomness import MAX_SEED
from gpfl.defences.accounting import accountant_version
from gpfl.defences.config import NO_DEFENCE, DefenceConfig
from gpfl.engine.distributed import require_single_process
from gpfl.errors import GpflError, pluralize
from gpfl.experiments import defence_study, grid, privacy_table
from gpfl.experiments import definitions as experiments
from gpfl.experiments.defence_study import load_run, make_study_jobs, study_defaults, undefended_cells
from gpfl.experiments.definitions import Cell
from gpfl.experiments.grid import GridPlan, Job
from gpfl.experiments.leaks import InferenceFindings, infer_from_runs
from gpfl.io.provenance import command_line, current_commit
from gpfl.methods import METHODS
from gpfl.privacy.attack_runner import AttackPlan, CaseSummary, records_to_json
from gpfl.privacy.uploads import ROUNDS
from gpfl.report import privacy_figures, privacy_tables
from gpfl.report.paper_tables import Origin
from gpfl.report.tables import format_csv, write_texts
from gpfl.training.devices import find_device

_DEFAULTS = study_defaults()


@click.group(cls=Group)
def privacy() -> None:
    """Reproduce the paper's privacy table and measure defences."""


def _plan_defaults(section: str) -> AttackPlan:
    names = core_options.options_of(AttackPlan)
    values = {name: value for name, value in _DEFAULTS[section].items() if name in names}
    return core_options.build(AttackPlan, values, section)


def _plan_runs(flags: Mapping[str, Any], cells: Sequence[Cell], *, keep_weights: bool = True) -> GridPlan:
    """Return the plan of a study's runs, after downloading the dataset unless it is a dry run."""
    require_single_process("gpfl privacy")
    settings, overrides = parse_method_set(flags["assignments"], [cell.variant.method["name"] for cell in cells])
    if "defence" in settings:
        raise GpflError("--set defence.… does not apply: `gpfl privacy defences` has flags for its values")
    plan = GridPlan(
        out=flags["out"],
        seeds=flags["seeds"] if "seeds" in flags else (flags["seed"],),
        rounds=flags["rounds"],
        patience=flags.get("patience", 0),
        run=parse_options(flags).get("run", {}),
        common=settings,
        overrides=overrides,
        weights=keep_weights,
    )
    grid.check_cells(cells, plan)
    data = str(plan.config(cells[0])["data"]["name"])
    if not grid.has_data(data):
        if flags["dry_run"]:
            raise GpflError(f"the dataset '{data}' is not downloaded: gpfl data get {data}")
        download_datasets([data])
    return plan


def _train(jobs: Mapping[Cell, Job], plan: GridPlan, next_step: str, *, dry_run: bool, graph: bool = False) -> dict[Path, str]:
    """Run what is missing and return the problems by folder; in a dry run print the plan and end the command."""
    unique = {job.folder: job for job in jobs.values()}
    if dry_run:
        can_run = print_plan(list(unique.values()), plan, {})
        print_line(f"{next_step}, except those that {plan.out} holds.")
        raise click.exceptions.Exit(0 if can_run else 1)
    print_graph_note(graph, find_device(str(plan.run.get("device", "auto"))))
    problems = run_missing(list(unique.values()), plan, "run")
    for text in dict.fromkeys(problems.values()):
        print_error(f"{', '.join(unique[path].label for path in problems if problems[path] == text)}: {text}")
    return problems


_run_options = compose(
    options.set_option("Set any option of the runs, such as data.name=digits or gpfl.lam=0.1."),
    options.out_option("Folder for results; runs and attacks that it holds are not repeated.", "results"),
    click.option("--dry-run", is_flag=True, help="List the runs with their state and memory; run nothing."),
    options.config_option("run", "device", "engine"),
)

_round_options = compose(
    option("--seed", default=0, type=click.IntRange(0, MAX_SEED), metavar="N", help="Seed of the runs."),
    option("--rounds", default=experiments.ROUNDS, metavar="N", help="Maximum number of rounds."),
    options.patience_option(experiments.PATIENCE),
)


def _strengths_option(flag: str, kind: type, description: str) -> Decorator:
    """Add the option for the values of a family of defences, or none."""
    values = cast(Sequence[float], _DEFAULTS["defences"][flag[2:].replace("-", "_")])
    return option(flag, default=",".join(f"{value:g}" for value in values), type=CommaList(kind, none=True), help=description)


@privacy.command
@_round_options
@_run_options
@options.attack_options(_plan_defaults("attack"))
def attacks(**flags: Any) -> None:
    """Reproduce the paper's privacy table: train five methods on Cifar100 and attack their uploads."""
    plan, cells = parse_attack(_plan_defaults("attack"), flags), undefended_cells(privacy_table.METHODS)
    runs = _plan_runs(flags, cells)
    _check_attackable(runs, cells[0], plan)
    jobs = make_study_jobs(cells, runs)
    cases = sum(len(privacy_table.COLUMNS) * len(plan.cases("", [""], kind)) + 1 for kind in plan.kind)
    next_step = f"{cases} attacks of {plan.iterations} iterations on {plan.images} images follow"
    if _train(jobs, runs, next_step, dry_run=flags["dry_run"], graph=plan.graph):
        _exit_incomplete()
    folder = runs.out / "privacy"
    results = {cell.variant.label: load_run(job, flags["seed"]) for cell, job in jobs.items()}
    table = privacy_table.attack_methods(results, folder, plan, functools.partial(print_case, formula=plan.psnr))
    grids = privacy_figures.draw_table_grids(table, folder)
    page = privacy_tables.privacy_page(table, plan.psnr, _describe_origin(jobs.values(), runs.seeds), grids)
    records = records_to_json(privacy_table.table_records(table))
    _write(folder, {"table.md": page, "results.json": records}, [path for paths in grids.values() for path in paths])


@privacy.command
@option("--methods", default="all", type=CommaList(str, [*METHODS, "all"]), help="Methods, or all.")
@_round_options
@_run_options
def leaks(methods: tuple[str, ...], **flags: Any) -> None:
    """Infer label distributions from uploads, and training samples from personal models, method by method."""
    cells = undefended_cells(list(METHODS) if "all" in methods else methods)
    runs = _plan_runs(flags, cells)
    jobs = make_study_jobs(cells, runs)
    next_step = "Label and membership inference on all clients follows"
    failed = _train(jobs, runs, next_step, dry_run=flags["dry_run"])
    finished = [job for job in jobs.values() if job.folder not in failed]
    if finished:
        folder = runs.out / "leaks"
        (seed,) = runs.seeds
        loaders = {job.folder / f"seed-{seed}": functools.partial(load_run, job, seed) for job in finished}
        findings = infer_from_runs(loaders, folder, _print_findings)
        results = json.dumps([asdict(each) for each in findings], indent=1, allow_nan=False) + "\n"
        page = privacy_tables.inference_page(findings, _describe_origin(finished, runs.seeds))
        _write(folder, {"table.md": page, "results.json": results})
    if failed:
        _exit_incomplete()


@privacy.command
@option("--methods", default="gpfl,fedavg", type=CommaList(str, METHODS), help="Methods.")
@_strengths_option("--noise", float, "Client level: noise multipliers, or none.")
@_strengths_option("--example-noise", float, "Example level: noise multipliers, or none.")
@_strengths_option("--top-k", float, "Fractions of entries to send, or none.")
@_strengths_option("--bits", int, "Bits per entry, or none.")
@click.option("--epsilon", type=CommaList(float), help="Target ε instead of --noise and --example-noise; needs dp-accounting.")
@option("--delta", default=1e-5, metavar="X", help="δ at which ε is stated.")
@option("--clip", default=_DEFAULTS["defences"]["clip"], metavar="X", help="Client level: largest L2 norm of an update.")
@option("--example-clip", default=_DEFAULTS["defences"]["example_clip"], metavar="X", help="Example level: of a gradient.")
@option(
    "--round", "attacked_round", default="0", type=click.Choice(ROUNDS), help="Round to attack: before training, or the best."
)
@options.seeds_option("0", "Seeds of the runs; the uploads of the first are attacked.")
@option("--rounds", default=_DEFAULTS["defences"]["rounds"], type=click.IntRange(1), metavar="N", help="Number of rounds.")
@_run_options
@options.attack_options(_plan_defaults("defences"), omit=("kind", "batch", "steps", "round", "psnr"))
def defences(methods: tuple[str, ...], epsilon: tuple[float, ...] | None, **flags: Any) -> None:
    """Measure defences: accuracy against ε, and what an attack reconstructs against accuracy."""
    plan = parse_attack(_plan_defaults("defences"), flags)
    plan = dataclasses.replace(plan, kind=(defence_study.ATTACK,), round=(flags["attacked_round"],))
    values = {family.option: flags[family.option] for family in defence_study.FAMILIES}
    _check_defences(methods, values, epsilon)
    bounds = {key: flags[key] for key in ("clip", "example_clip", "delta")}
    cells = undefended_cells(methods)
    runs = _plan_runs(flags, cells, keep_weights=flags["attacked_round"] == "best")
    _check_attackable(runs, cells[0], plan)
    variants = defence_study.gpfl_variants(cells, runs)
    points = []
    for name in methods:
        noises = {
            family.option: defence_study.find_noises(family, epsilon, name, bounds, variants, runs)
            for family in defence_study.FAMILIES
            if epsilon and family.level and values[family.option]
        }
        points += defence_study.plan_points(name, values | noises, bounds, variants)
    jobs = make_study_jobs((point.cell for point in points), runs)
    if not accountant_version():
        print_line("ε is not computed: dp-accounting is not installed. Once it is, the same command adds ε and repeats no run.")
    next_step = f"Attacks of {plan.iterations} iterations on the uploads of {pluralize(len(points), 'run')} follow"
    failed = _train(jobs, runs, next_step, dry_run=flags["dry_run"], graph=plan.graph)
    folder = runs.out / "defences"
    results = defence_study.attack_points(points, jobs, runs.seeds, folder, plan, failed=failed, on_summary=_print_summary)
    figures = privacy_figures.draw_study(results, folder)
    page = privacy_tables.defence_page(results, _describe_origin(jobs.values(), runs.seeds), figures)
    points_csv = format_csv([asdict(point) for point in results.points])
    _write(folder, {"table.md": page, "points.csv": points_csv, "points.json": results.to_json()}, figures)


def _check_attackable(runs: GridPlan, cell: Cell, plan: AttackPlan) -> None:
    """Raise before training if the data or the net of a study cannot be attacked."""
    _, spec = grid.prepare_cell(cell, runs)
    plan.choose_batches(spec.federation, spec.method.net, range(len(spec.federation)))


def _check_defences(methods: Sequence[str], values: Mapping[str, Sequence[float]], epsilons: Sequence[float] | None) -> None:
    for name in methods:
        if "base" not in METHODS[name].shares:
            raise GpflError(f"--methods names '{name}', which uploads no weights that could be attacked or defended")
    for key, spec in core_options.options_of(DefenceConfig).items():
        flag, default = f"--{key.replace('_', '-')}", getattr(NO_DEFENCE, key)
        for value in values.get(key, ()):
            if value == default or not spec.allows(value):
                raise GpflError(f"{flag} is {value:g}; it must be {spec.limits}, and {default:g} disables it")
    if epsilons and min(epsilons) <= 0:
        raise GpflError(f"--epsilon is {min(epsilons):g}; it must be above 0")
    context = click.get_current_context()
    for family in (family for family in defence_study.FAMILIES if epsilons and family.level and values[family.option]):
        if context.get_parameter_source(family.option) != click.core.ParameterSource.DEFAULT:
            raise GpflError(f"--epsilon and --{family.option.replace('_', '-')} exclude each other: leave one out")


def _exit_incomplete() -> None:
    print_error("finished runs are kept; the same command repeats the others")
    raise click.exceptions.Exit(1)


def _describe_origin(jobs: Iterable[Job], seeds: Sequence[int]) -> str:
    runs = [trials for job in jobs if (trials := job.trials("", seeds))]
    commits, current = {each for trials in runs for each in trials.commits}, current_commit()
    later = "" if current in commits else f" The commit is that of the runs; attacks and page were made at {current}."
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
