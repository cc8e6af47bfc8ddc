"""Everything the documents show is executed."""

from __future__ import annotations

import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest

import gpfl
from gpfl.cli.main import command
from gpfl.cli.options import parse_options
from gpfl.cli.overrides import merge, parse_set
from gpfl.data import DATASETS
from gpfl.training import config as configs

ROOT = Path(__file__).parents[1]
WALKTHROUGH = ROOT / "docs" / "walkthrough.md"  # test_walkthrough.py executes its blocks in order
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(language: str) -> list[tuple[str, str]]:
    """Every code block of a language, with the page it stands on."""
    found = []
    for page in PAGES:
        for match in re.finditer(rf"^( *)```{language}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.S | re.M):
            found.append((str(page.relative_to(ROOT)), textwrap.dedent(match[2])))
    return found


def commands() -> list[str]:
    """Every gpfl command that a page shows."""
    lines = [line.split("#")[0].strip() for _, block in blocks("sh") for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith("gpfl ")})


@pytest.mark.parametrize(
    ("page", "code"),
    [(page, code) for page, code in blocks("python") if ROOT / page != WALKTHROUGH],
    ids=lambda value: value[:30],
)
def test_python_block_runs(page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec", dont_inherit=True), {"__name__": "block"})


@pytest.mark.parametrize("line", commands())
def test_command_is_one_that_parses(line: str) -> None:
    words = shlex.split(line)[1:]
    group = command
    name, sub, rest = group.resolve_command(group.make_context("gpfl", words, resilient_parsing=True), words)
    context = sub.make_context(name, list(rest))
    values = {key: value for key, value in context.params.items() if "__" in key}
    own = values.get("data__name") not in (None, *DATASETS)  # files that the reader has
    if name == "run" and not own and not context.params["config"] and not context.params["federation"]:
        configs.resolve_config(merge(parse_options(values), parse_set(context.params["assignments"])))


@pytest.mark.parametrize(("page", "text"), blocks("toml"), ids=lambda value: value[:30])
def test_config_block_resolves(page: str, text: str) -> None:
    configs.resolve_config(tomllib.loads(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_method_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in gpfl.methods.METHODS:
        assert f"docs/methods/{name}.md" in readme
