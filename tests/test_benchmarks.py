"""The page on speed says what the recorded results say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_page_on_speed_is_the_one_that_the_results_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import page

    assert page.text() == (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    for module in ("page", "memory", "speed", "tasks"):
        sys.modules.pop(module)
