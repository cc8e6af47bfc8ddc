from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from gpfl.errors import GpflError
from gpfl.io import toml


def test_what_is_dumped_is_read_back_the_same() -> None:
    content = {
        "format": 1,
        "section": {"on": True, "rate": 1e-05, "big": 1e16, "name": 'a "quoted" \\ line\nwith é and \x7f', "list": [1, 2]},
        "empty": {},
        "none": [],
        "client": [{"name": "a", "rows": [0, 1]}, {"name": "b", "rows": []}],
    }
    assert tomllib.loads(toml.dump(content)) == content


def test_a_section_inside_a_section_stays_there() -> None:
    content = {"outer": {"value": 1, "inner": {"value": 2}}, "list": [{"inner": {"value": 3}}, {"value": 4}]}
    assert tomllib.loads(toml.dump(content)) == content


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    assert tomllib.loads(toml.dump({"rate": np.float64(0.1)})) == {"rate": 0.1}


def test_a_value_that_toml_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        toml.dump({"nothing": None})


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 1e-3), ("true", True), ("[0.5, 1]", [0.5, 1]), ('"3"', "3"), ("stale_local", "stale_local"), ("", "")],
)
def test_a_lone_value_is_read_as_toml_and_else_as_text(text: str, value: object) -> None:
    read = toml.parse_value(text)
    assert (read, type(read)) == (value, type(value))


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(GpflError, match=r"cannot read .*absent\.toml: No such file"):
        toml.read(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = \n")
    with pytest.raises(GpflError, match=r"broken\.toml is not a TOML file"):
        toml.read(broken)
    broken.write_bytes(b"a = '\xff'")
    with pytest.raises(GpflError, match=r"broken\.toml is not a TOML file"):
        toml.read(broken)
