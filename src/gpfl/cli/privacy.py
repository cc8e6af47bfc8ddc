"""The command `gpfl privacy`: the paper's table of attacks, and what defences cost, from the runs behind them to figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import click

from gpfl.cli.attack import tell_case, tell_graph
from gpfl.cli.command import Group
from gpfl.cli.data import download_datasets
from gpfl.cli.grid_plan import print_plan
from gpfl.cli.grid_progress import GridReporter
from gpfl.cli.options import CommaList, compose, option, out_option, seeds_option, set_option
from gpfl.cli.overrides import check_method_set, parse_method_set, results_folder
from gpfl.cli.terminal import console, print_error, print_line
from gpfl.core.randomness import MAX_SEED
from gpfl.defences.accounting import accountant_version
from gpfl.defences.config import FULL_BITS
from gpfl.engine.distributed import require_single_process
from gpfl.errors import GpflError, did_you_mean, pluralize
from gpfl.experiments import defence_study as study
from gpfl.experiments import definitions as experiments
from gpfl.experiments import grid
from gpfl.experiments import privacy_table as nine
from gpfl.experiments.definitions import Cell
from gpfl.experiments.grid import FederationCache, GridPlan, Job
from gpfl.experiments.leaks import Findings, write_leaks
from gpfl.experiments.results import trial_commits
from gpfl.experiments.selection import parse_names
from gpfl.io.provenance import command_words, commit
from gpfl.methods import METHODS
from gpfl.privacy import label_inference as labels
from gpfl.privacy import membership
from gpfl.privacy.attack import KINDS, AttackConfig
from gpfl.privacy.victims import ROUNDS, STEPS, choose_victims, refuse_other_than_images
from gpfl.report import defence_curves as points
from gpfl.report.attack_tables import PSNRS, Line, verdict
from gpfl.report.paper_tables import Origin
from gpfl.training.devices import find_device

IN_FILE = "[default: as in the file of the study]"


@click.group(cls=Group)
def privacy() -> None:
    """Reproduce the paper's privacy table and measure defences."""


images_option = option("--images", default=20, metavar="N", help="Images to reconstruct in each case.")
rounds_option = option("--rounds", default=experiments.ROUNDS, metavar="N", help="Maximum rounds of a run.")
patience_option = option(
    "--patience", default=experiments.PATIENCE, metavar="N", help="End a run after this many rounds without a gain; 0: never."
)
seed_option = option("--seed", default=0, metavar="N", help="Seed of the runs.")


attack_options = compose(
    click.option("--iterations", default=0, metavar="N", help=f"Iterations of an attack. {IN_FILE}"),
    click.option("--restarts", default=0, metavar="N", help=f"Random starts of an attack. {IN_FILE}"),
    click.option("--victims", type=int, metavar="N", help=f"Seed of victims and starts. {IN_FILE}"),
    click.option("--graph", is_flag=True, help="GPU: run the steps as a captured CUDA graph, which is faster."),
)


run_options = compose(
    set_option("Set any option of the runs, such as data.name=digits or gpfl.lam=0.1."),
    option("--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:N or mps."),
    option("--engine", default="auto", metavar="NAME", help="How rounds are executed: auto, loop, vmap or workers."),
    out_option("Folder; runs and attacks it already holds are not repeated.", "results"),
    click.option("--dry-run", is_flag=True, help="List the runs with their state, time and memory; run nothing."),
)


@privacy.command
@option("--kind", default="geiping,dlg", type=CommaList(str, KINDS), help="geiping (strong), dlg (the paper's), or both.")
@images_option
@option("--batch", default="1,4", type=CommaList(int, min=1), help="Images in one upload.")
@option("--steps", default="one,epoch", type=CommaList(str, STEPS), help="A step on these images only, a local epoch, or both.")
@option(
    "--round",
    "round_",
    default="0,best",
    type=CommaList(str, ROUNDS),
    help="Untrained weights, the best round, or both.",
)
@option("--psnr", default="proper", type=click.Choice(PSNRS), help="Formula: pixels 0 to 1 with peak 1, or the authors'.")
@attack_options
@seed_option
@rounds_option
@patience_option
@run_options
def columns(
    kind: list[str],
    images: int,
    batch: list[int],
    steps: list[str],
    round_: list[str],
    psnr: str,
    iterations: int,
    restarts: int,
    victims: int | None,
    graph: bool,
    seed: int,
    rounds: int,
    patience: int,
    assignments: tuple[str, ...],
    device: str,
    engine: str,
    out: str,
    dry_run: bool,
) -> None:
    """Make the paper's nine columns on Cifar100: train the five methods, attack their uploads, and write ours beside theirs."""
    effort = effort_of("attack", iterations, restarts, victims, graph)
    cells = study.open_cells()
    plan = planned(cells, [seed], rounds, patience, out, assignments, device, engine, weights=True)
    grounds = grounds_for(cells, plan, dry_run)
    refuse_victims(cells[0], plan, grounds, images, sorted({1, *batch}), effort)
    jobs = study.jobs_of(cells, plan, grounds)
    cases = len(nine.COLUMNS) * len(kind) * len(round_) * len(batch) * len(steps) + len(kind)
    if dry_run:
        show(jobs, plan, f"{cases} attacks of {effort.iterations} iterations on {images} images follow")
        return
    tell_graph(graph, find_device(device))
    if train(jobs, plan):
        print_error("what is done is kept; the same command tries the others again")
        raise click.exceptions.Exit(1)
    results = {cell.variant.label: study.loaded(job, seed) for cell, job in jobs.items()}
    paths = nine.nine_columns(
        results,
        plan.out / "privacy",
        kinds=kind,
        images=images,
        batches=batch,
        steps=steps,
        rounds=round_,
        effort=effort,
        psnr=psnr,
        origin=made_by(jobs.values(), [seed]),
        tell=partial(tell_case, psnr=psnr),
    )
    tell_files(paths)


