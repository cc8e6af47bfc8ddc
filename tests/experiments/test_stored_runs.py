from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path

import pack_runs
import pytest
from conftest import toy_federation

import gpfl
from gpfl.errors import GpflError
from gpfl.experiments import stored_runs
from gpfl.experiments.stored_runs import ARCHIVE, StoredRun, StoredTrials


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results with one folder of trials of two seeds, and its archive."""
    out = tmp_path_factory.mktemp("results")
    for seed in (0, 1):
        gpfl.fit("gpfl", toy_federation(), net="mlp", rounds=3, seed=seed, out=out / "runs" / "toy" / f"seed-{seed}")
    folder = out / "runs" / "toy"
    (folder / "config.toml").write_text((folder / "seed-0" / "config.toml").read_text())
    (folder / "made-1.json").write_text(json.dumps({"command": "gpfl reproduce", "commits": ["abc1234"], "data": ""}))
    assert pack_runs.pack(out / "runs", out / ARCHIVE) == 1
    return out


def read_archived(archive: Path) -> list[StoredTrials]:
    return [StoredTrials(archive / entry["name"], entry) for entry in stored_runs.read_archive(archive)]


def archived_run(results: Path, seed: int) -> StoredRun:
    [trials] = read_archived(results / ARCHIVE)
    run = trials.run(seed)
    assert run is not None
    return run


def test_archived_runs_have_the_summary_and_commits_of_the_originals(results: Path) -> None:
    for seed in (0, 1):
        before, after = StoredRun(results / "runs" / "toy" / f"seed-{seed}"), archived_run(results, seed)
        assert after.summary == {key: value for key, value in before.summary.items() if key != "metrics"}
        assert after.commits == before.commits


def test_archived_trials_have_the_config_and_data_of_their_folder(results: Path) -> None:
    [trials] = read_archived(results / ARCHIVE)
    folder = StoredTrials(results / "runs" / "toy")
    assert (trials.config, trials.data_hash, trials.data_warning) == (folder.config, folder.data_hash, folder.data_warning)
    assert trials.run(2) is None


def test_archived_metrics_are_those_of_the_originals_to_six_digits(results: Path) -> None:
    before, after = StoredRun(results / "runs" / "toy" / "seed-0").metrics(), archived_run(results, 0).metrics()
    assert [record["round"] for record in after] == [0, 1, 2, 3]
    for one, other in zip(before, after, strict=True):
        assert other["accuracy"] == pytest.approx(one["accuracy"], abs=1e-6)
        assert other.get("train") == pytest.approx(one["train"], abs=1e-6) if "train" in one else "train" not in other


def test_client_accuracies_are_kept_for_the_last_round(results: Path) -> None:
    clients, _ = archived_run(results, 0).accuracies(3)
    assert clients == pytest.approx(StoredRun(results / "runs" / "toy" / "seed-0").accuracies(3)[0], abs=1e-6)


def test_runs_on_one_partition_keep_one_partition_hash(results: Path) -> None:
    assert archived_run(results, 0).partition_hash() == archived_run(results, 1).partition_hash()


def test_round_of_a_diverged_run_is_kept(tmp_path: Path, results: Path) -> None:
    folder = tmp_path / "runs" / "toy"
    shutil.copytree(results / "runs" / "toy", folder)
    (folder / "seed-1" / "summary.json").unlink()
    (folder / "seed-1" / "diverged.json").write_text('{"round": 2, "what": "the loss is nan"}')
    pack_runs.pack(tmp_path / "runs", tmp_path / ARCHIVE)
    [trials] = read_archived(tmp_path / ARCHIVE)
    assert (trials.run(1), trials.diverged_round(1), trials.diverged_round(0)) == (None, 2, None)


def test_packing_adds_seeds_to_an_archive(results: Path, tmp_path: Path) -> None:
    archive = tmp_path / ARCHIVE
    archive.write_bytes((results / ARCHIVE).read_bytes())
    gpfl.fit("gpfl", toy_federation(), net="mlp", rounds=3, seed=2, out=tmp_path / "runs" / "toy" / "seed-2")
    (tmp_path / "runs" / "toy" / "config.toml").write_text((results / "runs" / "toy" / "config.toml").read_text())
    pack_runs.pack(tmp_path / "runs", archive)
    assert [sorted(entry["runs"]) for entry in stored_runs.read_archive(archive)] == [["0", "1", "2"]]


def test_damaged_archive_is_reported(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(lzma.compress(b'{"format_version": 2, "na'))
    with pytest.raises(GpflError, match=f"{ARCHIVE} cannot be read .*: replace it with a good copy"):
        list(stored_runs.read_archive(tmp_path / ARCHIVE))


def test_archive_of_a_newer_version_is_rejected(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(lzma.compress(b'{"format_version": 99}\n'))
    with pytest.raises(GpflError, match="install a newer gpfl"):
        list(stored_runs.read_archive(tmp_path / ARCHIVE))
