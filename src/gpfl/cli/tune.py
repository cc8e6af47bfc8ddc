"""The command `gpfl tune`: search methods' values on validation rows, and keep what was chosen."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import click
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gpfl.cli.command import Argument, Command
from gpfl.cli.interrupt import interruptible, same_command
from gpfl.cli.options import (
    config_argument,
    config_options,
    option,
    out_option,
    parse_options,
    seeds_option,
    set_option,
)
from gpfl.cli.overrides import MethodOverrides, check_method_set, load_config, merge, parse_method_set
from gpfl.cli.progress import LOG_INTERVAL
from gpfl.cli.terminal import console, print_data_warnings, print_line
from gpfl.errors import GpflError, did_you_mean, pluralize
from gpfl.experiments import tune as study
from gpfl.experiments import tuned_config as chosen
from gpfl.experiments.budget import BEST, SearchInfo, describe_unequal_budgets, read_search_info_or_none
from gpfl.experiments.proposals import count_of, describe_space, describe_values, search_space
from gpfl.experiments.tune import Candidate, MethodSearch, Search, SearchResult
from gpfl.io import files, toml
from gpfl.io.provenance import command_words, commit
from gpfl.methods import METHODS
from gpfl.report.tuning_tables import format_origin, format_score, to_csv, to_markdown
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback, RunInfo
from gpfl.training.config import ConfigDict
from gpfl.training.run_dir import MetricsRecord, metric


@click.command(cls=Command)
@click.argument("methods", cls=Argument, metavar="METHODS", help=f"Names separated by commas, or all: {', '.join(METHODS)}.")
@config_argument
@option("--budget", default=20, metavar="N", help="Candidates per method, its default values among them.")
@seeds_option("0", "Seeds of each candidate.")
@click.option("--with-lr", is_flag=True, help="Search the learning rate as well, for every method.")
@option("--at-once", default=4, metavar="N", help="Candidates to train at the same time, if the engine can.")
@option("--search-seed", default=0, metavar="N", help="Seed of the proposals.")
@click.option("--keep-weights", is_flag=True, help="Keep the checkpoints and models of all candidates.")
@out_option("Folder; a search it already holds is resumed.")
@set_option("Set any option of the config, or one of a method, which is then not searched, such as fedprox.mu=0.01.")
@config_options("data", "partition", "net", "train", "defence", "run", omit=("run.seed",))
def tune(
    methods: str,
    config: str | None,
    budget: int,
    seeds: list[int],
    with_lr: bool,
    at_once: int,
    search_seed: int,
    keep_weights: bool,
    out: Path | None,
    assignments: tuple[str, ...],
    federation: str | None,
    **values: object,
) -> None:
    """Search hyperparameters on validation samples.

    Searches each method's documented ranges with the same budget. Test samples are never used.
    """
    settings, own = parse_method_set(assignments)
    names = named_methods(methods)
    check_method_set(settings, own, names, names_from="the methods")
    search = Search(
        budget=budget,
        seeds=tuple(seeds),
        with_lr=with_lr,
        at_once=at_once,
        seed=search_seed,
        keep_weights=keep_weights,
    )
    given, first = with_validation(config_of(config, merge(parse_options(values), settings), federation))
    resolved = configs.resolve_config({**given, "method": {"name": names[0]}})
    folder = out or Path("runs") / f"{Path(resolved.data).stem}-tune"
    print_data_warnings(resolved)
    with interruptible(same_command), Listener([first, unequal_to(folder, names, own, search)]) as listener:
        found = study.tune(given, names, own, search, folder, listener)
    everything = keep(found, chosen.held_beside(found, given), folder)
    tell(found, folder)
    if words := describe_unequal_budgets({tuned.plan.method: tuned.made for tuned in everything}):
        print_line(f"{folder} has {words}.")


# What is given.


def named_methods(words: str) -> list[str]:
    """Gives the methods of a list such as "gpfl,ditto" or "all"."""
    found: list[str] = []
    for word in (word.strip() for word in words.split(",")):
        if word != "all" and word not in METHODS:
            raise GpflError(f"unknown method '{word}'; {did_you_mean(word, (*METHODS, 'all'))}")
        found += METHODS if word == "all" else [word]
    return list(dict.fromkeys(found))


def config_of(config: str | None, by_hand: ConfigDict, federation: str | None) -> ConfigDict:
    """Gives the config that all methods share."""
    given = load_config(config, by_hand, federation, "tune METHODS")
    if given.pop("method", None):
        print_line(f"The section [method] of {config} is left aside: values that are not to be searched are given by --set.")
    return given


def with_validation(given: ConfigDict) -> tuple[ConfigDict, str]:
    """Gives a config that keeps rows for validation where nothing is said of them, and says so; a manifest has its own."""
    partition = given.get("partition", {})
    if partition.get("name") == "manifest" or "validation_fraction" in partition:
        return given, ""
    words = f"A share of {study.VALIDATION} of each client's training rows is kept for validation (--validation-fraction)."
    return {**given, "partition": {**partition, "validation_fraction": study.VALIDATION}}, words


def unequal_to(folder: Path, names: Sequence[str], own: MethodOverrides, search: Search) -> str:
    """Gives a sentence that other methods of a folder have another budget than these will have; "" where they have not."""
    others = [path.parent for path in sorted(folder.glob(f"*/{BEST}")) if path.parent.name not in names]
    tried = {place.name: made for place in others if (made := read_search_info_or_none(place))}
    for name in names:
        space = search_space(name, {"method": dict(own.get(name, {}))}, search.with_lr)
        tried[name] = SearchInfo(search.budget, count_of(space, search.budget), bool(space))
    words = describe_unequal_budgets(tried)
    return f"{folder} will have {words}." if words else ""


# How it goes.


class Listener:
    """Shows a search: a bar for each method on a terminal, and a line for each candidate anywhere."""

    def __init__(self, first: Sequence[str]) -> None:
        self._first = [words for words in first if words]  # what is said before all else
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None
        self._done: list[Candidate] = []
        self._running: dict[int, list[RunLine]] = {}  # the runs of candidates that are not done

    def __enter__(self) -> Self:
        if console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if console.is_terminal:
            self._progress.stop()

    def begins(self, plan: MethodSearch, candidates: Sequence[Candidate]) -> None:
        """Says what is searched, and shows the method's bar."""
        for words in self._first:
            print_line(words)
        self._first = []
        print_line(plan_words(plan))
        if candidates:
            were = "was" if len(candidates) == 1 else "were"
            print_line(f"{plan.method}: {pluralize(len(candidates), 'candidate')} of {plan.count} {were} run before.")
        self._done, self._running = list(candidates), {}
        self._task = self._progress.add_task(plan.method, total=plan.count * size(plan), status="")
        self.draw(plan)

    def callback(self, plan: MethodSearch, candidate: Candidate) -> RunLine:
        """Return the callback of one run."""
        run = RunLine(self, plan, candidate)
        self._running.setdefault(candidate.number, []).append(run)
        return run

    def ends(self, plan: MethodSearch, candidate: Candidate) -> None:
        """Says how a candidate did."""
        self._done.append(candidate)
        self._running.pop(candidate.number, None)
        print_line(
            f"{plan.method} {candidate.number}/{plan.count}: {describe_values(candidate.values)}: {format_score(candidate)}"
        )
        self.draw(plan)

    def draw(self, plan: MethodSearch) -> None:
        """Draws the bar: rounds of what is done, as if none had ended early, and of what runs."""
        top = max((candidate.score for candidate in self._done), default=0.0)
        words = f"{len(self._done)}/{plan.count} candidates, best validation {top:.2%}"
        rounds = len(self._done) * size(plan) + sum(run.round for runs in self._running.values() for run in runs)
        if self._task is not None:
            self._progress.update(self._task, status=words, completed=rounds)


