"""The speed page is up to date, and revisions can be compared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for path in (ROOT / "benchmarks").glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_speed_page_matches_the_recorded_results() -> None:
    import page

    assert page.text() == (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")


def test_cases_of_the_speed_benchmark_can_be_run() -> None:
    import speed

    spec = speed.Case.parse("digits/fedavg/4:b5,x2", "auto", "off").run_spec()
    assert (len(spec.federation), spec.schedule.batch_size, spec.method.name) == (4, 5, "fedavg")
    engine = speed.make_engine("loop", spec)
    assert len(speed.round_function(engine, spec, 2)(0)) == 2


def test_numbers_of_a_revision_are_equal_to_themselves_and_differences_are_named() -> None:
    import compare_commits

    first, second = (compare_commits.numbers(["fedavg"], ["loop"], "auto") for _ in range(2))
    assert len(first["fedavg loop"]["accuracy"]) >= 3
    assert len(first["fedavg loop"]["models"]) == 20
    assert compare_commits.compare_numbers(first, second) == {"fedavg loop": ""}
    second["fedavg loop"]["models"][3][0] = "0"
    assert compare_commits.compare_numbers(first, second) == {"fedavg loop": "tensors"}
    second["fedavg loop"]["accuracy"][-1] += 0.25
    assert compare_commits.compare_numbers(first, second) == {"fedavg loop": "accuracy by 0.25"}


def test_worker_refuses_a_package_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "compare_commits.py"), "--worker", "numbers", "fedavg", "loop"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"not from the worktree {tmp_path}" in done.stderr
