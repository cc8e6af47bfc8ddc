"""The command `gpfl data`: get, list and show data sets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from typer.core import TyperCommand, TyperOption

from gpfl import config as configs
from gpfl import flags
from gpfl.data import DATA, PUBLISHED, cache
from gpfl.data.table import PARTS
from gpfl.errors import GpflError, did_you_mean
from gpfl.partition import SPLITS
from gpfl.report import figures, tables

data_app = typer.Typer(name="data", help="Get, list and show data sets.", no_args_is_help=True)
console = Console()


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
    if name in DATA and name not in PUBLISHED:
        say(f"{name} is inside a package that gpfl needs: nothing to get.")
        return
    if name not in PUBLISHED:
        raise GpflError(f"unknown data '{name}'; {did_you_mean(name, PUBLISHED)}")
    if source is not None and not source.exists():
        raise GpflError(f"--from {source} does not exist")
    with Downloads() as downloads:
        table = PUBLISHED[name].get(source, unverified=unverified, again=again, tell=downloads.tell)
    checked = "" if table.origin.get("verified", True) else " from files whose checksum is not the published one"
    say(f"{name}: {len(table):,} rows of shape {table.shape}, {table.classes} classes{checked}, in {cache.table_folder(name)}")


@data_app.command("list")
def list_() -> None:
    """List data sets: what is here, what would be downloaded, licences."""
    table = RichTable("name", "what", "here", "download", "licence")
    for name, source in DATA.items():
        if name in PUBLISHED:
            published = PUBLISHED[name]
            here = "parsed" if cache.has(name) else "files" if published.find(None) else "no"
            table.add_row(name, source.doc, here, tables.size(published.size), published.licence)
        else:
            table.add_row(name, source.doc, "yes", "none", "CC BY 4.0")
    (console if console.is_terminal else Console(width=160)).print(table)


def show(federation: str | None, out: str, **values: object) -> None:
    """Print each client's rows and draw the picture of classes on clients."""
    given = flags.given_by_flags(values)
    if federation is not None:
        given["split"] = {"name": "manifest", "file": federation}
    divided = configs.resolve(given).federation()
    if divided.table.words:
        say(divided.table.words)
    say(repr(divided))
    table = RichTable("client", "training", "validation", "test", "classes")
    for number, shard in enumerate(divided.shards):
        held = int((divided.label_counts[number] > 0).sum())
        table.add_row(escape(shard.name), *(str(len(shard.part(part))) for part in PARTS), str(held))
    (console if console.is_terminal else Console(width=160)).print(table)
    for oddity in divided.oddities():
        say(oddity)
    figures.draw_bubbles(divided, Path(out))
    say(f"Picture: {out}")


def show_command() -> click.Command:
    """Gives the command `data show`, whose flags are those of splits."""
    params: list[click.Parameter] = [
        flags.name_flag("data", (*DATA, "or a file or folder of your own"), flags.PANELS["data"]),
        flags.name_flag("split", SPLITS, flags.PANELS["split"]),
        TyperOption(
            param_decls=["--federation", "federation"],
            metavar="FILE",
            help="Show the division of a saved manifest.",
            rich_help_panel=flags.PANELS["split"],
        ),
        TyperOption(
            param_decls=["--out", "out"],
            default="federation.png",
            show_default=True,
            metavar="FILE",
            help="The picture: png, pdf or svg.",
        ),
        *flags.config_flags(("data", "split")),
    ]
    return TyperCommand("show", callback=show, params=params, help=show.__doc__, rich_markup_mode="rich")


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


def say(text: str) -> None:
    """Prints a line as it is."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
