from __future__ import annotations

import re

import click
import pytest

from gpfl.cli import options
from gpfl.cli.command import name_flags
from gpfl.cli.overrides import merge, parse_set
from gpfl.core.options import options_of
from gpfl.errors import GpflError
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import ConfigDict, TrainOptions, resolve_config


def config_params(**settings: tuple[str, ...]) -> list[click.Parameter]:
    """The flags of every option of a config."""
    return click.command(options.config_options(*options.RECORDS, **settings)(lambda **values: None)).params


def test_every_option_has_one_flag() -> None:
    params = config_params()
    names = [name for param in params for name in (*param.opts, *param.secondary_opts)]
    assert len(names) == len(set(names))
    keys = {
        f"{section}__{key}"
        for section, records in options.RECORDS.items()
        for record in records.values()
        for key in options_of(record)
    }
    assert {param.name for param in params if isinstance(param, options.ConfigOption)} == keys


def test_help_of_an_option_has_its_description_symbol_range_and_default() -> None:
    flag, described = options.help_record("method", "lam", METHODS["ditto"], 0.1)
    assert flag == "--lam X"
    assert re.fullmatch(r"λ: .+  \[typical: 0.01 to 2; default: 0.1\]", described)
    assert options.help_record("net", "channels", NETS["cnn4"], (32, 64))[1].endswith("[default: 32,64]")
    flag, described = options.help_record("train", "shuffle", TrainOptions, True)
    assert flag == "--[no-]shuffle"
    assert described.endswith("[default: on]")


def test_an_option_of_two_sections_is_named_after_its_own_except_in_run() -> None:
    assert (options.flag_name("run", "seed"), options.flag_name("partition", "seed")) == ("--seed", "--partition-seed")
    assert options.flag_name("train", "batch_size") == "--batch-size"


def test_flags_of_lists_may_be_given_several_times() -> None:
    several = {param.name for param in config_params() if isinstance(param, click.Option) and param.multiple}
    assert {"data__ignore", "method__without", "net__hidden"} <= several
    assert "train__lr" not in several
    given = options.parse_options(
        {"data__ignore": ("a,b", '"c, d"', "2024"), "net__hidden": ("64", "32,16"), "method__without": ()}
    )
    assert given == {"data": {"ignore": ["a", "b", "c, d", "2024"]}, "net": {"hidden": [64, 32, 16]}}
    assert options.parse_options({"net__hidden": ("64",)}) == {"net": {"hidden": 64}}, "one number may be one width"


def test_flags_of_the_run_can_be_left_out() -> None:
    names = {param.name for param in config_params(omit=("run.seed",))}
    assert "run__seed" not in names
    assert "partition__seed" in names


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("train__rounds", "3", 3),
        ("train__lr", "1e-3", 1e-3),
        ("train__lr", ".05", 0.05),
        ("train__lr", "fast", "fast"),
        ("train__client_fraction", "0.5,1", [0.5, 1]),
        ("train__client_fraction", "[.5, 1]", [0.5, 1]),
        ("train__client_fraction", "0.5", 0.5),
        ("net__hidden", "64,32", [64, 32]),
        ("net__hidden", "64", 64),
        ("run__device", "0", "0"),
        ("run__protocol", "paper", "paper"),
        ("train__shuffle", False, False),
    ],
)
def test_a_flags_text_becomes_a_value_of_its_options_kind(name: str, text: object, value: object) -> None:
    section, key = name.split("__")
    read = options.parse_options({name: text})[section][key]
    assert (read, type(read)) == (value, type(value))


def test_flags_that_were_not_set_give_nothing() -> None:
    assert options.parse_options({"train__lr": None, "train__rounds": "3", "out": "folder"}) == {"train": {"rounds": 3}}


def test_a_flag_with_a_wrong_value_is_refused_by_its_option() -> None:
    with pytest.raises(GpflError, match=r"train\.rounds is 'many'; it must be an integer"):
        resolve_config(options.parse_options({"train__rounds": "many"}))


def test_set_gives_any_option_of_any_section() -> None:
    given = parse_set(("method.lam=0.1", "train.join = [0.5, 1]", "run.protocol=paper", "data.name=a=b"))
    assert given == {"method": {"lam": 0.1}, "train": {"join": [0.5, 1]}, "run": {"protocol": "paper"}, "data": {"name": "a=b"}}


@pytest.mark.parametrize("text", ["method.lam", "lam=1", "method.=1"])
def test_set_without_section_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(GpflError, match=r"is not of the form section\.key=value"):
        parse_set((text,))


def test_later_layers_lie_on_top_and_leave_the_lower_ones_alone() -> None:
    file: ConfigDict = {"train": {"rounds": 3, "lr": 0.1}, "method": {"name": "gpfl", "lam": 1.0}}
    assert merge(file, {"train": {"lr": 0.2}}, {"method": {"mu": 0.0}}) == {
        "train": {"rounds": 3, "lr": 0.2},
        "method": {"name": "gpfl", "lam": 1.0, "mu": 0.0},
    }
    assert file["train"] == {"rounds": 3, "lr": 0.1}


def test_a_new_name_drops_the_options_of_the_old_one() -> None:
    file: ConfigDict = {"method": {"name": "gpfl", "lam": 1.0}}
    assert merge(file, {"method": {"name": "fedavg"}}) == {"method": {"name": "fedavg"}}
    assert merge(file, {"method": {"name": "gpfl"}}) == file


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("train.lr is -1; it must be above 0", "train.lr (--lr) is -1; it must be above 0"),
        ("partition.seed is -1", "partition.seed (--partition-seed) is -1"),
        ("partition.beta belongs to partition dirichlet", "partition.beta (--beta) belongs to partition dirichlet"),
        ("unknown key 'train.lr' is here", "unknown key 'train.lr' is here"),
        ("--set train.lr is not of the form", "--set train.lr is not of the form"),
        ("runs/train.lr is missing", "runs/train.lr is missing"),
        ("run.toml is not a TOML file", "run.toml is not a TOML file"),
        ("method.lam is -1", "method.lam is -1"),
    ],
)
def test_a_message_about_an_option_names_its_flag(text: str, wanted: str) -> None:
    flags = {"train.lr": "--lr", "partition.seed": "--partition-seed", "partition.beta": "--beta"}
    assert name_flags(text, flags) == wanted