class RunLine(Callback):
    """Moves the bar by one run's rounds; without a bar, prints a line now and then."""

    def __init__(self, listener: Listener, plan: MethodSearch, candidate: Candidate) -> None:
        self._listener, self._plan, self._candidate = listener, plan, candidate
        self.round, self._rounds, self._last_time = 0, 0, time.monotonic()

    def on_run_start(self, run: RunInfo) -> None:
        """Keep the number of rounds."""
        self._rounds = run.rounds

    def on_evaluate(self, record: MetricsRecord) -> None:
        """Show the validation accuracy; test samples have no part in a search."""
        self.round = int(metric(record, "round"))
        self._listener.draw(self._plan)
        if not console.is_terminal and time.monotonic() - self._last_time > LOG_INTERVAL:
            self._last_time = time.monotonic()
            name = f"{self._plan.method} {self._candidate.number}/{self._plan.count}"
            accuracy = metric(record, "validation_accuracy")
            print_line(f"{name}: round {self.round}/{self._rounds}, validation {accuracy:.2%}")


def size(plan: MethodSearch) -> int:
    """Gives the rounds of a candidate, over all its seeds."""
    return plan.config.train.rounds * len(plan.search.seeds)


def plan_words(plan: MethodSearch) -> str:
    """Gives what is searched for a method, and with what budget."""
    runs = f"{pluralize(len(plan.search.seeds), 'seed')}, {pluralize(plan.config.train.rounds, 'round')}"
    ranges = "; ".join(f"{key} in {words}" for key, words in describe_space(plan.space).items())
    if not plan.space:
        way = "" if plan.search.with_lr else "; --with-lr would search the learning rate"
        return f"{plan.method}: nothing to search, so it runs once ({runs}){way}."
    fewer = f", all there are of the budget of {plan.search.budget}" if plan.count < plan.search.budget else ""
    together = f", {plan.at_once} at once" if plan.at_once > 1 else ""
    return f"{plan.method}: {ranges}. {pluralize(plan.count, 'candidate')}{fewer}, each {runs}{together}; the first: defaults."


