"""The command `gpfl list`."""

from typing import Any

import click

from gpfl.cli.command import Argument, Command, write_groups
from gpfl.core.registry import Registry
from gpfl.data import DATASETS
from gpfl.engine import ENGINES
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation import PARTITIONS
from gpfl.methods import METHODS
from gpfl.models import NETS

KINDS: dict[str, Registry[Any]] = {
    "methods": METHODS,
    "data": DATASETS,
    "partitions": PARTITIONS,
    "nets": NETS,
    "engines": ENGINES,
}


@click.command("list", cls=Command)
@click.argument(
    "kind", required=False, cls=Argument, metavar="[KIND]", help=f"One of {', '.join(KINDS)}. Without it, all are listed."
)
@click.pass_context
def list_command(ctx: click.Context, kind: str | None) -> None:
    """List methods, datasets, partitions, networks and engines."""
    if kind and kind not in KINDS:
        raise GpflError(f"unknown list '{kind}'; {did_you_mean(kind, KINDS)}")
    formatter = ctx.make_formatter()
    write_groups(formatter, {name: list(KINDS[name].summaries().items()) for name in ([kind] if kind else KINDS)})
    click.echo(formatter.getvalue().lstrip("\n"), nl=False)
