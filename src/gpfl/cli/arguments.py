"""Arguments of the command with their words, which typer loses under click 8.5: click sets them to nothing after typer."""

from __future__ import annotations

import typing

import click
from typer.core import TyperArgument
from typer.models import ArgumentInfo


def argument(name: str, words: str, *, metavar: str, required: bool = False, several: bool = False) -> TyperArgument:
    """Gives an argument of a command that is made by hand."""
    out = TyperArgument(param_decls=[name], required=required, nargs=-1 if several else 1, metavar=metavar, help=words)
    out.help = words
    return out


def say_arguments(command: click.Command) -> None:
    """Gives the arguments of a command, and of those below it, the words that stand with them in their functions."""
    for below in getattr(command, "commands", {}).values():
        say_arguments(below)
    hints = typing.get_type_hints(command.callback, include_extras=True) if command.callback else {}
    for parameter in command.params:
        if isinstance(parameter, TyperArgument) and not parameter.help:
            parts = getattr(hints.get(parameter.name or ""), "__metadata__", ())
            parameter.help = next((part.help for part in parts if isinstance(part, ArgumentInfo)), None)
