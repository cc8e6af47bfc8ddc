"""The option groups that commands share."""

from __future__ import annotations

import re

import click
import pytest

from gpfl.cli import options
from gpfl.cli.command import name_flags
from gpfl.core.options import options_of
from gpfl.errors import GpflError
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import TrainOptions, resolve_config


def config_params(**settings: tuple[str, ...]) -> list[click.Parameter]:
    """Return the flags of every option of a config."""
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
    assert {param.name for param in params if isinstance(param, options.ConfigOption) and param.key != "name"} == keys


def test_help_of_an_option_has_its_description_symbol_range_and_default() -> None:
    flag, described = options.help_record("--lam", METHODS["ditto"], "lam", 0.1)
    assert flag == "--lam X"
    assert re.fullmatch(r"λ: .+  \[typical: 0.01 to 2; default: 0.1\]", described)
    assert options.help_record("--channels", NETS["cnn4"], "channels", (32, 64))[1].endswith("[default: 32,64]")
    flag, described = options.help_record("--shuffle", TrainOptions, "shuffle", True)
    assert flag == "--[no-]shuffle"
    assert described.endswith("[default: on]")


def test_of_two_options_with_one_name_the_later_section_has_a_prefix() -> None:
    assert (options.flag_name("run", "seed"), options.flag_name("partition", "seed")) == ("--seed", "--partition-seed")
    assert options.flag_name("train", "batch_size") == "--batch-size"
    assert options.flag_name("partition", "rng") == "--partition-rng"


def test_flags_of_lists_can_be_repeated() -> None:
    repeatable = {param.name for param in config_params() if isinstance(param, click.Option) and param.multiple}
    assert {"data__ignore", "method__without", "net__hidden"} <= repeatable
    assert "train__lr" not in repeatable
    config = options.parse_options(
        {"data__ignore": ("a,b", '"c, d"', "2024"), "net__hidden": ("64", "32,16"), "method__without": ()}
    )
    assert config == {"data": {"ignore": ["a", "b", "c, d", "2024"]}, "net": {"hidden": [64, 32, 16]}}
    assert options.parse_options({"net__hidden": ("64",)}) == {"net": {"hidden": 64}}


def test_options_can_be_omitted() -> None:
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
def test_the_text_of_a_flag_becomes_a_value_of_the_type_of_its_option(name: str, text: object, value: object) -> None:
    section, key = name.split("__")
    parsed = options.parse_options({name: text})[section][key]
    assert (parsed, type(parsed)) == (value, type(value))


def test_unset_flags_are_not_in_the_config() -> None:
    assert options.parse_options({"train__lr": None, "train__rounds": "3", "out": "folder"}) == {"train": {"rounds": 3}}


def test_a_wrong_value_is_an_error_of_its_option() -> None:
    with pytest.raises(GpflError, match=r"train\.rounds is 'many'; it must be an integer"):
        resolve_config(options.parse_options({"train__rounds": "many"}))


@pytest.mark.parametrize(
    ("message", "expected"),
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
def test_an_error_about_an_option_names_its_flag(message: str, expected: str) -> None:
    flags = {"train.lr": "--lr", "partition.seed": "--partition-seed", "partition.beta": "--beta"}
    assert name_flags(message, flags) == expected


@pytest.mark.parametrize(
    ("kind", "text", "values"),
    [
        (options.CommaList(int), "1, 4,1", (1, 4)),
        (options.CommaList(float), "0.5,1", (0.5, 1.0)),
        (options.CommaList(str, ("a", "b")), "b,a", ("b", "a")),
    ],
)
def test_a_list_has_each_entry_once(kind: options.CommaList, text: str, values: tuple[object, ...]) -> None:
    assert kind.convert(text, None, None) == values


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (options.CommaList(int), "1,x", "must be integers separated by commas"),
        (options.CommaList(float), "nan", "each number must be at least 0"),
        (options.CommaList(int, max=8), "9", "each number must be at least 0 and at most 8"),
        (options.CommaList(int, unique=True), "1,1", "give each only once"),
        (options.CommaList(str, ("gpfl", "ditto")), "dito", "did you mean 'ditto'"),
    ],
)
def test_a_wrong_list_is_an_error(kind: options.CommaList, text: str, message: str) -> None:
    with pytest.raises(GpflError, match=f"'{text}'.*{message}"):
        kind.convert(text, None, None)
