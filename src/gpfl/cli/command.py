"""The click classes of all commands: options in groups, and flags named in error messages."""

import re
from collections.abc import Mapping
from typing import Any

import click

from gpfl.cli.interrupt import StoppedError
from gpfl.errors import GpflError

CONTEXT_SETTINGS = {"max_content_width": 100, "help_option_names": ["-h", "--help"]}
OPTION = re.compile(r"(?<!--set )(?<![\w./'-])[a-z]+\.[a-z_]+(?= (?:is|belongs|cannot|=) )")
"""A config option that an error message is about, such as train.lr in "train.lr is -1"."""


class Argument(click.Argument):
    """A positional argument with a help text, which click itself has from 8.5 on."""

    def __init__(self, *names: Any, help: str, metavar: str, **settings: Any) -> None:
        super().__init__(*names, metavar=metavar, **settings)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the name and the help text."""
        return self.metavar or "", self.help or ""


class Command(click.Command):
    """A command that lists its options in groups and names the flag of a config option in error messages.

    `flags` adds config options whose flags the command defines itself, such as {"train.rounds": "--rounds"}.
    """

    def __init__(self, *names: Any, flags: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*names, **{"context_settings": CONTEXT_SETTINGS, **settings})
        named = {(param.name or "").replace("__", ".", 1): param.opts[0] for param in self.params}
        self.flags = {option: flag for option, flag in named.items() if "." in option} | dict(flags or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and keep them for a help that depends on them."""
        ctx.meta["gpfl.arguments"] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except GpflError as error:
            raise GpflError(name_flags(str(error), self.flags)) from error
        except KeyboardInterrupt:
            raise StoppedError from None

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: arguments are a group of `format_options`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the arguments and options in groups."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            usual = "Arguments" if isinstance(param, click.Argument) else "Options"
            if record := param.get_help_record(ctx):
                record = (re.sub(r"^--(\S+) / --no-\1", r"--[no-]\1", record[0]), record[1])
                groups.setdefault(getattr(param, "group", usual), []).append(record)
        write_groups(formatter, groups)


class Group(click.Group):
    """A group of commands, listed with their first sentences."""

    command_class = Command

    def __init__(self, *names: Any, **settings: Any) -> None:
        super().__init__(*names, **{"context_settings": CONTEXT_SETTINGS, **settings})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options and the commands."""
        options = [record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))]
        write_groups(formatter, {"Options": options, "Commands": list(self.summaries(ctx).items())})

    def summaries(self, ctx: click.Context) -> dict[str, str]:
        """Return the first sentence of each command."""
        return {name: command.get_short_help_str(limit=200) for name, command in self.commands.items()}


def write_groups(formatter: click.HelpFormatter, groups: dict[str, list[tuple[str, str]]]) -> None:
    """Write one section of the help for each group of (flag, help) pairs."""
    for group, records in groups.items():
        with formatter.section(click.style(group, bold=True)):
            formatter.write_dl([(click.style(flag, fg="cyan"), text) for flag, text in records])


def name_flags(message: str, flags: Mapping[str, str]) -> str:
    """Return a message with the flag of each config option it is about: "train.lr (--lr) is -1"."""

    def with_flag(match: re.Match[str]) -> str:
        return f"{match[0]} ({flags[match[0]]})" if match[0] in flags else match[0]

    return OPTION.sub(with_flag, message)
