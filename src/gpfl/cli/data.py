"""The command `gpfl data`: get, list and show data sets."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import click
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.table import Table as RichTable

from gpfl.cli.command import Argument, Group
from gpfl.cli.options import config_options, option, parse_options
from gpfl.cli.overrides import load_config
from gpfl.cli.terminal import console, print_dataset_caveat, print_line, table_console
from gpfl.data import DATASETS, PUBLISHED, PublishedDataset
from gpfl.data.published import cache
from gpfl.data.table import SPLITS
from gpfl.errors import GpflError, did_you_mean
from gpfl.report import figures, plotting
from gpfl.report.figures import ClassCounts
from gpfl.report.tables import format_bytes
from gpfl.training import config as configs


@click.group(cls=Group)
def data() -> None:
    """Download, list and show datasets."""


@data.command
@click.argument("name", cls=Argument, metavar="NAME", help=f"One of {', '.join(PUBLISHED)}.")
@click.option(
    "--from", "source", type=click.Path(path_type=Path), metavar="PATH", help="File or folder with the published files."
)
@click.option("--unverified", is_flag=True, help="Accept local files with another checksum; runs record this.")
@click.option("--again", is_flag=True, help="Parse the files again.")
def get(name: str, source: Path | None, unverified: bool, again: bool) -> None:
    """Download a dataset from its publisher, or take local files; check and parse them once."""
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


@data.command("list")
def list_datasets() -> None:
    """List datasets with their state on this machine, download size and licence."""
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


@data.command
@option("--out", default="federation.png", metavar="FILE", help="Picture to write: .png, .pdf or .svg.")
@config_options("data", "partition")
def show(out: str, federation: str | None, **values: object) -> None:
    """Print the number of samples of each client and draw which client has which classes."""
    picture = Path(out)
    plotting.check_image_path(picture)
    config = configs.resolve_config(load_config(None, parse_options(values), federation, "data show"))
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
    figures.draw_class_counts(ClassCounts.from_federation(divided), picture)
    print_line(f"Picture: {out}")


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
