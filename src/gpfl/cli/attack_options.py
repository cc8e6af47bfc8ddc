"""What the commands that attack share: a flag for each option of an `AttackPlan`, and the lines they print."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Collection
from typing import Any

import click
import torch

from gpfl.cli.options import CommaList, Decorator, Function, compose
from gpfl.cli.terminal import print_line
from gpfl.core.options import options_of
from gpfl.privacy.attack_cases import AttackCase, AttackPlan
from gpfl.privacy.attack_runner import CaseResult
from gpfl.privacy.case_summary import summarize_case
from gpfl.privacy.reconstruction import AttackConfig
from gpfl.report.privacy_tables import describe_summary


def attack_options(defaults: AttackPlan, *, seed_flag: str = "--attack-seed", omit: Collection[str] = ()) -> Decorator:
    """Add a flag for each option of `AttackPlan`; the command gets the plan as `plan`."""
    options = sorted(options_of(AttackPlan), key=options_of(AttackConfig).__contains__)  # what is attacked, then the effort
    names = [name for name in options if name not in omit]
    flags = {name: seed_flag if name == "seed" else f"--{name}" for name in names}

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            plan = {name: values.pop(f"attack_{name}") for name in names}
            function(plan=dataclasses.replace(defaults, **plan), **values)

        return compose(*(_plan_option(name, flag, getattr(defaults, name)) for name, flag in flags.items()))(command)

    return decorate


def _plan_option(name: str, flag: str, default: Any) -> Decorator:
    described, hint = options_of(AttackPlan)[name], typing.get_type_hints(AttackPlan)[name]
    text = f"{described.help[0].upper()}{described.help[1:]}."
    add = functools.partial(click.option, flag, f"attack_{name}", default=default, help=text)
    if hint is bool:
        return add(is_flag=True)
    if hint is str:
        return add(type=click.Choice(described.choices), show_default=True)
    if hint is int:
        least, most = (None if limit is None else int(limit) for limit in (described.min, described.max))
        return add(type=click.IntRange(least, most), metavar="N", show_default=True)
    kind = typing.get_args(hint)[0]
    entries = CommaList(kind, described.choices, min=described.min or 0)
    return add(default=",".join(map(str, default)), type=entries, show_default=True)


def print_case(case: AttackCase, result: CaseResult, formula: str, prefix: str = "") -> None:
    """Print the outcome of a case."""
    print_line(prefix + describe_summary(summarize_case(case, result, formula)))


def print_graph_note(graph: bool, device: torch.device) -> None:
    """Print that --graph has no effect without a GPU."""
    if graph and device.type != "cuda":
        print_line(f"--graph is for a GPU; on {device} attacks run without it.")
