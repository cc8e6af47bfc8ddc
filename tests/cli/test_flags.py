from __future__ import annotations

import pytest

from gpfl.cli import flags
from gpfl.core.options import options_of
from gpfl.errors import GpflError
from gpfl.training.config import ConfigDict, resolve_config


def test_every_option_has_one_flag_of_its_own() -> None:
    made = flags.config_flags()
    names = [name for flag in made for name in (*flag.opts, *flag.secondary_opts)]
    assert len(names) == len(set(names))
    options = {
        f"{section}__{key}" for section, kinds in flags.RECORDS.items() for kind in kinds.values() for key in options_of(kind)
    }
    assert {flag.name for flag in made} == options


def test_every_flag_is_explained_in_the_words_of_its_option() -> None:
    texts = {flag.name: flag.help or "" for flag in flags.config_flags()}
    for section, kinds in flags.RECORDS.items():
        for kind in kinds.values():
            assert all(described.help in texts[f"{section}__{key}"] for key, described in options_of(kind).items())


def test_an_option_of_two_sections_is_named_after_its_own_except_in_run() -> None:
    assert (flags.flag_name("run", "seed"), flags.flag_name("partition", "seed")) == ("seed", "partition-seed")
    assert flags.flag_name("train", "batch_size") == "batch-size"


def test_flags_of_lists_may_be_given_several_times() -> None:
    several = {flag.name for flag in flags.config_flags() if flag.multiple}
    assert {"data__ignore", "method__without", "net__hidden"} <= several
    assert "train__lr" not in several
    given = flags.given_by_flags(
        {"data__ignore": ("a,b", '"c, d"', "2024"), "net__hidden": ("64", "32,16"), "method__without": ()}
    )
    assert given == {"data": {"ignore": ["a", "b", "c, d", "2024"]}, "net": {"hidden": [64, 32, 16]}}
    assert flags.given_by_flags({"net__hidden": ("64",)}) == {"net": {"hidden": 64}}, "one number may be one width"


def test_flags_of_the_run_can_be_left_out() -> None:
    names = {flag.name for flag in flags.config_flags(omit=("seed",))}
    assert "run__seed" not in names
    assert "partition__seed" in names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "method__lam",
            "gpfl: λ, weight of the magnitude-level guidance (usual: 1e-4 to 0.1; default: by net: resnet18 0.0001",
        ),
        ("method__mu", "others 0.1"),
        ("train__lr", "default: by net: cnn4 0.005"),
        ("net__hidden", "cnn4: K, width of the features (default: 512)."),
        ("net__hidden", "mlp: widths of the hidden layers"),
        ("net__channels", "(default: 32,64)"),
        ("partition__clients", "N, number of clients (default: 20)"),
    ],
)
def test_help_gives_the_default_and_whose_option_it_is(name: str, words: str) -> None:
    texts = {flag.name: flag.help or "" for flag in flags.config_flags()}
    assert words in texts[name]


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
    read = flags.given_by_flags({name: text})[section][key]
    assert (read, type(read)) == (value, type(value))


def test_flags_that_were_not_set_give_nothing() -> None:
    assert flags.given_by_flags({"train__lr": None, "train__rounds": "3", "out": "folder"}) == {"train": {"rounds": 3}}


def test_a_flag_with_a_wrong_value_is_refused_by_its_option() -> None:
    with pytest.raises(GpflError, match=r"train\.rounds is 'many'; it must be an integer"):
        resolve_config(flags.given_by_flags({"train__rounds": "many"}))


def test_set_gives_any_option_of_any_section() -> None:
    given = flags.given_by_set(("method.lam=0.1", "train.client_fraction = [0.5, 1]", "run.protocol=paper", "data.name=a=b"))
    assert given == {
        "method": {"lam": 0.1},
        "train": {"client_fraction": [0.5, 1]},
        "run": {"protocol": "paper"},
        "data": {"name": "a=b"},
    }


@pytest.mark.parametrize("text", ["method.lam", "lam=1", "method.=1"])
def test_set_without_section_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(GpflError, match=r"is not of the form section\.key=value"):
        flags.given_by_set((text,))


def test_later_layers_lie_on_top_and_leave_the_lower_ones_alone() -> None:
    file: ConfigDict = {"train": {"rounds": 3, "lr": 0.1}, "method": {"name": "gpfl", "lam": 1.0}}
    assert flags.merge(file, {"train": {"lr": 0.2}}, {"method": {"mu": 0.0}}) == {
        "train": {"rounds": 3, "lr": 0.2},
        "method": {"name": "gpfl", "lam": 1.0, "mu": 0.0},
    }
    assert file["train"] == {"rounds": 3, "lr": 0.1}


def test_a_new_name_drops_the_options_of_the_old_one() -> None:
    file: ConfigDict = {"method": {"name": "gpfl", "lam": 1.0}}
    assert flags.merge(file, {"method": {"name": "fedavg"}}) == {"method": {"name": "fedavg"}}
    assert flags.merge(file, {"method": {"name": "gpfl"}}) == file


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("train.lr is -1; it must be above 0", "train.lr (--lr) is -1; it must be above 0"),
        ("partition.seed is -1", "partition.seed (--partition-seed) is -1"),
        ("partition.beta belongs to partition 'dirichlet'", "partition.beta (--beta) belongs to partition 'dirichlet'"),
        ("unknown key 'train.lr' is here", "unknown key 'train.lr' is here"),
        ("--set train.lr is not of the form", "--set train.lr is not of the form"),
        ("runs/train.lr is missing", "runs/train.lr is missing"),
        ("run.toml is not a TOML file", "run.toml is not a TOML file"),
        ("method.lam is -1", "method.lam is -1"),
    ],
)
def test_a_message_about_an_option_names_its_flag(text: str, wanted: str) -> None:
    assert flags.name_flags(text, ("run", "train", "partition", "net")) == wanted
    assert flags.name_flags("method.lam is -1", ("method",)) == "method.lam (--lam) is -1"