@privacy.command
@option("--methods", default="all", metavar="NAME,…", help="Methods, or all.")
@seed_option
@rounds_option
@patience_option
@run_options
def leaks(
    methods: str,
    seed: int,
    rounds: int,
    patience: int,
    assignments: tuple[str, ...],
    device: str,
    engine: str,
    out: str,
    dry_run: bool,
) -> None:
    """Table what uploads tell of labels and personal models of their training rows, method by method."""
    names = list(METHODS) if methods == "all" else known_methods(methods)
    cells = study.open_cells(names)
    plan = planned(cells, [seed], rounds, patience, out, assignments, device, engine, weights=True)
    jobs = study.jobs_of(cells, plan, grounds_for(cells, plan, dry_run))
    if dry_run:
        show(jobs, plan, "labels and members of all clients are then guessed")
        return
    failed = train(jobs, plan)
    ended = [job for job in jobs.values() if job.folder not in failed]
    runs = {job.folder / f"seed-{seed}": partial(study.loaded, job, seed) for job in ended}
    if runs:
        tell_files(write_leaks(runs, plan.out / "leaks", origin=made_by(ended, [seed]), tell=tell_leaks))
    if failed:
        print_error("what is done is kept; the same command tries the others again")
        raise click.exceptions.Exit(1)


@privacy.command
@option("--methods", default="gpfl,fedavg", metavar="NAME,…", help="Methods.")
@click.option("--noise", default="", metavar="X,…", help="Client level: noise multipliers, or none.")
@click.option("--example-noise", default="", metavar="X,…", help="Example level: noise multipliers, or none.")
@click.option("--top-k", default="", metavar="X,…", help="Fractions of entries to send, or none.")
@click.option("--bits", default="", metavar="N,…", help="Bits per entry, or none.")
@click.option("--epsilon", default="", metavar="X,…", help="ε instead of --noise and --example-noise; needs dp-accounting.")
@option("--delta", default=1e-5, metavar="X", help="δ for which ε is reported.")
@click.option("--clip", default=0.0, metavar="X", help=f"Client level: maximum norm of an update. {IN_FILE}")
@click.option("--example-clip", default=0.0, metavar="X", help=f"Example level: maximum norm of a gradient. {IN_FILE}")
@images_option
@option("--round", "round_", default="0", type=click.Choice(ROUNDS), help="Round to attack.")
@attack_options
@seeds_option("0", "Seeds of the runs; the uploads of the first are attacked.")
@click.option("--rounds", default=0, metavar="N", help=f"Rounds of a run. {IN_FILE}")
@run_options
def curves(
    methods: str,
    noise: str,
    example_noise: str,
    top_k: str,
    bits: str,
    epsilon: str,
    delta: float,
    clip: float,
    example_clip: float,
    images: int,
    round_: str,
    iterations: int,
    restarts: int,
    victims: int | None,
    graph: bool,
    seeds: list[int],
    rounds: int,
    assignments: tuple[str, ...],
    device: str,
    engine: str,
    out: str,
    dry_run: bool,
) -> None:
    """Draw what defences cost and bring: accuracy against ε, and what an attack rebuilds against accuracy."""
    own = study.file_sections()["defences"]
    names, which = methods_of(methods), round_
    effort = effort_of("defences", iterations, restarts, victims, graph)
    bounds = clip or cast(float, own["clip"]), example_clip or cast(float, own["example_clip"])
    bare = study.spots(names, {}, *bounds, delta, weights=which == "best")
    planned_rounds = rounds or cast(int, own["rounds"])
    plan = planned([s.cell for s in bare], seeds, planned_rounds, 0, out, assignments, device, engine, weights=which == "best")
    grounds = grounds_for([spot.cell for spot in bare], plan, dry_run)
    refuse_victims(bare[0].cell, plan, grounds, images, [1], effort)
    variants = study.variants_of(bare, plan, grounds)
    texts = {"noise": noise, "example_noise": example_noise, "top_k": top_k, "bits": bits}
    values = {name: option_values(name, text, own) for name, text in texts.items()}
    found_for = by_epsilon(epsilon, texts, names, plan, grounds, (*bounds, delta), variants) if epsilon else {}
    spots = [
        spot
        for name in names
        for spot in study.spots([name], values | found_for.get(name, {}), *bounds, delta, which == "best", variants)
    ]
    jobs = study.jobs_of([spot.cell for spot in spots], plan, grounds)
    if dry_run:
        show(
            jobs, plan, f"the uploads of {pluralize(len(spots), 'run')} are then attacked, {effort.iterations} iterations each"
        )
        return
    tell_graph(graph, find_device(device))
    if not accountant_version():
        print_line(
            "ε will not be stated: dp-accounting is not installed. Where it is, the same command adds it and runs nothing."
        )
    failed = train(jobs, plan)
    folder = plan.out / "defences"
    by_spot = {spot: jobs[spot.cell] for spot in spots}
    found = points.curves(
        spots, by_spot, seeds, folder, images=images, which=which, effort=effort, failed=failed, tell=tell_point
    )
    paths = points.save(found, folder, made_by(jobs.values(), seeds))
    tell_files(paths)


