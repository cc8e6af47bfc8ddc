"""The command `gpfl run`."""

from __future__ import annotations

from pathlib import Path

import click

from gpfl.cli.command import Command
from gpfl.cli.interrupt import interruptible, resume_command
from gpfl.cli.options import config_argument, config_options, out_option, parse_options, seeds_option, set_option
from gpfl.cli.overrides import load_config, merge, new_folder, parse_set
from gpfl.cli.progress import ProgressReporter
from gpfl.cli.terminal import console, print_data_warnings, print_run_summary, print_trials_summary
from gpfl.errors import GpflError
from gpfl.experiments.trials import run_trials
from gpfl.training import config as configs
from gpfl.training.execute import start_run


@click.command(cls=Command)
@config_argument
@out_option("Folder for the run; it must be new or empty.")
@seeds_option(None, "Run one trial per seed and report mean ± std.")
@set_option("Set any option of the config.", "SECTION.KEY=VALUE")
@config_options("method", "data", "partition", "net", "train", "defence", "run")
def run(
    config: str | None,
    out: Path | None,
    seeds: list[int] | None,
    assignments: tuple[str, ...],
    federation: str | None,
    **values: object,
) -> None:
    """Train one method on one federation.

    Options below are those of the chosen method, data, partition and network: `gpfl run --method ditto --help` lists
    Ditto's, and `gpfl run --data visits.csv --help` those of a table, such as --client, --label and --missing.
    """
    overrides = merge(parse_options(values), parse_set(assignments))
    if seeds is not None and "seed" in overrides.get("run", {}):
        raise GpflError("--seed and --seeds exclude each other: leave one out")
    settings = load_config(config, overrides, federation, "run")
    resolved = configs.resolve_config(settings)
    name = f"{Path(resolved.data).stem}-{resolved.method.name}{'-trials' if seeds else ''}"
    folder = new_folder(out, Path("runs") / name)
    print_data_warnings(resolved)
    if seeds:
        with interruptible(lambda: resume_command(folder)), ProgressReporter(console) as reporter:
            trials = run_trials(settings, seeds, folder, reporter.callback)
        print_trials_summary(trials, folder)
    else:
        with interruptible(lambda: resume_command(folder)), ProgressReporter(console) as reporter:
            callback = reporter.callback(resolved.method.name)
            result = start_run(resolved, resolved.federation(), out=folder, callbacks=[callback])
        print_run_summary(result, folder)
