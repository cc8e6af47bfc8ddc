"""The command `gpfl methods`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Command, assert_error

from gpfl.cli.options import flag_name
from gpfl.core.options import options_of
from gpfl.methods import METHODS

ROOT = Path(__file__).parents[2]
TRAFFIC = {"gpfl": "5,807,872", "fedper": "3,493,632", "fedrep": "3,493,632", "fedproto": "205,200", "local": "0"}


def test_methods_lists_every_method_with_its_summary(command: Command) -> None:
    text = " ".join(command("methods").out.split())
    for name, method in METHODS.items():
        assert f"{name} {(method.__doc__ or '').splitlines()[0]}" in text


@pytest.mark.parametrize("name", METHODS)
def test_show_explains_summary_paper_formula_options_state_page_and_command(command: Command, name: str) -> None:
    result = command("methods", "show", name)
    assert result.code == 0, result.err
    lines, text = result.out.splitlines(), " ".join(result.out.split())
    assert max(map(len, lines)) <= 80
    assert text.startswith((METHODS[name].__doc__ or "").splitlines()[0])
    assert name == "local" or re.search(r" et al\., .+ 20\d\d| and .+ 20\d\d", text), "no paper"
    assert re.search(r"^    (L|v|v_i|w|w'|θ_i|ψ_i) (=|←) ", result.out, re.M), "no formula"
    for key, option in options_of(METHODS[name]).items():
        flag = flag_name("method", key).removeprefix("--")
        assert re.search(rf"^  --(\[no-\])?{flag} ", result.out, re.M)
        assert option.help[1:].split()[0] in text
        assert not option.symbol or f"{option.symbol}: " in text
    assert f"Traffic {TRAFFIC.get(name, '3,698,832')} bytes" in text
    assert "Shared " in text
    assert "Private " in text
    assert f"docs/methods/{name}.md" in text
    assert (ROOT / "docs" / "methods" / f"{name}.md").is_file()
    assert f"gpfl run --method {name}" in text


def test_show_says_what_gpfl_shares_and_keeps_private(command: Command) -> None:
    text = " ".join(command("methods", "show", "gpfl").out.split())
    assert "Shared base (feature extractor); cov (conditional valve); gce (category embeddings)" in text
    assert "Private head (classifier)" in text
    assert "default: 0.01, but resnet18 0.0001, fasttext 0.0001" in text


def test_show_of_an_unknown_method_suggests_one(command: Command) -> None:
    assert_error(command("methods", "show", "dito"), "unknown method 'dito'; did you mean 'ditto'?")
