"""The command `gpfl privacy`: the paper's privacy table, label and membership inference, and the cost of defences."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import cast

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
from gpfl.experiments import grid
from gpfl.experiments.defence_points import attack_points, load_run
from gpfl.experiments.defence_study import PrivacyBounds
from gpfl.experiments.definitions import Cell
from gpfl.experiments.grid import FederationCache, GridPlan, Job
from gpfl.experiments.leaks import InferenceFindings, infer_from_runs
from gpfl.experiments.privacy_table import COLUMNS, attack_methods, table_records
from gpfl.experiments.results import trial_commits
from gpfl.io import files
from gpfl.io.provenance import command_line, current_commit
from gpfl.methods import METHODS
from gpfl.privacy.attack_runner import records_to_json
from gpfl.privacy.case_summary import CaseSummary
from gpfl.privacy.reconstruction import ATTACKS, AttackConfig
from gpfl.privacy.uploads import ROUNDS, STEPS, check_images, choose_batches
from gpfl.report.paper_tables import Origin
from gpfl.report.privacy_figures import draw_epsilon, draw_leakage, draw_table_grids
from gpfl.report.privacy_tables import (
    defence_page,
    describe_label_inference,
    describe_membership_inference,
    inference_page,
    privacy_page,
)
from gpfl.report.tables import format_csv
from gpfl.training.devices import find_device

_FROM_FILE = " [default: that of configs/attacks/privacy.toml]"


@click.group(cls=Group)
def privacy() -> None:
    """Reproduce the paper's privacy table and measure defences."""


_images_option = option("--images", default=20, metavar="N", help="Images to reconstruct in each case.")
_seed_option = option("--seed", default=0, metavar="N", help="Seed of the runs.")
_round_options = compose(
    option("--rounds", default=experiments.ROUNDS, metavar="N", help="Maximum number of rounds."),
    option(
        "--patience",
        default=experiments.PATIENCE,
        metavar="N",
        help="End a run after this many rounds without a better accuracy; 0 = never.",
    ),
)
_effort_options = compose(
    click.option("--iterations", type=int, metavar="N", help=f"Iterations of an attack.{_FROM_FILE}"),
    click.option("--restarts", type=int, metavar="N", help=f"Random starts of an attack.{_FROM_FILE}"),
    click.option("--attack-seed", type=int, metavar="N", help=f"Seed of the attacked images and random starts.{_FROM_FILE}"),
    graph_option,
)
_run_options = compose(
    set_option("Set any option of the runs, such as data.name=digits or gpfl.lam=0.1."),
    option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N or mps."),
    option("--engine", default="auto", metavar="NAME", help="auto, loop, vmap or workers."),
    out_option("Folder for results; runs and attacks that it holds are not repeated.", "results"),
    click.option("--dry-run", is_flag=True, help="List the runs with their state, time and memory; run nothing."),
)


@privacy.command
@option("--kind", default="geiping,dlg", type=CommaList(str, ATTACKS), help="geiping (stronger), dlg (the paper's), or both.")
@_images_option
@option("--batch", default="1,4", type=CommaList(int, min=1), help="Images in one upload.")
@option("--steps", default="one,epoch", type=CommaList(str, STEPS), help="One step on the images alone, the epoch, or both.")
@option("--round", "round_", default="0,best", type=CommaList(str, ROUNDS), help="Before training, the best round, or both.")
@psnr_option
@_effort_options
@_seed_option
@_round_options
@_run_options
def attacks(
    kind: list[str],
    images: int,
    batch: list[int],
    steps: list[str],
    round_: list[str],
    formula: str,
    iterations: int | None,
    restarts: int | None,
    attack_seed: int | None,
    graph: bool,
    seed: int,
    rounds: int,
    patience: int,
    assignments: tuple[str, ...],
    device: str,
    engine: str,
    out: Path,
    dry_run: bool,
) -> None:
    """Reproduce the paper's privacy table: train five methods on Cifar100 and attack their uploads."""
    config = _attack_config("attack", iterations, restarts, attack_seed, graph)
    cells = study.undefended_cells()
    plan = _make_plan(cells, [seed], rounds, patience, out, assignments, device, engine, keep_weights=True)
    cache = _get_federations(cells, plan, dry_run)
    _check_attackable(cells[0], plan, cache, images, sorted({1, *batch}), config)
    jobs = study.make_study_jobs(cells, plan, cache)
    if dry_run:
        cases = len(COLUMNS) * len(kind) * len(round_) * len(batch) * len(steps) + len(kind)
        _print_plan(jobs, plan, f"{cases} attacks of {config.iterations} iterations on {images} images follow")
        return
    print_graph_note(graph, find_device(device))
    if _train(jobs, plan):
        _exit_incomplete()
    folder = plan.out / "privacy"
    table = attack_methods(
        {cell.variant.label: load_run(job, seed) for cell, job in jobs.items()},
        folder,
        config,
        attacks=kind,
        images=images,
        batch_sizes=batch,
        steps=steps,
        rounds=round_,
        on_result=partial(print_case, formula=formula),
    )
    grids = draw_table_grids(table, folder)
    page = privacy_page(table, formula, _describe_origin(jobs.values(), [seed]), grids)
    _write(
        folder,
        {"table.md": page, "results.json": records_to_json(table_records(table))},
        [path for paths in grids.values() for path in paths],
    )


