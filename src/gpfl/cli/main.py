"""The command `gpfl`."""

from __future__ import annotations

import errno
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

import gpfl
from gpfl.cli import flags
from gpfl.cli.arguments import argument, say_arguments
from gpfl.cli.attack import attack
from gpfl.cli.data import data_app, show_command
from gpfl.cli.overrides import layered, named_folder, refuse_unheard, split_settings
from gpfl.cli.privacy import privacy_app
from gpfl.cli.progress import ProgressReporter
from gpfl.cli.reproduce import reproduce_command
from gpfl.cli.terminal import (
    console,
    print_data_warnings,
    print_error,
    print_line,
    print_method_table,
    print_run_summary,
    print_trials_summary,
)
from gpfl.cli.tune import tune_command
from gpfl.data import DATASETS
from gpfl.engine import ENGINES
from gpfl.engine.allocator import retain_freed_memory
from gpfl.engine.distributed import exit_process, process_group
from gpfl.errors import DivergenceError, GpflError, did_you_mean
from gpfl.experiments import compare as studies
from gpfl.experiments import quickstart as quick
from gpfl.experiments.trials import holds_trials, resume_trials, run_trials
from gpfl.federation.partition import PARTITIONS
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.report import figures, method_tables
from gpfl.training import api
from gpfl.training import config as configs
from gpfl.training.run_dir import RunDir, refuse_used

REFUSALS = {
    getattr(errno, name, 0) for name in ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "ENAMETOOLONG", "ENOTDIR", "ELOOP")
}
"""What a machine may refuse a path for, which is nobody's bug."""

app = typer.Typer(
    name="gpfl",
    help="Personalised federated learning: each client ends with a model of its own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app)
app.add_typer(privacy_app)
app.command()(attack)


def version(wanted: bool) -> None:
    """Prints the version and ends."""
    if wanted:
        console.print(f"gpfl {gpfl.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=version, is_eager=True)] = False,
) -> None:
    """Personalised federated learning: each client ends with a model of its own."""


@app.command()
def quickstart(
    out: Annotated[str | None, typer.Option(help="Folder for the results; one cut off goes on.", metavar="DIR")] = None,
) -> None:
    """Run GPFL, FedAvg and training alone on the digits, three seeds each, and draw the curves (under two minutes)."""
    folder = out_folder(out, Path("runs") / "quickstart")
    if not quick.begun(folder):
        refuse_used(folder)
    print_line("1,797 handwritten digits on 20 clients; each holds 4 of the 10 classes, in unequal numbers.")
    with stoppable(lambda: same_command(out, folder)):
        with ProgressReporter(console) as reporter:
            rows = quick.quickstart(folder, reporter.watch)
        title = "Digits, 20 clients with 4 classes each: mean ± std over 3 seeds"
        print_method_table(rows, title)
        picture = folder / "curves.png"
        figures.draw_curves(rows, picture, "Digits, 20 clients with 4 classes each, 3 seeds")
        method_tables.save(rows, folder, title)
    print_line(f"Curves: {picture}. Table: {folder / 'table.md'}. Each client's model: {rows[0].folders[0] / 'models'}")
    print_line(
        "fedavg gives every client the same model, gpfl gives each its own; local exchanges nothing, so it shows what exchange"
    )
    print_line("is worth on these data.")
    print_line(f"Next: {called_as()} run --method gpfl --partition dirichlet --beta 0.1")


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Folder of a run or of trials.", metavar="DIR")],
) -> None:
    """Go on with a run that was cut off; its numbers are those of one that was not."""
    if holds_trials(folder):
        with stoppable(lambda: resumption(folder)), ProgressReporter(console) as reporter:
            trials = resume_trials(folder, reporter.watch)
        print_trials_summary(trials, folder)
        return
    finished = RunDir.open(folder).finished
    with stoppable(lambda: resumption(folder)), ProgressReporter(console) as reporter:
        result = api.resume(folder, watch=reporter.watch(str(folder)))
    if finished:
        print_line(f"The run in {folder} had finished.")
    print_run_summary(result, folder)


