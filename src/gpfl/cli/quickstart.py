"""The command `gpfl quickstart`: training alone, one global model and personalised models on repeated splits of the digits."""

from pathlib import Path

import click

from gpfl.cli.command import Command
from gpfl.cli.interrupt import interruptible, program, same_command
from gpfl.cli.options import out_option
from gpfl.cli.overrides import new_folder
from gpfl.cli.progress import RepeatsReporter
from gpfl.cli.terminal import console, print_line, table_console
from gpfl.experiments.compare import parse_methods
from gpfl.experiments.repeats import REPEATS_FILE, run_repeats
from gpfl.report.repeat_tables import RepeatReport, describe_gains, draw_gains
from gpfl.training.config import ConfigDict
from gpfl.training.run_dir import make_empty_folder

ALONE = "local"
METHODS = (ALONE, "fedavg", "fedavg-ft", "fedper", "ditto", "gpfl")
REPEATS = 10
SETTING: ConfigDict = {
    "data": {"name": "digits"},
    "partition": {"name": "pathological", "clients": 50, "classes_per_client": 5, "test_fraction": 0.4},
    "net": {"name": "mlp", "hidden": [64]},
    "train": {"rounds": 40, "batch_size": 5, "lr": 0.05},
}
YOUR_DATA = "--data visits.csv --client hospital --label outcome"
NEXT_COMMANDS = {
    "should these clients federate?": f"advise {YOUR_DATA}",
    "these tables": f"compare {YOUR_DATA} --methods {','.join(METHODS)} --repeats {REPEATS}",
    "a model for each client": f"run {YOUR_DATA} --method fedavg-ft --out runs/visits",
}
"""What to do next with a table of one's own, and the commands that do it."""


@click.command(cls=Command)
@out_option("Folder for the results; an interrupted quickstart in it is resumed.")
def quickstart(out: Path | None) -> None:
    """Compare training alone with federated methods, in a minute.

    Trains each client alone, one global model, and personalised models, on ten repeated splits of the digits; prints the
    differences with intervals.
    """
    folder = new_folder(out, Path("runs") / "quickstart")
    if not any((folder / name / REPEATS_FILE).is_file() for name in METHODS):
        make_empty_folder(folder)
    print_line(
        "1,797 handwritten digits on 50 clients; each has 5 of the 10 classes, most have about 15 samples to train on. local "
        "trains each client alone, fedavg one model for all, and fedavg-ft, fedper, ditto and gpfl a model for each client."
    )
    with (
        interruptible(lambda: same_command(*() if out else ("--out", str(folder)))),
        RepeatsReporter(console, REPEATS) as reporter,
    ):
        results = run_repeats(SETTING, parse_methods(",".join(METHODS)), REPEATS, folder, reporter.callback)
    report = RepeatReport(results)
    gains = report.differences_from(ALONE)
    sentence = describe_gains(gains, report.metric, "training alone")
    print_line(report.title)
    for table in (report.method_table(), report.difference_table(ALONE)):
        table_console().print(table, "")
    figure = folder / "gains.png"
    draw_gains(results, gains, figure, "Digits, 50 clients with 5 classes each", "accuracy gained over training alone, points")
    paths = report.save(folder, [sentence])
    print_line(f"All pairs: {paths[0]}. Figure: {figure}")
    print_line(sentence)
    print_line("The same with your own table, here visits.csv with columns that name client and label:")
    for purpose, command in NEXT_COMMANDS.items():
        print_line(f"  {program()} {command}  # {purpose}")
