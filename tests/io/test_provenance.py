"""Numbers say which code they come from."""

from __future__ import annotations

import re

import pytest

from gpfl.io import provenance as origin


def test_commit_is_the_one_that_was_told_where_there_is_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_COMMIT", "abc1234")
    assert origin.current_commit() == "abc1234"


def test_commit_is_found_or_said_to_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPFL_COMMIT", raising=False)
    assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?|none, version .+|unknown", origin.current_commit())