LISTS = ("methods", "data", "partitions", "nets", "engines")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(LISTS)}; all without it.", metavar="[WHAT]")] = "",
) -> None:
    """List the methods, data sets, partitions, nets and engines there are."""
    entries = {
        "methods": {name: first_sentence(kind) for name, kind in METHODS.items()},
        "data": {name: source.description for name, source in DATASETS.items()},
        "partitions": {name: first_sentence(kind) for name, kind in PARTITIONS.items()},
        "nets": {name: first_sentence(kind) for name, kind in NETS.items()},
        "engines": {name: first_sentence(kind) for name, kind in ENGINES.items()},
    }
    if what and what not in entries:
        raise GpflError(f"unknown list '{what}'; {did_you_mean(what, entries)}")
    for kind in [what] if what else LISTS:
        print_line(kind)
        for name, words in entries[kind].items():
            print_line(f"  {name:<14}{words}")


def run(
    config: str | None,
    set_: tuple[str, ...],
    federation: str | None,
    seeds: str | None,
    out: str | None,
    **values: object,
) -> None:
    """Train one method on one federation, and keep the run in a folder."""
    by_hand = flags.merge(flags.given_by_flags(values), flags.given_by_set(set_))
    if seeds is not None and "seed" in by_hand.get("run", {}):
        raise GpflError("--seed and --seeds were both given: leave one out")
    with speaking_of(flags.RECORDS):
        given = layered(config, by_hand, federation, "run")
        numbers = flags.parse_seeds(seeds) if seeds is not None else []
        resolved = configs.resolve_config(given)
        tail = "-trials" if numbers else ""
        folder = out_folder(out, Path("runs") / f"{Path(resolved.data).stem}-{resolved.method.name}{tail}")
        print_data_warnings(resolved)
        with stoppable(lambda: resumption(folder)), ProgressReporter(console) as reporter:
            if numbers:
                trials = run_trials(given, numbers, folder, reporter.watch)
            else:
                watch = reporter.watch(resolved.method.name)
                result = api.start_run(resolved, resolved.federation(), out=folder, watch=watch)
    if numbers:
        print_trials_summary(trials, folder)
    else:
        print_run_summary(result, folder)


def compare(
    config: str | None,
    methods: str,
    set_: tuple[str, ...],
    federation: str | None,
    seeds: str,
    out: str | None,
    **values: object,
) -> None:
    """Train several methods on one federation and print one table; what the folder holds already is not run again."""
    settings, own = split_settings(set_)
    entrants, numbers = studies.entrants(methods), flags.parse_seeds(seeds)
    refuse_unheard(settings, own, [entrant.method["name"] for entrant in entrants], done="compared", kind="comparisons")
    with speaking_of(section for section in flags.RECORDS if section != "method"):
        given = layered(config, flags.merge(flags.given_by_flags(values), settings), federation, "compare")
        if "method" in given:
            print_line(
                f"The section [method] of {config} is left aside: a comparison has its methods from --methods and --set."
            )
        studies.check_methods(given, entrants, own)
        resolved = configs.resolve_config({**given, "method": dict(entrants[0].method)})
        folder = out_folder(out, Path("runs") / f"{Path(resolved.data).stem}-comparison")
        print_data_warnings(resolved)
        with stoppable(lambda: same_command(out, folder)):
            with ProgressReporter(console) as reporter:
                compared = studies.compare(given, entrants, own, numbers, folder, reporter.watch)
            if compared.rows:
                tell_comparison(compared, resolved, folder)
            if compared.diverged:
                end_diverged(compared.diverged)


