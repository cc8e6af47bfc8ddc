"""The command `gpfl advise`."""

from pathlib import Path
from typing import Any

import click

from gpfl.cli.command import Command
from gpfl.cli.interrupt import interruptible, same_command
from gpfl.cli.options import config_argument, config_options, methods_option, option, out_option, set_option
from gpfl.cli.overrides import load_shared_config, new_folder
from gpfl.cli.progress import RepeatsReporter
from gpfl.cli.terminal import console, print_data_warnings, print_line, table_console
from gpfl.experiments import advise as advising
from gpfl.experiments import compare as comparisons
from gpfl.experiments.advice import MIN_REPEATS
from gpfl.io.provenance import command_line
from gpfl.report.advice_report import AdviceReport
from gpfl.report.client_tables import MAX_CLIENTS
from gpfl.report.tables import format_duration


@click.command(cls=Command)
@config_argument
@methods_option(
    "Methods to try besides staying alone and one global model: names, all, or ablations.", advising.DEFAULT_METHODS
)
@out_option("Folder; repeats it already holds are not run again.")
@option("--repeats", default=20, type=click.IntRange(min=MIN_REPEATS), metavar="N", help="Number of repeated splits.")
@option(
    "--rope",
    default=0.01,
    type=click.FloatRange(min=0),
    metavar="X",
    help="Region of practical equivalence: differences of --metric up to this size do not matter; 0.01 is one point.",
)
@set_option("Set any option of the config, or of one method, such as ditto.mu=0.5.")
@config_options("data", "partition", "net", "train", "defence", "run", omit=("run.seed",))
def advise(methods: str, out: Path | None, repeats: int, rope: float, **flags: Any) -> None:
    """Say whether your clients should federate.

    Trains every client alone, one global model and personalised methods on repeated splits, and recommends staying alone, one
    global model or a personalised method, or says that the data are inconclusive. Writes advice.html and advice.json; the same
    command resumes after Ctrl-C. `gpfl advise --data visits.csv --help` also lists the options of a table, such as --client,
    --label and --missing.
    """
    settings, variants = load_shared_config(flags, "advise", advising.parse_variants(methods))
    settings = advising.resolve_settings(settings)
    comparisons.check_methods(settings, variants)
    common = advising.check_data(settings, repeats)
    folder = new_folder(out, Path("runs") / f"{Path(common.data).stem}-advice")
    print_data_warnings(common)
    names = ", ".join(variant.label for variant in variants)
    print_line(f"Training {names}: {repeats} repeats of up to {common.train.rounds} rounds each.")
    with (
        interruptible(lambda: same_command(*() if out else ("--out", str(folder)))),
        RepeatsReporter(console, repeats) as reporter,
    ):
        result = advising.advise(settings, variants, repeats, folder, reporter.callback, rope=rope, report_time=_print_time)
    report = AdviceReport(result)
    print_line(report.title)
    for table in (report.client_table(MAX_CLIENTS), report.cost_table()):
        table_console().print(table, "")
    for note in report.notes:
        print_line(note)
    page, content = report.save(folder, command_line())
    print_line(f"Page: {page}. Numbers: {content}")
    print_line(report.sentence)


def _print_time(elapsed: float, remaining: float) -> None:
    print_line(
        f"The first {advising.FIRST_REPEATS} repeats took {format_duration(elapsed)}; the others take about "
        f"{format_duration(remaining)}, and learning curves about as long again where an answer is unclear."
    )
