"""The command `gpfl resume`."""

from __future__ import annotations

from pathlib import Path

import click

from gpfl.cli.command import Argument, Command
from gpfl.cli.interrupt import interruptible, resume_command
from gpfl.cli.options import PATH
from gpfl.cli.progress import ProgressReporter
from gpfl.cli.terminal import console, print_line, print_run_summary, print_trials_summary
from gpfl.experiments.trials import is_trials_dir, resume_trials
from gpfl.training import api
from gpfl.training.run_dir import RunDir


@click.command(cls=Command)
@click.argument("folder", cls=Argument, metavar="DIR", type=PATH, help="Folder of a run or of trials.")
def resume(folder: Path) -> None:
    """Resume an interrupted run or trials.

    The results are the same as without the interruption.
    """
    if is_trials_dir(folder):
        with interruptible(lambda: resume_command(folder)), ProgressReporter(console) as reporter:
            trials = resume_trials(folder, reporter.callback)
        print_trials_summary(trials, folder)
        return
    finished = RunDir.open(folder).finished
    with interruptible(lambda: resume_command(folder)), ProgressReporter(console) as reporter:
        result = api.resume(folder, callbacks=[reporter.callback(str(folder))])
    if finished:
        print_line(f"The run in {folder} was already finished.")
    print_run_summary(result, folder)
