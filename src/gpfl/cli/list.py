"""The command `gpfl list`."""

from __future__ import annotations

import click

from gpfl.cli.command import Argument, Command
from gpfl.cli.terminal import print_line
from gpfl.errors import GpflError, did_you_mean

KINDS = ("methods", "data", "partitions", "nets", "engines")


@click.command("list", cls=Command)
@click.argument(
    "kind", required=False, cls=Argument, metavar="[KIND]", help=f"One of {', '.join(KINDS)}. Without it, all are listed."
)
def list_command(kind: str | None) -> None:
    """List methods, datasets, partitions, networks and engines."""
    if kind and kind not in KINDS:
        raise GpflError(f"unknown list '{kind}'; {did_you_mean(kind, KINDS)}")
    for each in [kind] if kind else KINDS:
        print_line(each)
        for name, description in _entries(each).items():
            print_line(f"  {name:<14}{description}")


def _entries(kind: str) -> dict[str, str]:
    from gpfl.data import DATASETS
    from gpfl.engine import ENGINES
    from gpfl.federation.partition import PARTITIONS
    from gpfl.methods import METHODS
    from gpfl.models import NETS

    if kind == "data":
        return {name: source.description for name, source in DATASETS.items()}
    classes: dict[str, dict[str, type]] = {"methods": METHODS, "partitions": PARTITIONS, "nets": NETS, "engines": ENGINES}
    return {name: first_line(kind) for name, kind in classes[kind].items()}


def first_line(documented: type) -> str:
    """Return the first line of a class's docstring."""
    return (documented.__doc__ or "").strip().split("\n")[0]
