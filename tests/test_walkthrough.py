"""The blocks of docs/walkthrough.md, executed in order."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from user_files import write

from gpfl.data import PUBLISHED
from gpfl.data.published.heart import FILES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(sh|python|text)\n(.*?)^```", PAGE, re.S | re.M)
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))


def write_heart_files(folder: Path) -> None:
    """Write files in the published layout: 64 patients of each hospital, with missing values."""
    rng = np.random.default_rng(0)
    for _, name, _, _ in FILES:
        rows = []
        for i in range(64):
            sex, exang, fbs, restecg = rng.integers(0, [2, 2, 2, 3])
            age, trestbps, chol, thalach = rng.normal([54, 130, 245, 140], [9, 15, 40, 22]).round()
            cp, slope, ca, thal = rng.integers(1, 5), rng.integers(1, 4), rng.integers(0, 4), rng.choice([3, 6, 7])
            risk = (cp == 4) + 0.7 * exang + (age - 54) / 9 + rng.normal()
            cells = [age, sex, cp, trestbps, chol, fbs, restecg, thalach, exang, rng.integers(0, 40) / 10, slope, ca, thal]
            texts = ["?" if i % 4 == 1 and j in (4, 10, 11, 12) else f"{cell:g}" for j, cell in enumerate(cells)]
            rows.append(",".join([*texts, str(int(risk > 0.8) * (1 + i % 4))]))
        write(folder / name, "\n".join(rows) + "\n")


def run_page(folder: Path, *, rounds: int | None = None, repeats: int | None = None) -> Iterator[tuple[str, str]]:
    """Yield each shown output of the page with the real output of the commands before it.

    Args:
        folder: Where the reader works.
        rounds: Rounds of training; None: as on the page.
        repeats: Repeated splits; None: as on the page.

    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "160", "CUDA_VISIBLE_DEVICES": ""}
    output = ""
    for language, block in BLOCKS:
        if "onnx" in block and not HAS_ONNX:
            return  # exporting is the end of the page
        if language == "text":
            yield block, output
            continue
        if rounds is not None:
            block = re.sub(r"^(gpfl (?:advise|compare|run) .*)$", rf"\1 --rounds {rounds}", block, flags=re.M)
            block = re.sub(r"^(gpfl personalize .*)$", rf"\1 --rounds {rounds}", block, flags=re.M)
        if repeats is not None:
            block = re.sub(r" --repeats \d+", "", block)
            block = re.sub(r"^(gpfl (?:advise|compare) .*)$", rf"\1 --repeats {repeats}", block, flags=re.M)
        shell = ["bash", "-euo", "pipefail", "-c", block] if language == "sh" else [sys.executable, "-c", block]
        done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        output = done.stdout + done.stderr


def shown_lines(block: str) -> list[str]:
    """Return the lines of a shown output without those that stand for omitted ones."""
    return [line for line in block.splitlines() if line.strip() and "…" not in line]


def table_titles(block: str) -> list[str]:
    """Return the title lines of the tables in a shown output."""
    lines = block.splitlines()
    return [line for line, rule in itertools.pairwise(lines) if rule.startswith("────")]


def without_numbers(text: str) -> str:
    """Return a text without numbers and with single spaces: seconds differ between machines, and so do the last digits."""
    return " ".join(re.sub(r"[+−-]?\d[\d.,]*", "#", text).split())


def files_of_the_page() -> set[str]:
    """Return the paths of files that the text of the page names as results."""
    text = re.sub(r"^```.*?^```", "", PAGE, flags=re.S | re.M)
    return set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:csv|html|json|toml|safetensors|onnx|md|py|jsonl))`", text))


def test_the_page_has_all_steps() -> None:
    shell = "".join(block for language, block in BLOCKS if language == "sh")
    for name in ("data get", "data show", "advise", "compare", "run", "evaluate", "predict", "personalize", "export"):
        assert f"gpfl {name} " in shell
    assert files_of_the_page()


@pytest.mark.slow
def test_blocks_run_in_order_on_files_of_the_same_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    write_heart_files(tmp_path / "published")
    PUBLISHED["heart"].prepare(tmp_path / "published", unverified=True)
    (tmp_path / "work").mkdir()
    for block, output in run_page(tmp_path / "work", rounds=2, repeats=5):
        for title in table_titles(block):
            assert without_numbers(title) in without_numbers(output)
    for name in files_of_the_page():
        assert (tmp_path / "work" / name).is_file() or (not HAS_ONNX and "handover" in name), name


@pytest.mark.realdata
def test_blocks_run_in_order_and_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    if PUBLISHED["heart"].find_files() is None:
        pytest.skip("GPFL_DATA names no folder with the files of heart")
    (tmp_path / "work").mkdir()
    for block, output in run_page(tmp_path / "work"):
        lines = {without_numbers(line) for line in output.splitlines()}
        for line in shown_lines(block):
            assert without_numbers(line) in lines, f"{line}\nis not in\n{output}"
    for name in files_of_the_page():
        assert (tmp_path / "work" / name).is_file() or (not HAS_ONNX and "handover" in name), name
