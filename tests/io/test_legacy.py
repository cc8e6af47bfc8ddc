"""Upgrades of files of version 1."""

from pathlib import Path

import pytest

from gpfl.errors import GpflError
from gpfl.io import legacy


def test_config_gets_the_current_sections_keys_and_values() -> None:
    old = {
        "split": {"name": "dirichlet", "of": 50, "test": 0.25, "validation": 0.1, "draws": "reference", "min_rows": 3},
        "train": {"join": 0.5, "rounds": 2},
        "data": {"name": "v.csv", "part": "fold", "together": "patient"},
        "method": {"name": "ditto", "own_epochs": 2},
    }
    partition = {"total_clients": 50, "test_fraction": 0.25, "validation_fraction": 0.1, "rng": "pfllib", "min_samples": 3}
    assert legacy.upgrade_config(old) == {
        "partition": {"name": "dirichlet", **partition},
        "train": {"client_fraction": 0.5, "rounds": 2},
        "data": {"name": "v.csv", "split_column": "fold", "group": "patient"},
        "method": {"name": "ditto", "personal_epochs": 2},
    }


def test_manifest_gets_the_current_keys() -> None:
    old = {"format": 1, "split": {"split": "natural", "min_rows": 3}, "source": {"client": "site", "part": "fold"}}
    upgraded = legacy.upgrade_manifest(old)
    assert upgraded["partition"] == {"name": "natural", "min_samples": 3}
    assert upgraded["source"] == {"client": "site", "split_column": "fold"}


def test_branches_of_states_are_renamed_and_names_of_tensors_are_not() -> None:
    old = {"private/own/stats/base/1.running_mean": 1, "shared/head/own": 2}
    assert legacy.upgrade_tensors(old) == {"private/personal/batch_norm_stats/base/1.running_mean": 1, "shared/head/own": 2}


def test_current_content_does_not_change() -> None:
    new = {"partition": {"name": "dirichlet", "rng": "pfllib", "total_clients": 5}, "data": {"group": "patient"}}
    assert legacy.upgrade_config(new) == new


@pytest.mark.parametrize("version", ["2", 0, True, 2.0])
def test_version_must_be_an_integer(version: object) -> None:
    with pytest.raises(GpflError, match="it must be an integer from 1 to 2"):
        legacy.read_version({"format_version": version}, Path("config.toml"))
