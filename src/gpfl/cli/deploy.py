"""The command `gpfl deploy`: federations across machines."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import click
from rich.table import Table as RichTable

from gpfl.cli.command import Group
from gpfl.cli.options import out_option
from gpfl.cli.terminal import print_line, table_console
from gpfl.deploy import demo as demos
from gpfl.errors import GpflError
from gpfl.methods import METHODS


@click.group(cls=Group)
def deploy() -> None:
    """Train across machines, on Flower with TLS."""


@deploy.command()
@click.option("--data", type=click.Choice(demos.DATA), default="digits", show_default=True, help="Data of the sites.")
@click.option(
    "--method", type=click.Choice(list(METHODS)), metavar="NAME", default="gpfl", show_default=True, help="Method of the run."
)
@click.option("--rounds", type=click.IntRange(1, 50), default=demos.ROUNDS, show_default=True, help="Rounds.")
@out_option("Folder to keep; the files of sites in it are used again, as they are  [default: a temporary one]")
def demo(data: str, method: str, rounds: int, out: Path | None) -> None:
    """Run a whole deployment on this machine, beside the simulation.

    Makes certificates, node keys and folders, starts a server and a pair of processes for each site, trains over TLS, and
    compares models and accuracies with the simulation of the same files, to which they must be equal.
    """
    require_flower()
    folder = out or Path(tempfile.mkdtemp(prefix="gpfl-"))
    try:
        with stopped_by_sigterm():
            result = demos.run_demo(data, folder, method=method, rounds=rounds, log=print_line)
    finally:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
    table = RichTable("site", "training samples", "test samples", "deployed", "simulated", "model")
    for site in result.sites:
        equal = "equal to the bit" if site.equal else "different"
        table.add_row(site.name, *map(str, site.samples), f"{site.deployed:.2%}", f"{site.simulated:.2%}", equal)
    table_console().print(table)
    if not result.equal:
        raise GpflError("the deployment differs from the simulation: run it again with --out and report the folder's logs")
    print_line(
        f"{method} on {data}: equal to the simulation. {result.seconds:.0f} s; rounds sent {result.bytes_up:,} bytes up and "
        f"{result.bytes_down:,} down."
    )
    if out is not None:
        print_line(f"Run: {folder / 'coordinator' / 'runs' / 'demo'}. Change a file in {folder / 'data'} and run it again.")


def require_flower() -> None:
    """Raise if Flower is not installed."""
    for name in ("flwr", "cryptography"):
        if find_spec(name) is None:
            raise GpflError(f"the package {name} is missing, which deployments need: pip install 'gpfl[flower]'")


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """On SIGTERM in the block, leave it as on Ctrl-C, so that processes it has started are stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
