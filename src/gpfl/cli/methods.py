"""The command `gpfl methods`: list the methods, or explain one."""

from __future__ import annotations

import inspect
import textwrap

import click

from gpfl.cli.command import CONTEXT_SETTINGS, Argument, Command, write_groups
from gpfl.cli.options import describe_option, flag_with_metavar
from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.core.options import BY_NET, options_of
from gpfl.errors import GpflError, did_you_mean
from gpfl.methods import METHODS
from gpfl.models import MLP, net_from_architecture


@click.group(invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@click.pass_context
def methods(ctx: click.Context) -> None:
    """List the methods, or explain one."""
    if ctx.invoked_subcommand is None:
        formatter = ctx.make_formatter()
        summaries = [(name, inspect.getdoc(method).splitlines()[0]) for name, method in METHODS.items()]
        write_groups(formatter, {"Methods": summaries})
        click.echo(formatter.getvalue(), nl=False)
        click.echo("\nOne of them in detail: gpfl methods show NAME")


@methods.command(cls=Command)
@click.argument("name", cls=Argument, metavar="NAME", help=f"One of {', '.join(METHODS)}.")
@click.pass_context
def show(ctx: click.Context, name: str) -> None:
    """Explain a method: paper, formulas, options, what clients share, and how to run it."""
    if name not in METHODS:
        raise GpflError(f"unknown method '{name}'; {did_you_mean(name, METHODS)}")
    method = METHODS[name]
