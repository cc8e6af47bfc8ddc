"""The command `gpfl data`: download, list and show datasets."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.table import Table as RichTable

from gpfl.cli.command import Argument, Group
from gpfl.cli.options import config_options, option, parse_options
from gpfl.cli.overrides import load_config
from gpfl.cli.terminal import console, print_dataset_warning, print_line, table_console
from gpfl.core.local_round import Indices
from gpfl.data import DATASETS, PUBLISHED, PublishedDataset, find_dataset
from gpfl.data.profile import profile_data
from gpfl.data.published import cache
from gpfl.data.table import SPLITS, Table
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation import Federation
from gpfl.report import figures, plotting
from gpfl.report.figures import ClassCounts
from gpfl.report.profile_tables import profile_tables
from gpfl.report.tables import Cell, ResultColumn, ResultTable, format_bytes
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict


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
    """Download a dataset, or take local files, and parse them."""
    if name in DATASETS and name not in PUBLISHED:
        print_line(f"{name} is part of an installed package: nothing to download.")
        return
    if name not in PUBLISHED:
        raise GpflError(f"unknown data '{name}'; {did_you_mean(name, PUBLISHED)}")
    if source is not None and not source.exists():
        raise GpflError(f"--from {source} does not exist")
    with download_progress() as progress:
        table = PUBLISHED[name].prepare(source, unverified=unverified, again=again, progress=progress)
    print_line(f"{name}: {len(table):,} samples of shape {table.shape}, {table.classes} classes, in {cache.table_dir(name)}")
    print_dataset_warning(table)


@data.command("list")
def list_datasets() -> None:
    """List datasets with local copy, download size and licence."""
    table = RichTable("name", "description", "local copy", Column("download", overflow="fold"), "licence")
    for name, source in DATASETS.items():
        if name in PUBLISHED:
            published = PUBLISHED[name]
            table.add_row(name, source.description, _local_copy(published), _download(published), published.licence)
        else:
            table.add_row(name, source.description, "yes", "none", "CC BY 4.0")
    table_console().print(table)


def _local_copy(published: PublishedDataset) -> str:
    try:
        table = cache.load(published.name)
    except GpflError:
        return f"damaged: gpfl data get {published.name}"
    if table is None:
        return "files, not parsed yet" if published.find_files() else "no"
    total = f" of {published.n_samples:,}" if published.n_samples not in (0, len(table)) else ""
    return f"parsed, {len(table):,}{total} samples, {'verified' if table.metadata['verified'] is True else 'unverified'}"


def _download(published: PublishedDataset) -> str:
    hosts = ", ".join(dict.fromkeys(urlsplit(file.url).hostname or file.url for file in published.files))
    files = f"{len(published.files)} files, " if len(published.files) > 1 else ""
    return f"{files}{format_bytes(published.size)} from {hosts}"


@data.command
@click.argument("name", cls=Argument, metavar="[DATA]", required=False, help="Dataset, file or folder; the same as --data.")
@option("--out", default="federation.png", metavar="FILE", help="Figure to write: .png, .pdf or .svg.")
@click.option(
    "--write-schema",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the columns and classes, to edit for --schema.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON, and draw no figure.")
@config_options("data", "partition")
def show(name: str | None, out: str, write_schema: Path | None, as_json: bool, **flags: Any) -> None:
    """Print a profile of the columns, the samples of each client, and draw its classes.

    The profile of a table has the range or categories, the missing values and the drift of each column at each client.
    `gpfl data show --data visits.csv --help` also lists the options of a table, such as --client, --label and --missing.
    """
    figure = Path(out)
    plotting.check_image_path(figure)
    if name is not None and flags["data__name"] is not None:
        raise GpflError(f"both {name} and --data {flags['data__name']} name the data: leave one out")
    flags["data__name"] = flags["data__name"] or name
    settings = load_config(flags, parse_options(flags), "data show")
    try:
        config = configs.resolve_config(settings)
    except GpflError as error:
        if as_json or not _show_despite_missing_values(settings, write_schema) or write_schema is None:
            raise
        print_line(f"The samples of each client are not shown: {error}")
        return
    if as_json and write_schema is not None:
        raise GpflError("--json prints the profile alone: leave out --write-schema")
    if as_json:
        print_line(json.dumps(_to_json(config.federation()), ensure_ascii=False))
        return
    natural: dict[str, Indices] = {}
    if config.source is not None:  # before the samples are assigned to clients, which may fail
        source_table = config.source.load()
        print_dataset_warning(source_table)
        natural = natural_clients(source_table)
        if natural:
            _print_profile(source_table, natural)
        if source_table.description:
            print_line(source_table.description)
        if write_schema is not None:
            _write_schema(source_table, write_schema)
    loaded = config.federation()
    if not natural:
        _print_profile(loaded.table, {shard.name: shard.samples for shard in loaded.shards})
    print_line(repr(loaded))
    table_console().print(_split_table(loaded))
    for warning in loaded.data_warnings():
        print_line(warning)
    figures.draw_class_counts(ClassCounts.from_federation(loaded), figure)
    print_line(f"Figure: {out}")


def _split_table(federation: Federation) -> ResultTable:
    """Return the number of samples of each client in each split, and of its classes in training."""
    columns = [ResultColumn(name) for name in ("client", "training", "validation", "test", "classes")]
    rows: list[list[Cell]] = [
        [shard.name, *(len(shard.split(split)) for split in SPLITS), int((counts > 0).sum())]
        for shard, counts in zip(federation.shards, federation.label_counts, strict=True)
    ]
    return ResultTable(columns, rows, "Splits")


def _write_schema(table: Table, path: Path) -> None:
    if table.raw is None:
        raise GpflError(f"--write-schema {path}: data '{table.name}' has no columns, so there is no schema: leave it out")
    classes = table.metadata.get("classes")
    names = [str(name) for name in classes] if isinstance(classes, list) else []
    table.raw.draft_schema(str(table.metadata.get("label", "")), names).write(path)
    print_line(
        f"Schema: {path}. Its ranges are the smallest and largest values of the data: check them, then use --schema {path}"
    )


def natural_clients(table: Table) -> dict[str, Indices]:
    """Return the samples of each client that the data name."""
    if table.client_ids is None:
        return {}
    return {name: np.flatnonzero(table.client_ids == index) for index, name in enumerate(table.client_names)}


def _print_profile(table: Table, clients: Mapping[str, Indices]) -> None:
    if table.raw is not None and clients:
        for result in profile_tables(profile_data(table, clients)):
            table_console().print(result)


def _show_despite_missing_values(settings: ConfigDict, write_schema: Path | None) -> bool:
    """Print the profile of the user's files unless they have other errors than missing values or unreadable cells.

    Return whether they have none, so that the profile and the schema are there.
    """
    options = {**settings.get("data", {}), "missing": "mean", "missing_labels": "drop", "unreadable": "missing"}
    name = str(options.pop("name", ""))
    if name not in DATASETS:
        with suppress(GpflError):
            table = find_dataset(name, options).load()
            _print_profile(table, natural_clients(table))
            if write_schema is not None:
                _write_schema(table, write_schema)
            return True
    return False


def _to_json(federation: Federation) -> dict[str, object]:
    table = federation.table
    clients = natural_clients(table) or {shard.name: shard.samples for shard in federation.shards}
    return {
        "data": table.name,
        "description": table.description.splitlines(),
        **profile_data(table, clients).to_dict(),
        "splits": {shard.name: {split: len(shard.split(split)) for split in SPLITS} for shard in federation.shards},
        "warnings": federation.data_warnings(),
    }


def download_datasets(names: Iterable[str]) -> None:
    """Download published datasets that a command needs."""
    with download_progress() as progress:
        for name in names:
            PUBLISHED[name].prepare(progress=progress)


@contextmanager
def download_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows the progress of a file: a bar on a terminal, one line elsewhere."""
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total or None)
                if not console.is_terminal:
                    print(f"downloading {name}", file=sys.stderr)
            progress.update(tasks[name], completed=done)

        yield update
