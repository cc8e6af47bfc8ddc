"""The command `gpfl data`: get, list and show data sets."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import click
import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.table import Table as RichTable
from typer.core import TyperCommand, TyperOption

from gpfl.cli import flags
from gpfl.cli.terminal import console, print_dataset_caveat, print_line, table_console
from gpfl.data import DATASETS, PUBLISHED, PublishedDataset
from gpfl.data.published import cache
from gpfl.data.table import SPLITS
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation.partition import PARTITIONS
from gpfl.report import figures, plotting
from gpfl.report.tables import format_bytes
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict

data_app = typer.Typer(name="data", help="Get, list and show data sets.", no_args_is_help=True)


@data_app.command()
def get(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(PUBLISHED)}.", metavar="NAME")],
    source: Annotated[
        Path | None, typer.Option("--from", help="A file or folder that holds the published files.", metavar="PATH")
    ] = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Take local files whose checksum is not the published one; runs record it.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Parse the files anew.")] = False,
) -> None:
    """Download a data set from its publisher, or take files that are here, check them, and parse them once."""
    if name in DATASETS and name not in PUBLISHED:
        print_line(f"{name} is inside a package that gpfl needs: nothing to get.")
        return
    if name not in PUBLISHED:
        raise GpflError(f"unknown data '{name}'; {did_you_mean(name, PUBLISHED)}")
    if source is not None and not source.exists():
        raise GpflError(f"--from {source} does not exist")
    with Downloads() as downloads:
        table = PUBLISHED[name].prepare(source, unverified=unverified, again=again, progress=downloads.tell)
    print_line(f"{name}: {len(table):,} rows of shape {table.shape}, {table.classes} classes, in {cache.table_dir(name)}")
    print_dataset_caveat(table)


@data_app.command("list")
def list_() -> None:
    """List data sets: what is here, what would be downloaded, licences."""
    table = RichTable("name", "what", "here", Column("download", overflow="fold"), "licence")
    for name, source in DATASETS.items():
        if name in PUBLISHED:
            published = PUBLISHED[name]
            table.add_row(name, source.description, what_is_here(published), download_words(published), published.licence)
        else:
            table.add_row(name, source.description, "yes", "none", "CC BY 4.0")
    table_console().print(table)


def what_is_here(published: PublishedDataset) -> str:
    """Gives what this machine has of a data set, in words."""
    try:
        table = cache.load(published.name)
    except GpflError:
        return f"damaged: gpfl data get {published.name}"
    if table is None:
        return "files, not parsed yet" if published.find_files() else "no"
    of = f" of {published.n_samples:,}" if published.n_samples not in (0, len(table)) else ""
    return f"parsed, {len(table):,}{of} rows, {'verified' if table.metadata['verified'] is True else 'unverified'}"


def download_words(published: PublishedDataset) -> str:
    """Gives what would be downloaded, and from where."""
    hosts = ", ".join(dict.fromkeys(urlsplit(file.url).hostname or file.url for file in published.files))
    files = f"{len(published.files)} files, " if len(published.files) > 1 else ""
    return f"{files}{format_bytes(published.size)} from {hosts}"


def show(federation: str | None, out: str, **values: object) -> None:
    """Print each client's rows and draw the picture of classes on clients."""
    picture = Path(out)
    plotting.check_image_path(picture)
    given = flags.given_by_flags(values)
    if federation is not None:
        refuse_splits(given, federation)
        given["partition"] = {"name": "manifest", "file": federation}
    config = configs.resolve_config(given)
    if config.source is not None:  # said before the rows are divided, which may fail
        found = config.source.load()
        print_dataset_caveat(found)
        if found.description:
            print_line(found.description)
    divided = config.federation()
    print_line(repr(divided))
    table = RichTable("client", "training", "validation", "test", "classes")
    for number, shard in enumerate(divided.shards):
        held = int((divided.label_counts[number] > 0).sum())
        table.add_row(escape(shard.name), *(str(len(shard.split(part))) for part in SPLITS), str(held))
    table_console().print(table)
    for oddity in divided.data_warnings():
        print_line(oddity)
    figures.draw_bubbles(divided, picture)
    print_line(f"Picture: {out}")


def refuse_splits(given: ConfigDict, federation: str) -> None:
    """Refuses flags that would divide rows which a manifest divides."""
    for key in given.get("partition", {}):
        named = key in flags.keys_of("partition")
        flag = "--partition" if key == "name" else f"--{flags.flag_name('partition', key)}" if named else f"partition.{key}"
        raise GpflError(f"--federation {federation} says how the rows are divided: leave out {flag}")


def show_command() -> click.Command:
    """Gives the command `data show`, whose flags are those of partitions."""
    params: list[click.Parameter] = [
        flags.name_flag("data", (*DATASETS, "or a file or folder of your own"), flags.PANELS["data"]),
        flags.name_flag("partition", PARTITIONS, flags.PANELS["partition"]),
        TyperOption(
            param_decls=["--federation", "federation"],
            metavar="FILE",
            help="Show the division of a saved manifest.",
            rich_help_panel=flags.PANELS["partition"],
        ),
        TyperOption(
            param_decls=["--out", "out"],
            default="federation.png",
            show_default=True,
            metavar="FILE",
            help="The picture: png, pdf or svg.",
        ),
        *flags.config_flags(("data", "partition")),
    ]
    return TyperCommand("show", callback=show, params=params, help=show.__doc__, rich_markup_mode="rich")


def get_data(names: Iterable[str]) -> None:
    """Gets data that a command needs from their publishers."""
    with Downloads() as downloads:
        for name in names:
            PUBLISHED[name].prepare(progress=downloads.tell)


class Downloads:
    """Shows downloads: bars on a terminal, a line for each file elsewhere."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
        )

    def __enter__(self) -> Downloads:
        if console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if console.is_terminal:
            self._progress.stop()

    def tell(self, name: str, here: int, total: int) -> None:
        """Shows how much of a file is here."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total or None)
            if not console.is_terminal:
                print(f"downloading {name}", file=sys.stderr)
        self._progress.update(self._tasks[name], completed=here)
