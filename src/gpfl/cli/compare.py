"""The command `gpfl compare`."""

from __future__ import annotations

from pathlib import Path

import click

from gpfl.cli.command import Command
from gpfl.cli.interrupt import interruptible, same_command
from gpfl.cli.options import config_argument, config_options, out_option, parse_options, seeds_option, set_option
from gpfl.cli.overrides import check_method_set, load_config, merge, new_folder, parse_method_set
from gpfl.cli.progress import ProgressReporter
from gpfl.cli.terminal import console, print_data_warnings, print_error, print_line, print_method_table
from gpfl.engine.distributed import process_group
from gpfl.experiments import compare as comparisons
from gpfl.report import figures, method_tables
from gpfl.training import config as configs


@click.command(cls=Command)
@config_argument
@click.option(
    "--methods",
    default="all",
    show_default=True,
    metavar="NAME,…",
    help="Methods to compare: names, all, or ablations (GPFL and its five ablations).",
)
@out_option("Folder; trials it already holds are not run again.")
@seeds_option("0,1,2", "Seeds of the trials.")
@set_option("Set any option of the config, or of one method, such as fedprox.mu=0.01.")
@config_options("data", "partition", "net", "train", "defence", "run", omit=("run.seed",))
def compare(
    config: str | None,
    methods: str,
    out: Path | None,
    seeds: list[int],
    assignments: tuple[str, ...],
    federation: str | None,
    **values: object,
) -> None:
    """Train several methods on one federation and print one table."""
    overrides, method_overrides = parse_method_set(assignments)
    variants = comparisons.parse_methods(methods)
    check_method_set(overrides, method_overrides, [variant.method["name"] for variant in variants])
    settings = load_config(config, merge(parse_options(values), overrides), federation, "compare")
    if "method" in settings:
        print_line(f"Section [method] of {config} is ignored: use --methods and --set.")
    comparisons.check_methods(settings, variants, method_overrides)
    common = configs.resolve_config({**settings, "method": dict(variants[0].method)})
    folder = new_folder(out, Path("runs") / f"{Path(common.data).stem}-comparison")
    print_data_warnings(common)
    with interruptible(lambda: same_command(*() if out else ("--out", str(folder)))):
        with ProgressReporter(console) as reporter:
            compared = comparisons.compare(settings, variants, method_overrides, seeds, folder, reporter.callback)
        if compared.rows:
            _save_comparison(compared, common, folder)
    for label, error in compared.diverged.items():
        print_error(f"{label}: {error}; other settings need another --out")
    if compared.diverged:
        process_group().barrier()  # a process that ended before the first has printed would take it along
        raise click.exceptions.Exit(1)


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
