"""The command `gpfl methods`: list the methods, or explain one."""

from __future__ import annotations

import click

from gpfl.cli.command import CONTEXT_SETTINGS, Argument, Command
from gpfl.cli.terminal import print_line
from gpfl.errors import GpflError, did_you_mean
from gpfl.methods import METHODS


@click.group(invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@click.pass_context
def methods(ctx: click.Context) -> None:
    """List the methods, or explain one."""
    if ctx.invoked_subcommand is None:
        for name, method in METHODS.items():
            print_line(f"{name:<12}{(method.__doc__ or '').splitlines()[0]}")


@methods.command(cls=Command)
@click.argument("name", cls=Argument, metavar="NAME", help=f"One of {', '.join(METHODS)}.")
def show(name: str) -> None:
    """Explain a method: paper, objective, options, what clients share, and how to run it."""
    if name not in METHODS:
        raise GpflError(f"unknown method '{name}'; {did_you_mean(name, METHODS)}")