def end_diverged(diverged: Mapping[str, DivergenceError]) -> None:
    """Ends a comparison in which some trials diverged, once the table shows those that did not."""
    for label, end in diverged.items():
        print_error(f"{label}: {end}; other settings need another --out")
    process_group().barrier()  # a process that ended before the first has spoken would take it along
    raise typer.Exit(1)


def tell_comparison(compared: studies.Compared, config: configs.Config, folder: Path) -> None:
    """Prints the outcome of a comparison, and keeps it as a table and a figure."""
    rows = compared.rows
    clients = rows[0].summaries[0]["clients"]
    partition = config.partition.name if config.partition else "as in a manifest"
    title = f"{config.data}, {clients} clients ({partition}), {config.train.rounds} rounds; mean ± std over seeds"
    print_method_table(rows, title, compared.unended)
    paths = method_tables.save(rows, folder, title, compared.unended)
    figures.draw_curves(rows, folder / "curves.png", title)
    print_line(f"Table: {', '.join(str(path) for path in paths)}. Curves: {folder / 'curves.png'}")


def shared_parameters(config_help: str) -> list[click.Parameter]:
    """Gives the parameters that `run` and `compare` have in common."""
    return [
        argument("config", config_help, metavar="[CONFIG.toml]"),
        TyperOption(
            param_decls=["--federation", "federation"],
            metavar="FILE",
            help="Use the division of a saved manifest instead of a partition.",
            rich_help_panel=flags.PANELS["partition"],
        ),
        flags.name_flag("data", (*DATASETS, "or a file or folder of your own"), flags.PANELS["data"]),
        flags.name_flag("partition", PARTITIONS, flags.PANELS["partition"]),
        flags.name_flag("net", NETS, flags.PANELS["net"]),
    ]


def run_command() -> click.Command:
    """Gives the command `run`, whose flags are the options of everything a run is made of."""
    own: list[click.Parameter] = [
        TyperOption(param_decls=["--out", "out"], metavar="DIR", help="Folder for the run; it must be new or empty."),
        TyperOption(param_decls=["--seeds", "seeds"], metavar="N,N,…", help="Run one trial for each seed; report mean ± std."),
        TyperOption(
            param_decls=["--set", "set_"], multiple=True, metavar="SECTION.KEY=VALUE", help="Set any option of the config."
        ),
        flags.name_flag("method", METHODS, flags.PANELS["method"]),
    ]
    params = [*own, *shared_parameters("A config; flags win over it."), *flags.config_flags()]
    return TyperCommand("run", callback=run, params=params, help=run.__doc__, rich_markup_mode="rich")


def compare_command() -> click.Command:
    """Gives the command `compare`: the flags of `run` without those of single methods."""
    own: list[click.Parameter] = [
        TyperOption(
            param_decls=["--methods", "methods"],
            default="all",
            show_default=True,
            metavar="NAME,NAME,…",
            help="Methods to compare: names, all, or ablations (GPFL and its five).",
        ),
        TyperOption(param_decls=["--out", "out"], metavar="DIR", help="Folder; trials that it holds are not run again."),
        TyperOption(
            param_decls=["--seeds", "seeds"], default="0,1,2", show_default=True, metavar="N,…", help="Seeds of the trials."
        ),
        TyperOption(
            param_decls=["--set", "set_"],
            multiple=True,
            metavar="NAME.KEY=VALUE",
            help="Set any option of the config, or of one method, such as fedprox.mu=0.01.",
        ),
    ]
    shared = shared_parameters("A config for all methods; flags win over it.")
    params = [*own, *shared, *flags.config_flags(("data", "partition", "net", "train", "defence", "run"), omit=("seed",))]
    return TyperCommand("compare", callback=compare, params=params, help=compare.__doc__, rich_markup_mode="rich")


def first_sentence(kind: type) -> str:
    """Gives the first line of a docstring."""
    return (kind.__doc__ or "").strip().split("\n")[0]