# What is asked.


def effort_of(section: str, iterations: int, restarts: int, victims: int | None, graph: bool) -> AttackConfig:
    """Gives how hard attacks try, and the seed of victims and starts: as was said, or as the study's file says."""
    own = study.file_sections()[section]
    if victims is not None and not 0 <= victims <= MAX_SEED:
        raise GpflError(f"--victims is {victims}; it must be at least 0, at most {MAX_SEED}")
    said = {"iterations": iterations or None, "restarts": restarts or None, "seed": victims}
    return AttackConfig(graph=graph, **{name: cast(int, own[name]) if value is None else value for name, value in said.items()})


def planned(
    cells: Sequence[Cell],
    seeds: Sequence[int],
    rounds: int,
    patience: int,
    out: str,
    assignments: tuple[str, ...],
    device: str,
    engine: str,
    *,
    weights: bool,
) -> GridPlan:
    """Gives the plan of the flags; settings that no run can have are refused."""
    require_single_process("gpfl privacy")
    settings, own = parse_method_set(assignments)
    if not all(0 <= seed <= MAX_SEED for seed in seeds):
        raise GpflError(f"the seed of a run is {min(seeds)}; it must be at least 0, at most {MAX_SEED}")
    names = [cell.variant.method["name"] for cell in cells]
    check_method_set(settings, own, names)
    if "defence" in settings:
        raise GpflError("--set defence.… is not for studies: curves have flags for their values")
    folder = results_folder(out)
    run = {"device": device, "engine": engine}
    plan = GridPlan(
        out=folder, seeds=tuple(seeds), rounds=rounds, patience=patience, run=run, common=settings, own=own, weights=weights
    )
    grid.check_cells(cells, plan)
    return plan


def grounds_for(cells: Sequence[Cell], plan: GridPlan, dry_run: bool) -> FederationCache:
    """Gives the ground of the runs; data that are not here are got, which a dry run does not do."""
    data = str(plan.given(cells[0])["data"]["name"])
    if not grid.has_data(data):
        if dry_run:
            raise GpflError(f"the data '{data}' are not here: gpfl data get {data}")
        download_datasets([data])
    return FederationCache()


def refuse_victims(
    cell: Cell, plan: GridPlan, grounds: FederationCache, images: int, batches: Sequence[int], effort: AttackConfig
) -> None:
    """Refuses what could not be attacked, before anything is trained: data that are no images, or too few of them."""
    setting = study.setting_of(cell, plan, grounds)
    refuse_other_than_images(setting.federation)
    victims = choose_victims(setting.federation, range(len(setting.federation)), images, batches, effort.seed)
    least = setting.method.net.min_batch
    if min(victims) < least:
        raise GpflError(
            f"net '{setting.method.net.name}' trains on batches of at least {least} rows, and the ceiling of a study is one "
            "step on one image: use another net, or attack single runs by gpfl attack --batch"
        )


def methods_of(words: str) -> list[str]:
    """Gives the methods of a list, each of which sends updates."""
    names = known_methods(words)
    for name in names:
        if not METHODS[name].shares or name == "fedproto":
            raise GpflError(f"--methods names '{name}', which sends no update of weights that could be attacked or defended")
    return names


