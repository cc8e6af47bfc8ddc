"""Private state on disk trains, resumes and predicts as private state in memory does."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import KillAt, KilledError, toy_federation
from user_files import message_of

import gpfl
from gpfl.core import tree
from gpfl.training import prepare, private_files

SETTINGS = {"net": "mlp", "rounds": 6, "lr": 0.1, "client_fraction": 0.5, "checkpoint_every": 2, "seed": 3}


def assert_equal(a: gpfl.Result, b: gpfl.Result) -> None:
    assert [{**record, "seconds": 0} for record in a.history] == [{**record, "seconds": 0} for record in b.history]
    for x, y in zip(a.clients, b.clients, strict=True):
        assert all(torch.equal(s, t) for s, t in zip(tree.leaves(x.weights), tree.leaves(y.weights), strict=True))


@pytest.mark.parametrize("engine", ["loop", "vmap", "workers"])
@pytest.mark.parametrize("method", ["gpfl", "ditto", "fedavg", "fedavg-ft"])
def test_state_on_disk_trains_as_state_in_memory(method: str, engine: str, tmp_path: Path) -> None:
    settings = {**SETTINGS, "engine": engine}
    memory = gpfl.fit(method, toy_federation(), **settings)
    disk = gpfl.fit(method, toy_federation(), out=tmp_path / "run", private_state="disk", **settings)
    assert_equal(disk, memory)
    if list(tree.leaves(disk.outcome.last.private)):
        assert [path.name for path in (tmp_path / "run" / "private").iterdir()] == ["round-6"]


def test_killed_run_resumes_from_its_files(tmp_path: Path) -> None:
    whole = gpfl.fit("ditto", toy_federation(), **SETTINGS)
    for killed_at in (1, 3, 5):
        run = tmp_path / f"killed-{killed_at}"
        with pytest.raises(KilledError):
            gpfl.fit("ditto", toy_federation(), out=run, private_state="disk", callbacks=[KillAt(killed_at)], **SETTINGS)
        assert_equal(gpfl.resume(run, federation=toy_federation()), whole)
    assert_equal(gpfl.load(run, federation=toy_federation()), whole)


def test_a_missing_file_is_an_error_that_says_how_to_start_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KilledError):
        gpfl.fit("ditto", toy_federation(), out=run, private_state="disk", callbacks=[KillAt(3)], **SETTINGS)
    file = next((run / "private" / "round-2").iterdir())
    file.write_bytes(b"")
    assert message_of(lambda: gpfl.resume(run, federation=toy_federation())) == (
        f"{file} is missing or damaged: remove checkpoint.safetensors beside it, then run gpfl resume {run} to repeat the run"
    )


def test_a_full_disk_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    error = message_of(lambda: gpfl.fit("ditto", toy_federation(), out=tmp_path / "run", private_state="disk", **SETTINGS))
    assert error.startswith("cannot keep 0.00 GiB of private state in ")
    assert error.endswith(": No space left on device")


def test_settings_that_need_more_than_one_state_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(**settings: object) -> str:
        return message_of(lambda: gpfl.fit("ditto", toy_federation(), private_state="disk", **{**SETTINGS, **settings}))

    assert fit() == "run.private_state is 'disk', which needs a folder for the run: give out="
    assert "add --select last" in fit(out=tmp_path / "a", select="test")
    assert not (tmp_path / "a").exists()
    monkeypatch.setattr(prepare, "process_group", lambda: SimpleNamespace(world_size=2))
    assert "works in one process only" in fit(out=tmp_path / "b")


def anonymous_kilobytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_state_of_all_clients_is_in_a_file_without_a_name(tmp_path: Path) -> None:
    private, before = {"head": {"weight": torch.ones(1000)}}, anonymous_kilobytes()
    stacked = private_files.allocate(private, 20_000, tmp_path)  # 80 MB
    assert anonymous_kilobytes() - before < 20_000
    weight = tree.leaf(tree.branch(stacked, "head"), "weight")
    assert not list(tmp_path.iterdir())
    assert weight.shape == (20_000, 1000)
    assert weight[19_999].sum() == 1000
