"""The config of a command: file, flags and --set."""

from __future__ import annotations

import pytest

from gpfl.cli.overrides import merge, parse_set
from gpfl.errors import GpflError
from gpfl.training.config import ConfigDict


def test_set_sets_any_option_of_any_section() -> None:
    config = parse_set(("method.lam=0.1", "train.client_fraction = [0.5, 1]", "run.protocol=paper", "data.name=a=b"))
    assert config["method"] == {"lam": 0.1}
    assert config["train"] == {"client_fraction": [0.5, 1]}
    assert config["run"] == {"protocol": "paper"}
    assert config["data"] == {"name": "a=b"}


@pytest.mark.parametrize("text", ["method.lam", "lam=1", "method.=1"])
def test_set_without_section_key_or_value_is_an_error(text: str) -> None:
    with pytest.raises(GpflError, match=r"is not of the form section\.key=value"):
        parse_set((text,))


def test_later_layers_override_earlier_ones() -> None:
    file: ConfigDict = {"train": {"rounds": 3, "lr": 0.1}, "method": {"name": "gpfl", "lam": 1.0}}
    assert merge(file, {"train": {"lr": 0.2}}, {"method": {"mu": 0.0}}) == {
        "train": {"rounds": 3, "lr": 0.2},
        "method": {"name": "gpfl", "lam": 1.0, "mu": 0.0},
    }
    assert file["train"] == {"rounds": 3, "lr": 0.1}


def test_other_files_of_your_own_keep_the_options_of_the_data() -> None:
    own = {"data": {"name": "a.csv", "label": "outcome"}}
    assert merge(own, {"data": {"name": "b.csv"}}) == {"data": {"name": "b.csv", "label": "outcome"}}
    assert merge(own, {"data": {"name": "digits"}}) == {"data": {"name": "digits"}}


def test_a_new_name_drops_the_options_of_the_old_one() -> None:
    file: ConfigDict = {"method": {"name": "gpfl", "lam": 1.0}}
    assert merge(file, {"method": {"name": "fedavg"}}) == {"method": {"name": "fedavg"}}
    assert merge(file, {"method": {"name": "gpfl"}}) == file