# What is kept.


def keep(found: Sequence[SearchResult], others: Sequence[SearchResult], out: Path) -> list[SearchResult]:
    """Writes each method's best.toml, the config that all share, and the tables of all that the folder holds; gives these."""
    note = format_origin(found, command_words(), commit())
    everything = [*(replace(tuned, note=note) for tuned in found), *others]
    for tuned in everything[: len(found)]:
        if tuned.best.trouble:
            continue
        head = f"# {tuned.plan.method}: {describe_values(tuned.best.values)}; {format_score(tuned.best)}\n# {note}\n"
        files.write_text(tuned.plan.folder / BEST, head + chosen.best_config(tuned))
        study.write_study(tuned.plan, tuned.made)
    if not found[0].plan.search.with_lr:
        files.write_text(out / "common.toml", toml.dump(chosen.common_config(found[0])))
    files.write_text(out / "table.md", to_markdown(everything))
    files.write_text(out / "table.csv", to_csv(everything))
    return everything


def tell(found: Sequence[SearchResult], out: Path) -> None:
    """Says what was chosen, and how to run it."""
    for tuned in found:
        plan, top = tuned.plan, tuned.best
        if top.trouble:
            print_line(f"{plan.method}: no candidate could be trained to its end.")
            continue
        compared = "" if top.number == 1 else f"; with defaults {tuned.candidates[0].score:.2%}"
        default = " (the defaults)" if top.number == 1 and plan.space else ""
        print_line(f"{plan.method}: {describe_values(top.values)}{default}: {format_score(top)}{compared}")
    print_line(f"Table: {out / 'table.md'}, {out / 'table.csv'}")
    found = [tuned for tuned in found if not tuned.best.trouble]
    if not found:
        raise GpflError(f"nothing could be chosen, since no run came to its end (see {out / 'table.csv'}): lower --lr")
    print_line(f"Values: {', '.join(str(tuned.plan.folder / BEST) for tuned in found)}")
    if len(found) == 1 or found[0].plan.search.with_lr:
        first = shlex.quote(str(found[0].plan.folder / BEST))
        others = "" if len(found) == 1 else f", and the other {len(found) - 1} likewise: their learning rates are their own"
        print_line(f"Run it: gpfl run {first} --seeds 0,1,2{others}")
    else:
        names = ",".join(tuned.plan.method for tuned in found)
        sets = [word for tuned in found for setting in chosen.assignments(tuned) for word in ("--set", setting)]
        print_line(f"Run them: {shlex.join(['gpfl', 'compare', str(out / 'common.toml'), '--methods', names, *sets])}")
