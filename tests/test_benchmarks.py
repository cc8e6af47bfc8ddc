"""The speed page is up to date, and revisions can be compared."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("kind", ["defences", "variants"])
def test_pages_of_label_leaks_match_the_recorded_results(kind: str) -> None:
    import label_leaks

    folder = ROOT / "docs" / "results" / "label-leaks"
    assert label_leaks.page(kind, folder) == (folder / f"{kind}.md").read_text(encoding="utf-8")


def test_pages_of_label_leaks_show_what_was_run_of_incomplete_tasks(tmp_path: Path) -> None:
    import label_leaks

    leak = vars(label_leaks.Leak(0.25, 0.5, 1, 4, [0.0, 1.0]))
    rows = {"defences": {"0/clip 1": leak}, "variants": {"FedPer/0": {"last_ten": 90.0, "best": 91.0, "leaks": [leak, leak]}}}
    for kind, row in rows.items():
        result = {"title": "HAR", "rows": row, "command": "python", "minutes": 1, "machine": "CPU"}
        (tmp_path / f"{kind}-har.json").write_text(json.dumps(result))
    defences, variants = (label_leaks.page(kind, tmp_path) for kind in rows)
    assert "| HAR | 0 | 0.500 | not run | 0.250, 1 of 4 exact [0.00, 1.00] | not run |" in defences
    assert "har: the best round." in defences
    assert "| HAR | FedPer (1 of 3 seeds) | 90.00 | 91.00 |" in variants
    assert "har: as published, " in variants


def test_page_of_defaults_and_table_of_falls_match_the_recorded_results() -> None:
    import falls
    import gpfl_defaults

    folder = ROOT / "docs" / "results" / "defaults"
    runs = json.loads(lzma.decompress((folder / "runs.json.xz").read_bytes()))
    assert gpfl_defaults.page(runs) == (folder / "table.md").read_text(encoding="utf-8")
    assert "\n".join(falls.rows()) in (ROOT / "docs" / "methods" / "gpfl.md").read_text(encoding="utf-8")


def test_noise_of_constant_accuracy_is_the_fall_that_is_expected_of_it() -> None:
    import falls

    rng = np.random.default_rng(0)
    runs = [falls.Fall.of(rng.normal(90, 0.5, 50)) for _ in range(40)]
    assert abs(np.mean([each.best - each.last - each.noise for each in runs])) < 0.1
    steady = falls.Fall.of(np.linspace(90, 80, 50))
    assert steady.noise < 1e-6
    assert 5 < steady.of_means < steady.best - steady.last


def test_tables_of_the_note_on_the_valve_are_the_recorded_results() -> None:
    import valve
    import valve_note

    note = (ROOT / "docs" / "valve.md").read_text(encoding="utf-8")
    costs, rank = (json.loads((valve_note.RESULTS / name).read_text()) for name in ("cpu-1-thread.json", "rank.json"))
    for line in [*valve.rows(costs), *valve.byte_rows(costs), *valve_note.exactness_rows(rank)]:
        assert line in note
    for net, sizes in costs["bytes"].items():
        assert sizes == valve.count_upload_bytes(net)
        for form in valve.FORMS:
            assert f"{sizes[form]:,}" in (ROOT / "docs" / "methods" / "gpfl.md").read_text(encoding="utf-8")
    page = (valve_note.RESULTS / "cpu-1-thread.md").read_text(encoding="utf-8")
    assert valve.page(costs) == page


def test_page_of_robust_aggregation_matches_the_recorded_results() -> None:
    import aggregation

    folder = ROOT / "docs" / "results" / "aggregation"
    assert aggregation.page(folder) == (folder / "table.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("method", ["gpfl", "fedavg"])
def test_hand_written_loops_match_the_loop_engine(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import cpu
    import plain_loops

    import gpfl
    from gpfl.core import tree
    from gpfl.engine import make_engine

    monkeypatch.setattr(cpu, "BATCH_SIZE", 1000)  # a batch of all samples of a client does not depend on their order
    spec = cpu.run_spec(gpfl.federate("digits", clients=3), {"name": "mlp"}, method)
    shared, private = spec.method.init(0)
    engine = make_engine("loop", spec)
    result = engine.train(shared, engine.initial_private(private), range(3), 0)
    accuracy = engine.evaluate(result.mean, result.private, 1, "test").accuracy
    names = {"cov": "valve", "gce": "embeddings"}
    problem = cpu.problem(spec)

    def by_name(state: tree.Tree) -> dict[str, torch.Tensor]:
        flat = tree.flatten(state)
        return {".".join([names.get(part, part), *rest]): t for path, t in flat.items() for part, *rest in [path.split("/")]}

    loops = [plain_loops.PlainLoop(problem), plain_loops.TightLoop(problem)]
    start, expected = by_name({**shared, **private}), by_name(result.mean)
    for model in (loops[0].server, *(client.model for client in loops[0].clients), loops[1].model):
        model.load_state_dict(start)
    loops[1].server = [p.detach().clone() for p in loops[1].model.shared()]
    loops[1].heads = [[p.detach().clone() for p in loops[1].head] for _ in loops[1].heads]
    for loop in loops:
        assert loop.run_round() == pytest.approx(accuracy)
        model = loop.server if isinstance(loop, plain_loops.PlainLoop) else loop.model
        trained = [name for name, p in model.named_parameters() if any(p is each for each in model.shared())]
        values = model.shared() if isinstance(loop, plain_loops.PlainLoop) else loop.server
        assert sorted(trained) == sorted(expected)
        for name, value in zip(trained, values, strict=True):
            torch.testing.assert_close(value.detach(), expected[name], atol=1e-5, rtol=1e-5)
