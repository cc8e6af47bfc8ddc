from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from gpfl.core import options
from gpfl.core.options import option
from gpfl.errors import GpflError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Recipe:
    rate: float = option(0.5, "a rate", above=0.0, max=2.0)
    count: int = option(3, "a count", min=1)
    order: str = option("sum", "an order", choices=("sum", "mean"))
    widths: tuple[int, ...] = option((4,), "widths", min=1)
    pair: float | tuple[float, float] = option(1.0, "a share or a range", above=0.0, max=1.0)
    free: float = option(0.0, "any number")
    seed: int = option(0, "a seed", min=0, max=2**32 - 1)
    loud: bool = option(False, "a switch")
    inner: int = 7


def test_build_fills_in_defaults() -> None:
    assert options.build(Recipe, {"rate": 1, "widths": [2, 3], "pair": [0.5, 1]}, "r") == Recipe(
        rate=1.0, widths=(2, 3), pair=(0.5, 1.0)
    )


def test_integer_becomes_a_float_option() -> None:
    assert isinstance(options.build(Recipe, {"rate": 2}, "r").rate, float)


def test_numpy_numbers_become_pythons_own() -> None:
    made = options.build(
        Recipe,
        {"rate": np.float32(0.5), "count": np.int64(2), "widths": [np.uint8(3)], "pair": (np.float64(0.5), np.int32(1))},
        "r",
    )
    assert made == Recipe(rate=0.5, count=2, widths=(3,), pair=(0.5, 1.0))
    assert [type(value) for value in (made.rate, made.count, made.widths[0])] == [float, int, int]
    assert options.build(Recipe, {"rate": np.int64(1)}, "r").rate == 1.0


def test_single_number_becomes_a_list_of_one() -> None:
    assert options.build(Recipe, {"widths": 8}, "r").widths == (8,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": -1.0}, "r.rate is -1.0; it must be above 0 and at most 2"),
        ({"rate": math.nan}, "r.rate is nan"),
        ({"free": math.inf}, "r.free is inf; it must be a finite number"),
        ({"rate": np.float64(-1.0)}, "r.rate is -1.0; it must be above 0"),
        ({"count": np.int64(0)}, "r.count is 0; it must be at least 1"),
        ({"count": np.float64(2.0)}, "r.count is 2.0; it must be an integer"),
        ({"count": np.bool_(True)}, "it must be an integer"),
        ({"seed": 2**32}, "r.seed is 4294967296; it must be at least 0 and at most 4294967295"),
        ({"rate": True}, "r.rate is True; it must be a number"),
        ({"count": 0}, "r.count is 0; it must be at least 1"),
        ({"count": 1.5}, "r.count is 1.5; it must be an integer"),
        ({"count": True}, "r.count is True; it must be an integer"),
        ({"order": "man"}, "r.order is 'man'; it must be one of sum, mean; did you mean 'mean'?"),
        ({"order": 1}, "r.order is 1; it must be text"),
        ({"widths": [4, 0]}, "r.widths is [4, 0]; it must be at least 1"),
        ({"pair": [0.1, 0.2, 0.3]}, "it must be a number or a list of 2, each entry a number"),
        ({"pair": [0.0, 0.5]}, "it must be above 0 and at most 1"),
        ({"loud": 1}, "r.loud is 1; it must be true or false"),
        ({"cuont": 1}, "unknown key 'r.cuont'; did you mean 'count'?"),
    ],
)
def test_error_names_key_value_and_limit(values: dict[str, object], message: str) -> None:
    with pytest.raises(GpflError) as error:
        options.build(Recipe, values, "r")
    assert message in str(error.value)


def test_other_fields_are_not_options() -> None:
    assert "inner" not in options.option_values(Recipe())
    with pytest.raises(GpflError, match=r"unknown key 'r\.inner'"):
        options.build(Recipe, {"inner": 1}, "r")


def test_options_keep_the_order_of_declaration() -> None:
    assert list(options.options_of(Recipe)) == ["rate", "count", "order", "widths", "pair", "free", "seed", "loud"]


def test_unknown_key_of_a_record_without_options_raises() -> None:
    @dataclass(frozen=True)
    class Empty:
        pass

    with pytest.raises(GpflError, match="'method' has no options"):
        options.build(Empty, {"lam": 1}, "method")


def test_did_you_mean_lists_all_names_if_none_is_close() -> None:
    assert did_you_mean("fedavgg", ("gpfl", "fedavg")) == "did you mean 'fedavg'?"
    assert did_you_mean("xyz", ("gpfl", "fedavg")) == "known: fedavg, gpfl"
