"""The command `gpfl tune`."""

import dataclasses
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gpfl.cli.command import Argument, Command
from gpfl.cli.interrupt import interruptible, same_command
from gpfl.cli.options import CommaList, config_argument, config_options, option, out_option, seeds_option, set_option
from gpfl.cli.overrides import load_shared_config
from gpfl.cli.progress import ProgressReporter
from gpfl.cli.terminal import console, print_data_warnings, print_line
from gpfl.errors import GpflError, pluralize
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.tuned_values import BEST, COMMON, describe_unequal_budgets
from gpfl.experiments.tuning import MethodSearch, SearchOptions, plan_searches, read_results, run_search, save_best, save_result
from gpfl.io import files, toml
from gpfl.io.provenance import command_line, current_commit
from gpfl.methods import METHODS
from gpfl.report.tuning_tables import describe_values, format_origin, format_score, to_csv, to_markdown
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback

VALIDATION_FRACTION = 0.2  # default fraction of the training samples that candidates are scored on

_POSITIVE = click.IntRange(min=1)


@click.command(cls=Command)
@click.argument(
    "methods",
    cls=Argument,
    metavar="METHODS",
    type=CommaList(str, [*METHODS, "all"]),
    help=f"Names separated by commas, or all: {', '.join(METHODS)}.",
)
@config_argument
@option("--budget", default=20, type=_POSITIVE, metavar="N", help="Candidates per method, including its defaults.")
@seeds_option("0", "Seeds of each candidate.")
@click.option("--with-lr", is_flag=True, help="Search the learning rate as well, for every method.")
@option(
    "--n-concurrent", default=4, type=_POSITIVE, metavar="N", help="Candidates to train at once, if the engine supports it."
)
@option("--search-seed", "seed", default=0, metavar="N", help="Seed of the sampler that proposes candidates.")
@click.option("--keep-weights", is_flag=True, help="Keep the checkpoints and models of all candidates.")
@out_option("Folder; a search it already holds is resumed.")
@set_option("Set an option of the config or of a method, such as fedprox.mu=0.01; it is then not searched.")
@config_options("data", "partition", "net", "train", "defence", "run", omit=("run.seed",))
def tune(methods: tuple[str, ...], out: Path | None, **flags: Any) -> None:
    """Search hyperparameters on validation samples.

    Searches each method's documented ranges with the same budget. Test samples are never used.
    """
    variants = [MethodVariant(name, {"name": name}) for name in (METHODS if "all" in methods else methods)]
    settings, variants = load_shared_config(flags, "tune METHODS", variants, names_from="the methods")
    note = ""
    partition = settings.setdefault("partition", {})
    if partition.get("name") != "manifest" and "validation_fraction" not in partition:
        partition["validation_fraction"] = VALIDATION_FRACTION
        note = f"{VALIDATION_FRACTION:.0%} of the training samples are held out for validation (--validation-fraction)."
    resolved = configs.resolve_config({**settings, "method": {"name": variants[0].label}})
    folder = out or Path("runs") / f"{Path(resolved.data).stem}-tune"
    options = SearchOptions(**{each.name: flags[each.name] for each in dataclasses.fields(SearchOptions)})
    print_data_warnings(resolved)
    with interruptible(same_command):
        searches = plan_searches(settings, variants, options, folder)
        if note:
            print_line(note)
        for search in searches:
            _run(search)
    _save(searches)


class _RoundCounter(Callback):
    """Advances a bar with each round."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance

    def on_round_end(self, round: int, losses: Mapping[str, float]) -> None:
        """Advance the bar."""
        self._advance()


def _run(search: MethodSearch) -> None:
    """Run one search, with a bar on a terminal and a line for each candidate."""
    print_line(_describe_search(search))
    total = search.n_candidates
    trained = [candidate for candidate in search.candidates() if candidate.finished]
    if trained:
        print_line(f"{search.method}: {len(trained)} of {pluralize(total, 'candidate')} already trained.")
    size = search.config.train.rounds * len(search.options.seeds)  # of a candidate
    progress = ProgressReporter(console, "{} rounds")
    task = progress.add_task(search.method, total=total * size, completed=len(trained) * size, status="")
    with progress:
        for candidate in run_search(search, _RoundCounter(lambda: progress.advance(task))):
            trained.append(candidate)
            values = describe_values(candidate.values)
            print_line(f"{search.method} {candidate.number}/{total}: {values}: {format_score(candidate)}")
            status = f"best validation {max(each.score for each in trained):.2%}"
            progress.update(task, completed=len(trained) * size, status=status)


def _describe_search(search: MethodSearch) -> str:
    size = f"{pluralize(len(search.options.seeds), 'seed')}, {pluralize(search.config.train.rounds, 'round')}"
    if not search.space:
        hint = "" if search.options.with_lr else "; --with-lr searches the learning rate"
        return f"{search.method}: nothing to search, so it runs once ({size}){hint}."
    ranges = "; ".join(f"{key} in {values}" for key, values in search.study["space"].items())
    fewer = f" (fewer values than the budget of {search.options.budget})" * (search.n_candidates < search.options.budget)
    return f"{search.method}: {ranges}. {pluralize(search.n_candidates, 'candidate')}{fewer}, {size} each."


def _save(searches: Sequence[MethodSearch]) -> None:
    """Write the configs and tables; print the best values and the command that trains with them."""
    out, note = searches[0].out, format_origin(searches[0], command_line(), current_commit())
    assignments: dict[str, list[str]] = {}  # of the methods that have a best candidate
    for search in searches:
        result = save_result(search, note)
        best, default = result.best, result.candidates[0]
        if best.failure:
            print_line(f"{search.method}: training diverged with all candidates.")
            continue
        text = f"{describe_values(best.values)}: {format_score(best)}"
        save_best(search, best, f"{text}\n{note}")
        compared = "; these are the defaults" if best is default else f"; with defaults {default.score:.2%}"
        print_line(f"{search.method}: {text}{compared if search.space else ''}")
        assignments[search.method] = [
            f"{search.method}.{key}={toml.format_value(value)}"
            for key, value in search.config_of(best.values)["method"].items()
            if key != "name"
        ]
    methods = [search.method for search in searches]
    results = sorted(read_results(out), key=lambda each: methods.index(each.method) if each.method in methods else len(methods))
    files.write_text(out / "table.md", to_markdown(searches[0], results))
    files.write_text(out / "table.csv", to_csv(results))
    print_line(f"Table: {out / 'table.md'}, {out / 'table.csv'}")
    if not assignments:
        raise GpflError(f"training diverged with all candidates (see {out / 'table.csv'}): lower --lr")
    best_configs = [str(out / method / BEST) for method in assignments]
    print_line(f"Values: {', '.join(best_configs)}")
    if searches[0].options.with_lr or len(best_configs) == 1:
        others = "; the others in the same way" if len(best_configs) > 1 else ""
        print_line(f"Run: gpfl run {shlex.quote(best_configs[0])} --seeds 0,1,2{others}")
    else:
        flags = [word for each in itertools.chain(*assignments.values()) for word in ("--set", each)]
        print_line(f"Run: gpfl compare {shlex.join([str(out / COMMON), '--methods', ','.join(assignments), *flags])}")
    if text := describe_unequal_budgets({result.method: result.study for result in results}):
        print_line(f"{out} has {text}.")
