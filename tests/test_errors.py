"""Words that messages share."""

from __future__ import annotations

import pytest

from gpfl.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "words"),
    [("GPFL", "did you mean 'gpfl'?"), ("Fedavg", "did you mean 'FedAvg'?"), ("xyz", "known: FedAvg, gpfl")],
)
def test_known_name_is_meant_in_whatever_case(name: str, words: str) -> None:
    assert did_you_mean(name, ["gpfl", "FedAvg"]) == words
