"""The command `gpfl compare`."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gpfl.cli.command import Command
from gpfl.cli.interrupt import interruptible, same_command
from gpfl.cli.options import config_argument, config_options, methods_option, out_option, seeds_option, set_option
from gpfl.cli.overrides import load_shared_config, new_folder
from gpfl.cli.progress import ProgressReporter, RepeatsReporter
from gpfl.cli.terminal import console, print_data_warnings, print_error, print_line, print_method_table, table_console
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError, pluralize
from gpfl.experiments import compare as comparisons
from gpfl.experiments.repeats import REPEATS_FILE, RepeatedResults, run_repeats
from gpfl.experiments.trials import TRIALS_FILE
from gpfl.report import figures, method_tables
from gpfl.report.repeat_tables import RepeatReport
from gpfl.training import config as configs


@click.command(cls=Command)
@config_argument
@methods_option("Methods to compare: names, all, or ablations (GPFL and its five ablations).")
@out_option("Folder; trials it already holds are not run again.")
@seeds_option("0,1,2", "Seeds of the trials.")
@click.option(
    "--repeats",
    type=click.IntRange(min=2),
    metavar="N",
    help="Draw training and test samples (and a synthetic partition) N times, in place of --seeds.",
)
@set_option("Set any option of the config, or of one method, such as fedprox.mu=0.01.")
@config_options("data", "partition", "net", "train", "defence", "run", omit=("run.seed",))
def compare(methods: str, out: Path | None, seeds: tuple[int, ...], repeats: int | None, **flags: Any) -> None:
    """Train several methods on one federation or on repeated splits.

    Prints one table. Finished runs in the folder are reused.
    """
    if repeats and click.get_current_context().get_parameter_source("seeds") == ParameterSource.COMMANDLINE:
        raise GpflError("--repeats gives every repeat a split and a seed of its own: leave out --seeds, or --repeats")
    settings, variants = load_shared_config(flags, "compare", comparisons.parse_methods(methods))
    comparisons.check_methods(settings, variants)
    common = configs.resolve_config(variants[0].config(settings))
    folder = new_folder(out, Path("runs") / f"{Path(common.data).stem}-{'repeats' if repeats else 'comparison'}")
    _check_kind(folder, repeats is not None)
    print_data_warnings(common)
    with interruptible(lambda: same_command(*() if out else ("--out", str(folder)))):
        if repeats:
            with RepeatsReporter(console, repeats) as reporter:
                results = run_repeats(settings, variants, repeats, folder, reporter.callback)
            diverged = _save_repeats(results, folder)
        else:
            with ProgressReporter(console) as reporter:
                compared = comparisons.compare(settings, variants, seeds, folder, reporter.callback)
            if compared.rows:
                _save_comparison(compared, common, folder)
            diverged = {label: str(error) for label, error in compared.diverged.items()}
    for label, text in diverged.items():
        print_error(f"{label}: {text}; other settings need another --out")
    if diverged:
        process_group().barrier()  # a process that exited earlier would abort the main one before it has printed
        raise click.exceptions.Exit(1)


def _check_kind(folder: Path, repeated: bool) -> None:
    """Raise if a folder holds a comparison of the other kind, whose tables would be overwritten."""
    if any(folder.glob(f"*/{TRIALS_FILE if repeated else REPEATS_FILE}")):
        kinds = ("without", "with") if repeated else ("with", "without")
        raise GpflError(
            f"--out {folder} holds a comparison {kinds[0]} --repeats, this one is {kinds[1]}: choose another folder"
        )


def _save_repeats(results: RepeatedResults, folder: Path) -> dict[str, str]:
    """Print and write the tables of repeats; return how methods diverged."""
    diverged = {
        label: f"{pluralize(len(errors), 'repeat')} diverged, first repeat {min(errors)}: {errors[min(errors)]}"
        for label, errors in results.diverged.items()
    }
    if len(results.repeats) < 2:
        return diverged
    report = RepeatReport(results)
    print_line(report.title)
    for table in report.tables:
        table_console().print(table, "")
    notes = [f"{label}: {text}." for label, text in diverged.items()]
    print_line(f"Table: {', '.join(str(path) for path in report.save(folder, notes))}")
    return diverged


def _save_comparison(compared: comparisons.ComparisonResult, config: configs.Config, folder: Path) -> None:
    rows = compared.rows
    partition = config.partition.name if config.partition else "from a manifest"
    clients = rows[0].summaries[0]["clients"]
    setting = f"{config.data}, {clients} clients ({partition}), {config.train.rounds} rounds"
    title = f"{setting}; mean ± std over seeds"
    print_method_table(rows, title, compared.unfinished)
    paths = method_tables.save(rows, folder, title, compared.unfinished)
    figures.draw_learning_curves(rows, [folder / "curves.png"], f"{setting}; mean ± std over seeds")
    print_line(f"Table: {', '.join(str(path) for path in paths)}. Curves: {folder / 'curves.png'}")