@privacy.command
@option("--methods", default="all", type=CommaList(str, [*METHODS, "all"]), help="Methods, or all.")
@_seed_option
@_round_options
@_run_options
def leaks(
    methods: list[str],
    seed: int,
    rounds: int,
    patience: int,
    assignments: tuple[str, ...],
    device: str,
    engine: str,
    out: Path,
    dry_run: bool,
) -> None:
    """Infer label distributions from uploads, and training samples from personal models, method by method."""
    cells = study.undefended_cells(list(METHODS) if "all" in methods else methods)
    plan = _make_plan(cells, [seed], rounds, patience, out, assignments, device, engine, keep_weights=True)
    jobs = study.make_study_jobs(cells, plan, _get_federations(cells, plan, dry_run))
    if dry_run:
        _print_plan(jobs, plan, "label and membership inference on all clients follows")
        return
    failed = _train(jobs, plan)
    finished = [job for job in jobs.values() if job.folder not in failed]
    if finished:
        folder = plan.out / "leaks"
        runs = {job.folder / f"seed-{seed}": partial(load_run, job, seed) for job in finished}
        findings = infer_from_runs(runs, folder, _print_findings)
        values = [asdict(each) for each in findings]
        page = inference_page(findings, _describe_origin(finished, [seed]))
        _write(folder, {"table.md": page, "results.json": json.dumps(values, indent=1, allow_nan=False) + "\n"})
    if failed:
        _exit_incomplete()


@privacy.command
@option("--methods", default="gpfl,fedavg", type=CommaList(str, METHODS), help="Methods.")
@click.option("--noise", default="", metavar="X,…", help=f"Client level: noise values, or none.{_FROM_FILE}")
@click.option("--example-noise", default="", metavar="X,…", help=f"Example level: noise values, or none.{_FROM_FILE}")
@click.option("--top-k", default="", metavar="X,…", help=f"Fractions of entries to send, or none.{_FROM_FILE}")
@click.option("--bits", default="", metavar="N,…", help=f"Bits per entry, or none.{_FROM_FILE}")
@click.option("--epsilon", default="", metavar="X,…", help="ε instead of --noise and --example-noise; needs dp-accounting.")
@option("--delta", default=1e-5, metavar="X", help="δ of the stated ε.")
@click.option("--clip", type=float, metavar="X", help=f"Client level: largest norm of an update.{_FROM_FILE}")
@click.option("--example-clip", type=float, metavar="X", help=f"Example level: largest norm of a gradient.{_FROM_FILE}")
@_images_option
@option("--round", "round_", default="0", type=click.Choice(ROUNDS), help="Round to attack.")
@_effort_options
@seeds_option("0", "Seeds of the runs; the uploads of the first are attacked.")
@click.option("--rounds", type=int, metavar="N", help=f"Number of rounds.{_FROM_FILE}")
@_run_options
def defences(
    methods: list[str],
    noise: str,
    example_noise: str,
    top_k: str,
    bits: str,
    epsilon: str,
    delta: float,
    clip: float | None,
    example_clip: float | None,
    images: int,
    round_: str,
    iterations: int | None,
    restarts: int | None,
    attack_seed: int | None,
    graph: bool,
    seeds: list[int],
    rounds: int | None,
    assignments: tuple[str, ...],
    device: str,
    engine: str,
    out: Path,
    dry_run: bool,
) -> None:
    """Measure defences: accuracy against ε, and what an attack reconstructs against accuracy."""
    defaults = study.study_defaults()["defences"]
    _check_uploads_weights(methods)
    keep_weights = round_ == "best"
    config = _attack_config("defences", iterations, restarts, attack_seed, graph)
    texts = {"noise": noise, "example_noise": example_noise, "top_k": top_k, "bits": bits}
    values = {name: _parse_values(name, text, defaults) for name, text in texts.items()}
    bounds = PrivacyBounds(
        cast(float, defaults["clip"] if clip is None else clip),
        cast(float, defaults["example_clip"] if example_clip is None else example_clip),
        delta,
    )
    plain = study.plan_points(methods, {}, bounds, keep_weights)
    n_rounds = cast(int, defaults["rounds"] if rounds is None else rounds)
    cells = [point.cell for point in plain]
    plan = _make_plan(cells, seeds, n_rounds, 0, out, assignments, device, engine, keep_weights=keep_weights)
    cache = _get_federations(cells, plan, dry_run)
    _check_attackable(cells[0], plan, cache, images, [1], config)
    variants = study.gpfl_variants(plain, plan, cache)
    points = []
    for name in methods:
        if epsilon:
            values |= _find_noises(epsilon, texts, name, bounds, variants, plan, cache)
        points += study.plan_points([name], values, bounds, keep_weights, variants)
    jobs = study.make_study_jobs([point.cell for point in points], plan, cache)
    if dry_run:
        runs = pluralize(len(points), "run")
        _print_plan(jobs, plan, f"attacks of {config.iterations} iterations on the uploads of {runs} follow")
        return
    print_graph_note(graph, find_device(device))
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
    figures = draw_epsilon(found, folder / "epsilon") if any(point.epsilon is not None for point in found.points) else []
    figures += draw_leakage(found, folder / "leak")
    page = defence_page(found, _describe_origin(jobs.values(), seeds), figures)
    records = format_csv([asdict(point) for point in found.points])
    _write(folder, {"table.md": page, "points.csv": records, "points.json": found.to_json()}, figures)