def known_methods(words: str) -> list[str]:
    """Gives the methods of a list."""
    names = parse_names("--methods", words)
    for name in names:
        if name not in METHODS:
            raise GpflError(f"--methods names '{name}', which is no method; {did_you_mean(name, METHODS)}")
    return list(dict.fromkeys(names))


def option_values(name: str, text: str, own: Mapping[str, object]) -> list[float]:
    """Gives the values of a family: those of a flag, or of the study's file; none where the flag says none."""
    if not text:
        return [float(value) for value in cast(Sequence[float], own[name])]
    if text.strip() == "none":
        return []
    found = numbers_in(f"--{name.replace('_', '-')}", text)
    if name == "bits" and any(value % 1 or value >= FULL_BITS for value in found):
        raise GpflError(f"--bits is '{text}'; bits are whole numbers, 2 to {FULL_BITS - 1}")
    if name == "top_k" and max(found) >= 1:
        raise GpflError(f"--top-k is '{text}'; shares must be below 1, which is all entries")
    return found


def numbers_in(flag: str, text: str) -> list[float]:
    """Gives the numbers of a list with commas, all above 0."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        none = "" if flag == "--epsilon" else ", or none"
        raise GpflError(f"{flag} is '{text}'; it must be numbers with commas between{none}") from None
    if min(found) <= 0 or not all(map(math.isfinite, found)):
        raise GpflError(f"{flag} is '{text}'; its values must be above 0, and finite")
    return list(dict.fromkeys(found))


def by_epsilon(
    text: str,
    given: Mapping[str, str],
    names: Sequence[str],
    plan: GridPlan,
    grounds: FederationCache,
    how: tuple[float, float, float],
    variants: study.Variants,
) -> dict[str, dict[str, list[float]]]:
    """Gives each method's noise for values of ε, under two bounds and δ; a family that was left out stays out."""
    wanted = numbers_in("--epsilon", text)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for family in study.FAMILIES[:2]:
        said = given[family.name].strip()
        if said not in ("", "none"):
            raise GpflError(f"--epsilon and --{family.name.replace('_', '-')} were both given: leave one out")
        for name in names if said != "none" else ():
            *_, like = study.spots([name], {family.name: [1.0]}, *how, weights=False, variants=variants)
            found[name][family.name] = study.noises(family, wanted, like.cell, plan, grounds)
    return found


# Running and telling.


def train(jobs: Mapping[Cell, Job], plan: GridPlan) -> dict[Path, str]:
    """Gives what went wrong by the folder of the run, having run what is missing."""
    unique = {job.folder: job for job in jobs.values()}
    lacking = grid.unfinished_jobs(unique.values(), plan)
    if len(lacking) < len(unique):
        print_line(f"Run before: {len(unique) - len(lacking)} of {pluralize(len(unique), 'run')}.")
    with GridReporter(console, lacking, plan.seeds) as reporter:
        origin = {"command": command_words(), "commit": commit()}
        problems = grid.run_all(lacking, plan, reporter.callback, origin, reporter.end)
    for words in dict.fromkeys(problems.values()):
        print_error(f"{', '.join(unique[path].label for path in problems if problems[path] == words)}: {words}")
    return problems


def show(jobs: Mapping[Cell, Job], plan: GridPlan, after: str) -> None:
    """Prints what would be run, and what follows."""
    unique = list({job.folder: job for job in jobs.values()}.values())
    sound = print_plan(unique, plan, {})
    print_line(f"{after[0].upper()}{after[1:]}; those that {plan.out} holds are not made again.")
    if not sound:
        raise click.exceptions.Exit(1)


def made_by(jobs: Iterable[Job], seeds: Sequence[int]) -> str:
    """Gives the last line of a page: the command, and what the runs were made by."""
    runs = [trials for job in jobs if (trials := job.trials("", seeds))]
    commits, now = {one for trials in runs for one in trial_commits(trials)}, commit()
    later = "" if now in commits else f" The commit is that of the runs; the page is of {now}, and what was attacked since."
    return f"{Origin(command_words(), now).describe(runs, commits, seeds)}{later}"


def tell_point(words: str, line: Line) -> None:
    """Prints a point of the curves."""
    print_line(f"{words}: {line.psnr:.2f} dB (floor {line.floor:.2f}): {verdict(line)}")


def tell_leaks(found: Findings) -> None:
    """Prints what a method's run tells."""
    for which, guesses in found.labels.items():
        print_line(f"Round {which}. {labels.told(guesses, found.method, found.clients)}")
    print_line(membership.told(found.members, found.method))


def tell_files(paths: Sequence[Path]) -> None:
    """Prints the first of the files, which is the page of tables, without the pictures that it shows, and names the files."""
    print_line(re.sub(r"\n!\[.*\]\(.*\)\n", "", paths[0].read_text(encoding="utf-8")))
    print_line(f"Written: {', '.join(path.name for path in paths)} in {paths[0].parent}")