def called_as() -> str:
    """Gives the words that call this command again."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m gpfl"
    return "gpfl" if shutil.which("gpfl") else sys.argv[0]


def resumption(folder: Path) -> str:
    """Gives the command that goes on with a run or with trials, as far as there is something to go on with."""
    return f"{called_as()} resume {shlex.quote(str(folder))}" if (folder / "config.toml").is_file() else ""


def same_command(out: str | None, folder: Path) -> str:
    """Gives this very command, with the folder that it writes to."""
    return f"{called_as()} {shlex.join([*sys.argv[1:], *(() if out else ('--out', str(folder)))])}"


def out_folder(wanted: str | None, usual: Path) -> Path:
    """Gives the folder that was asked for, or the usual one with the first number that is free; all ranks the same."""
    if wanted is not None:
        return named_folder(wanted)
    number, folder = 1, usual
    while folder.exists():
        number += 1
        folder = usual.with_name(f"{usual.name}-{number}")
    return process_group().broadcast(folder)


class StoppedError(Exception):
    """The person stopped the command; the text is the one that goes on with it, if there is one."""


@contextmanager
def stoppable(way: Callable[[], str]) -> Iterator[None]:
    """Lets Ctrl-C end what is within, with the command that goes on."""
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(way()) from None


@contextmanager
def speaking_of(sections: Iterable[str]) -> Iterator[None]:
    """Lets complaints about options of these sections name their flags as well."""
    try:
        yield
    except GpflError as problem:
        raise GpflError(flags.name_flags(str(problem), sections)) from None


def command() -> click.Group:
    """Gives the whole command."""
    group = typer.main.get_command(app)
    if not isinstance(group, TyperGroup):
        raise TypeError("the app has several commands")
    group.add_command(run_command())
    group.add_command(compare_command())
    group.add_command(reproduce_command())
    group.add_command(tune_command())
    data = group.commands["data"]
    if isinstance(data, TyperGroup):
        data.add_command(show_command())
    say_arguments(group)
    return group


def main() -> None:
    """Runs the command; a user's mistake ends it with one line and exit code 2, Ctrl-C with one and 130."""
    retain_freed_memory()
    try:
        code = command().main(prog_name="gpfl", standalone_mode=False) or 0
    except click.ClickException as problem:
        if type(problem).__name__ == "NoArgsIsHelpError":  # click 8.2 on; its text is the help
            problem.show()
        else:
            print_error(setting_instead(problem) or one_suggestion(problem.format_message()))
        sys.exit(2)
    except GpflError as problem:
        print_error(str(problem))
        sys.exit(2)
    except OSError as problem:
        if problem.errno not in REFUSALS or problem.filename is None:
            raise
        print_error(f"{problem.filename}: {problem.strerror}: choose another place, or mend that one")
        sys.exit(2)
    except StoppedError as stopped:
        print_error(f"stopped; go on with {stopped}" if str(stopped) else "stopped")
        sys.exit(130)
    except (click.Abort, KeyboardInterrupt):
        code = 130
    if code == 130:  # typer's word for Ctrl-C where nothing of ours caught it
        print_error("stopped")
    exit_process(code)


def setting_instead(problem: click.ClickException) -> str:
    """Gives how an option is set in a command that has no flag for it but --set; "" where the complaint is another."""
    if not isinstance(problem, click.NoSuchOption) or problem.ctx is None:
        return ""
    sections = [section for section in flags.PLAIN if section != "method"]
    keys = {f"--{flags.flag_name(section, key)}": f"{section}.{key}" for section in sections for key in flags.keys_of(section)}
    if problem.option_name not in keys or all(one.name != "set_" for one in problem.ctx.command.params):
        return ""
    return f"No such option '{problem.option_name}' of this command: give --set {keys[problem.option_name]}=…"


def one_suggestion(text: str) -> str:
    """Gives a message with its first suggestion alone: typer and click each add one."""
    first, *suggestions = text.split(" Did you mean ")
    return " Did you mean ".join([first, *suggestions[:1]]).strip()