# Arguments.


def _attack_config(
    section: str, iterations: int | None, restarts: int | None, attack_seed: int | None, graph: bool
) -> AttackConfig:
    """Return the effort of attacks: that of the flags, or of a section of configs/attacks/privacy.toml."""
    if attack_seed is not None and not 0 <= attack_seed <= MAX_SEED:
        raise GpflError(f"--attack-seed is {attack_seed}; it must be at least 0 and at most {MAX_SEED}")
    defaults = study.study_defaults()[section]
    flags = {"iterations": iterations, "restarts": restarts, "seed": attack_seed}
    values = {name: cast(int, defaults[name]) if value is None else value for name, value in flags.items()}
    return AttackConfig(graph=graph, **values)


def _make_plan(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    rounds: int,
    patience: int,
    out: Path,
    assignments: tuple[str, ...],
    device: str,
    engine: str,
    *,
    keep_weights: bool,
) -> GridPlan:
    require_single_process("gpfl privacy")
    settings, own = parse_method_set(assignments)
    if not 0 <= min(seeds) <= max(seeds) <= MAX_SEED:
        raise GpflError(f"--seed is {min(seeds)}; it must be at least 0 and at most {MAX_SEED}")
    check_method_set(settings, own, [cell.variant.method["name"] for cell in cells])
    if "defence" in settings:
        raise GpflError("--set defence.… does not apply: `gpfl privacy defences` has flags for its values")
    plan = GridPlan(
        out=out,
        seeds=tuple(seeds),
        rounds=rounds,
        patience=patience,
        run={"device": device, "engine": engine},
        common=settings,
        own=own,
        weights=keep_weights,
    )
    grid.check_cells(cells, plan)
    return plan


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


def _check_uploads_weights(methods: Sequence[str]) -> None:
    for name in methods:
        if "base" not in METHODS[name].shares:
            raise GpflError(f"--methods names '{name}', which uploads no update of weights that could be attacked or defended")


def _parse_values(name: str, text: str, defaults: Mapping[str, object]) -> list[float]:
    """Return the values of a family of defences: those of the flag or the defaults."""
    if not text:
        return [float(value) for value in cast(Sequence[float], defaults[name])]
    if text.strip() == "none":
        return []
    values = _parse_floats(f"--{name.replace('_', '-')}", text)
    if name == "bits" and any(value % 1 or value >= FULL_BITS for value in values):
        raise GpflError(f"--bits is '{text}'; bits must be whole numbers from 2 to {FULL_BITS - 1}")
    if name == "top_k" and max(values) >= 1:
        raise GpflError(f"--top-k is '{text}'; fractions must be below 1")
    return values


def _parse_floats(flag: str, text: str) -> list[float]:
    try:
        values = [float(number) for number in text.split(",")]
    except ValueError:
        none = "" if flag == "--epsilon" else ", or none"
        raise GpflError(f"{flag} is '{text}'; it must be numbers separated by commas{none}") from None
    if min(values) <= 0 or not all(map(math.isfinite, values)):
        raise GpflError(f"{flag} is '{text}'; its values must be above 0 and finite")
    return list(dict.fromkeys(values))


def _find_noises(
    text: str,
    texts: Mapping[str, str],
    method: str,
    bounds: PrivacyBounds,
    variants: study.Variants,
    plan: GridPlan,
    cache: FederationCache,
) -> dict[str, list[float]]:
    """Return the noise of a method for each ε by family, without families that were left out."""
    epsilons = _parse_floats("--epsilon", text)
    noises = {}
    for family in (family for family in study.FAMILIES if family.level):
        flag = texts[family.option].strip()
        if flag not in ("", "none"):
            raise GpflError(f"--epsilon and --{family.option.replace('_', '-')} exclude each other: leave one out")
        if flag != "none":
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
        print_line(f"Round {round_}. {describe_label_inference(labels, findings.method, findings.clients)}")
    print_line(describe_membership_inference(findings.members, findings.method))


def _write(folder: Path, texts: Mapping[str, str], figures: Sequence[Path] = ()) -> None:
    """Write files and print the page, table.md, without its images."""
    for name, text in texts.items():
        files.write_text(folder / name, text)
    print_line(re.sub(r"\n!\[.*\]\(.*\)\n", "", texts["table.md"]))
    print_line(f"Written to {folder}: {', '.join([*texts, *(path.name for path in figures)])}")
