"""The command `gpfl methods`: list the methods, or explain one."""

import inspect
import re

import click
import torch

from gpfl.cli.command import Argument, Group, write_groups
from gpfl.cli.list import list_command
from gpfl.cli.options import default_of, flag_name, help_record
from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.core.options import options_of
from gpfl.core.tree import Tree
from gpfl.errors import GpflError, did_you_mean
from gpfl.methods import METHODS
from gpfl.models.architectures import CNN4, net_from_architecture

PARTS = {
    "base": "feature extractor",
    "head": "classifier",
    "cov": "conditional valve",
    "gce": "category embeddings",
    "prototypes": "mean feature of each class",
    "personal": "personal model",
    "personal_head": "personal classifier",
}
"""What the parts of a method's state are."""


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
def methods(ctx: click.Context) -> None:
    """List the methods, or explain one."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_command, kind="methods")
        click.echo("\nExplain one of them: gpfl methods show NAME")


@methods.command
@click.argument("name", cls=Argument, metavar="NAME", help=f"One of {', '.join(METHODS)}.")
@click.pass_context
def show(ctx: click.Context, name: str) -> None:
    """Explain a method: paper, formulas, options, shared and private state."""
    if name not in METHODS:
        raise GpflError(f"unknown method '{name}'; {did_you_mean(name, METHODS)}")
    method = METHODS[name]
    formatter = ctx.make_formatter()
    groups = {
        "Options": [help_record(flag_name("method", key), method, key, default_of(method, key)) for key in options_of(method)]
    }
    groups["State of a client"] = _state(method)
    groups["More"] = [("Documentation", f"docs/methods/{name}.md"), ("Run", f"gpfl run --method {name}")]
    text = re.sub(r"\n {2}(?! )", " ", inspect.getdoc(method) or "").replace("\n- ", "\n\n- ")
    formatter.write_text(re.sub(r"\n\n(?= {4})", "\n\n\b\n", text))  # \b: click keeps the lines of formulas
    write_groups(formatter, {group: records for group, records in groups.items() if records})
    click.echo(formatter.getvalue(), nl=False)


def _state(method: type[Method]) -> list[tuple[str, str]]:
    net = net_from_architecture(CNN4(), "cnn4", torch.zeros(2, 3, 32, 32), 100)
    shared, private = method().bind(net, lr=CNN4.lr, epochs=1).init(0)
    traffic = f"{tree.count_bytes(shared):,} bytes per round and direction (cnn4, 32×32 images, 100 classes)"
    return [("Shared", _describe(shared)), ("Private", _describe(private)), ("Traffic", traffic)]


def _describe(state: Tree) -> str:
    return "; ".join(f"{part} ({PARTS[part]})" if part in PARTS else part for part in state) or "nothing"
