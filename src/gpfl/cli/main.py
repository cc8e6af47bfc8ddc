"""The command `gpfl`: its subcommands, and how errors and Ctrl-C end it."""

import errno
import pkgutil
import sys
from typing import NoReturn

import click

import gpfl
from gpfl.cli.command import Group
from gpfl.cli.interrupt import StoppedError, exit_on_interrupt
from gpfl.errors import GpflError

COMMANDS = {
    "quickstart": ("gpfl.cli.quickstart:quickstart", "Compare training alone with federated methods, in a minute."),
    "run": ("gpfl.cli.run:run", "Train one method on one federation."),
    "resume": ("gpfl.cli.run:resume", "Resume an interrupted run or trials."),
    "compare": ("gpfl.cli.compare:compare", "Train several methods on one federation or on repeated splits."),
    "advise": ("gpfl.cli.advise:advise", "Say whether your clients should federate."),
    "predict": ("gpfl.cli.models:predict", "Predict classes and probabilities of new samples."),
    "evaluate": ("gpfl.cli.models:evaluate", "Evaluate models on new labelled samples."),
    "personalize": ("gpfl.cli.models:personalize", "Make a model for a client that was not in training."),
    "export": ("gpfl.cli.models:export", "Write a client's model for use without gpfl."),
    "deploy": ("gpfl.cli.deploy:deploy", "Train across machines, on Flower with TLS."),
    "tune": ("gpfl.cli.tune:tune", "Search hyperparameters on validation samples."),
    "methods": ("gpfl.cli.methods:methods", "List the methods, or explain one."),
    "data": ("gpfl.cli.data:data", "Download, list and show datasets."),
    "list": ("gpfl.cli.list:list_command", "List methods, datasets, partitions, networks and engines."),
    "attack": ("gpfl.cli.attack:attack", "Attack the uploads of a run."),
    "privacy": ("gpfl.cli.privacy:privacy", "Reproduce the paper's privacy table and measure defences."),
    "reproduce": ("gpfl.cli.reproduce:reproduce", "Reproduce the paper's tables and figures."),
}
"""Where each command is, and its line in `gpfl --help`. A command is imported when it is called, torch with it."""

PATH_ERRORS = {
    getattr(errno, name, 0) for name in ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "ENAMETOOLONG", "ENOTDIR", "ELOOP")
}
"""Errors of the file system that the user can fix, so they are reported without a traceback."""


class Commands(Group):
    """The group of all commands, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import a command."""
        if name not in COMMANDS:
            return None
        with exit_on_interrupt():
            command: click.Command = pkgutil.resolve_name(COMMANDS[name][0])
        return command

    def summaries(self, ctx: click.Context) -> dict[str, str]:
        """Return the first sentence of each command, importing none."""
        return {name: summary for name, (_, summary) in COMMANDS.items()}


@click.group(cls=Commands)
@click.version_option(gpfl.__version__, message="gpfl %(version)s")
def command() -> None:
    """Personalised federated learning: train a model for each client."""
    from gpfl.engine.allocator import retain_freed_memory

    retain_freed_memory()


def main() -> NoReturn:
    """Run the command; exit with 2 after a user's error, with 130 after Ctrl-C."""
    try:
        code = command.main(prog_name="gpfl", standalone_mode=False) or 0
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and later; its text is the help
            error.show()
            sys.exit(2)
        if isinstance(error, click.NoSuchOption):
            from gpfl.cli.options import suggest_set

            _fail(suggest_set(error) or error.format_message())
        _fail(error.format_message())
    except GpflError as error:
        _fail(str(error))
    except OSError as error:
        if error.errno not in PATH_ERRORS or error.filename is None:
            raise
        _fail(f"{error.filename}: {error.strerror}: choose another path, or fix this one")
    except StoppedError as interrupted:
        _fail(f"stopped; resume with: {interrupted}" if str(interrupted) else "stopped", 130)
    except click.Abort:
        _fail("stopped", 130)
    if "torch" in sys.modules:
        from gpfl.engine.distributed import exit_process

        exit_process(code)
    sys.exit(code)


def _fail(message: str, code: int = 2) -> NoReturn:
    from gpfl.cli.terminal import print_error

    print_error(message)
    sys.exit(code)
