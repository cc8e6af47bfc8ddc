"""The commands `gpfl run` and `gpfl resume`."""

from pathlib import Path
from typing import Any

import click

from gpfl.cli.command import Argument, Command
from gpfl.cli.interrupt import interruptible, resume_command
from gpfl.cli.options import PATH, config_argument, config_options, out_option, parse_options, seeds_option, set_option
from gpfl.cli.overrides import load_config, merge, new_folder, parse_set
from gpfl.cli.progress import ProgressReporter
from gpfl.cli.terminal import console, print_data_warnings, print_line, print_method_table, print_run_summary
from gpfl.errors import GpflError
from gpfl.experiments.stored_runs import Trials
from gpfl.experiments.trials import is_trials_dir, resume_trials, run_trials
from gpfl.training import config as configs
from gpfl.training import execute
from gpfl.training.result import Result
from gpfl.training.run_dir import RunDir


@click.command(cls=Command)
@config_argument
@out_option("Folder for the run; it must be new or empty.")
@seeds_option(None, "Run one trial per seed and report mean ± std.")
@set_option("Set any option of the config.", "SECTION.KEY=VALUE")
@config_options("method", "data", "partition", "net", "train", "defence", "run")
def run(out: Path | None, seeds: tuple[int, ...] | None, **flags: Any) -> None:
    """Train one method on one federation.

    Options below are those of the chosen method, data, partition and network: `gpfl run --method ditto --help` lists
    Ditto's, and `gpfl run --data visits.csv --help` those of a table, such as --client, --label and --missing.
    """
    overrides = merge(parse_options(flags), parse_set(flags["assignments"]))
    if seeds is not None and "seed" in overrides.get("run", {}):
        raise GpflError("--seed and --seeds exclude each other: leave one out")
    settings = load_config(flags, overrides, "run")
    resolved = configs.resolve_config(settings)
    name = f"{Path(resolved.data).stem}-{resolved.method.name}{'-trials' if seeds else ''}"
    folder = new_folder(out, Path("runs") / name)
    print_data_warnings(resolved)
    with interruptible(lambda: resume_command(folder)), ProgressReporter(console) as reporter:
        if seeds:
            outcome: Trials | Result = run_trials(settings, seeds, folder, reporter.callback)
        else:
            callback = reporter.callback(resolved.method.name)
            outcome = execute.start_run(resolved, resolved.federation(), out=folder, callbacks=[callback])
    _print_summary(outcome, folder)


@click.command(cls=Command)
@click.argument("folder", cls=Argument, metavar="DIR", type=PATH, help="Folder of a run or of trials.")
def resume(folder: Path) -> None:
    """Resume an interrupted run or trials.

    The results are the same as without the interruption.
    """
    finished = not is_trials_dir(folder) and RunDir.open(folder).finished
    with interruptible(lambda: resume_command(folder)), ProgressReporter(console) as reporter:
        if is_trials_dir(folder):
            outcome: Trials | Result = resume_trials(folder, reporter.callback)
        else:
            outcome = execute.resume(folder, callbacks=[reporter.callback(str(folder))])
    if finished:
        print_line(f"The run in {folder} was already finished.")
    _print_summary(outcome, folder)


def _print_summary(outcome: Trials | Result, folder: Path) -> None:
    if isinstance(outcome, Result):
        print_run_summary(outcome, folder)
    else:
        print_method_table([outcome], f"{len(outcome.summaries)} trials: mean ± std")
        print_line(f"Trials: {folder}")
