"""The commands `gpfl privacy …`: studies from the runs to tables and figures, which are not repeated."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, ToyDataset
from privacy.blob_runs import blob_images

import gpfl
from gpfl.cli import privacy as privacy_command
from gpfl.data import DATASETS
from gpfl.defences.accounting import find_noise, gaussian_epsilon
from gpfl.experiments.definitions import display_name
from gpfl.experiments.leaks import parse_findings
from gpfl.experiments.privacy_table import COLUMNS

SETTINGS = ("data.name=blobs", "partition.clients=2", "net.channels=[4, 8]", "net.hidden=16")
SMALL = tuple(word for setting in SETTINGS for word in ("--set", setting))
QUICK = (*SMALL, "--rounds", "1", "--images", "2", "--iterations", "3", "--restarts", "1", "--device", "cpu", "--out", "out")


@pytest.fixture
def blobs(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command with a dataset of small images."""
    x, y = blob_images(96)
    wide = np.kron(x, np.ones((1, 1, 2, 2), dtype=np.uint8))
    monkeypatch.setitem(DATASETS, "blobs", ToyDataset(make=lambda: gpfl.Table(wide, y, name="blobs"), name="blobs"))
    return command


def modification_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


# The paper's table.


def test_one_command_makes_the_papers_table_and_repeats_no_run(blobs: Command, tmp_path: Path) -> None:
    call = ("privacy", "attacks", *QUICK, "--kind", "geiping", "--batch", "1", "--steps", "one", "--round", "0")
    result = blobs(*call, "--dry-run")
    assert "5 cells to run, 0 done" in result.out
    assert "10 attacks of 3 iterations on 2 images follow" in result.out
    assert not (tmp_path / "out").exists()
    result = blobs(*call)
    assert result.code == 0, result.err
    folder = tmp_path / "out" / "privacy"
    header = " | ".join(column.label for column in COLUMNS)
    assert f"| setting | {header} | start | mean image |" in (folder / "table.md").read_text()
    assert "| paper, Cifar100 | 7.94 |" in result.out
    assert "![" not in result.out, "no images on a terminal"
    records = json.loads((folder / "results.json").read_text())
    assert {record["column"] for record in records} == {*(column.label for column in COLUMNS), "ceiling"}
    before = {path: time for path, time in modification_times(tmp_path / "out").items() if path.suffix == ".safetensors"}
    assert "Already finished: 5 of 5 runs." in blobs(*call).out
    assert before == {path: modification_times(tmp_path / "out")[path] for path in before}


# Labels and members.


def test_one_command_infers_labels_and_members_and_repeats_nothing(blobs: Command, tmp_path: Path) -> None:
    options = (*SMALL, "--rounds", "1", "--device", "cpu", "--out", "out")
    call = ("privacy", "leaks", *options, "--methods", "gpfl,fedper,local")
    assert "3 cells to run, 0 done" in blobs(*call, "--dry-run").out
    result = blobs(*call)
    assert result.code == 0, result.err
    folder = tmp_path / "out" / "leaks"
    page = (folder / "table.md").read_text()
    assert page in result.out
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in page.splitlines() if line.startswith("| ")}
    findings = [parse_findings(values) for values in json.loads((folder / "results.json").read_text())]
    assert [each.method for each in findings] == ["gpfl", "fedper", "local"]
    for each in findings:
        row = rows[display_name(each.method)]
        guesses = [[label.guess for label in each.labels[round_]] for round_ in ("0", "best")]
        assert row[:2] == [f"{np.mean(values):.3f}" if None not in values else "–" for values in guesses]
        assert row[2].startswith(f"{np.mean([member.auc for member in each.members]):.3f} ± ")
        assert row[5] == f"{100 * each.accuracy:.2f}"
    assert rows["GPFL"][0] != "–"
    assert rows["FedPer"][:2] == rows["Local"][:2] == ["–", "–"]
    before = modification_times(folder / "cache")
    assert len(before) == 3
    assert "Already finished: 3 of 3 runs." in blobs(*call).out
    assert before == modification_times(folder / "cache")
    assert "did you mean 'gpfl'" in blobs("privacy", "leaks", *options, "--methods", "gpfll").err


def test_saved_findings_belong_to_their_run(blobs: Command, tmp_path: Path) -> None:
    call = ("privacy", "leaks", *SMALL, "--rounds", "1", "--device", "cpu", "--out", "out", "--methods", "fedavg")

    def run(seed: str) -> str:
        assert blobs(*call, "--seed", seed).code == 0
        lines = (tmp_path / "out" / "leaks" / "table.md").read_text().splitlines()
        return next(line for line in lines if line.startswith("| FedAvg"))

    first, other, again = (run(seed) for seed in ("0", "1", "0"))
    assert first == again != other
    for path in (tmp_path / "out" / "leaks" / "cache").iterdir():
        path.write_text("{}")
    assert run("0") == first


# Defences.


def test_one_command_measures_defences_with_a_point_for_each_value(blobs: Command, tmp_path: Path) -> None:
    values = ("--methods", "fedavg", "--noise", "0.1,1e30", "--example-noise", "0.5", "--top-k", "none", "--bits", "4")
    result = blobs("privacy", "defences", *QUICK, *values)
    assert result.code == 0, result.err
    folder = tmp_path / "out" / "defences"
    points = json.loads((folder / "points.json").read_text())["points"]
    assert [(point["family"], point["value"]) for point in points] == [
        ("", 0),
        ("noise", 0.1),
        ("example_noise", 0.5),
        ("bits", 4),
    ]
    assert points[1]["epsilon"] > points[1]["epsilon_if_poisson"] > 0
    assert points[0]["epsilon"] is None
    text = (folder / "table.md").read_text()
    assert "Not finished: fedavg, clip and noise, client level, 1e+30" in text
    assert "train.lr" not in text, "that fix is for a single run"
    assert {"epsilon.png", "epsilon.pdf", "leak.png", "leak.pdf", "points.csv"} <= {path.name for path in folder.iterdir()}
    assert text.endswith("\n![epsilon](epsilon.png)\n\n![leak](leak.png)\n")
    assert "**No evidence**" in text, "three iterations reconstruct nothing of FedAvg either"


def test_a_mean_magnitude_term_gets_the_weight_of_the_batch_norm(blobs: Command, tmp_path: Path) -> None:
    values = ("--methods", "gpfl", "--noise", "none", "--example-noise", "0.5", "--top-k", "none", "--bits", "none")
    result = blobs("privacy", "defences", *QUICK, *values, "--set", "gpfl.lam=0.5", "--set", "train.batch_size=16")
    assert result.code == 0, result.err
    methods = [tomllib.loads(path.read_text())["method"] for path in (tmp_path / "out" / "runs").glob("*/config.toml")]
    variants = sorted((method["mlg_norm"], method["lam"]) for method in methods)
    assert variants == [("batch", 0.5), ("sample_mean", 2.0), ("sample_mean", 2.0)], "the variant also without a defence"
    points = json.loads((tmp_path / "out" / "defences" / "points.json").read_text())["points"]
    assert [(point["family"], point["variant"]) for point in points] == [
        ("", ""),
        ("", "--mlg-norm sample_mean --lam 2"),
        ("example_noise", "--mlg-norm sample_mean --lam 2"),
    ]


def test_bounded_updates_have_no_weight_decay(blobs: Command, tmp_path: Path) -> None:
    values = ("--methods", "gpfl", "--noise", "0.1", "--example-noise", "none", "--top-k", "0.1", "--bits", "4")
    result = blobs("privacy", "defences", *QUICK, *values)
    assert result.code == 0, result.err
    assert "Weight decay" not in result.out
    points = json.loads((tmp_path / "out" / "defences" / "points.json").read_text())["points"]
    variants = [(point["family"], point["variant"]) for point in points]
    assert variants == [("", ""), ("", "--mu 0"), ("noise", "--mu 0"), ("top_k", "--mu 0"), ("bits", "")]
    text = (tmp_path / "out" / "defences" / "table.md").read_text()
    assert "has no weight decay (--mu 0)" in text
    assert "| GPFL | none | `--mu 0` |" in text


def test_epsilon_selects_the_noise(blobs: Command) -> None:
    pytest.importorskip("dp_accounting")
    values = ("--methods", "fedavg", "--epsilon", "4", "--example-noise", "none", "--top-k", "none", "--bits", "none")
    result = blobs("privacy", "defences", *QUICK, *values, "--dry-run")
    assert result.code == 0, result.err
    noise = find_noise(4.0, lambda noise: gaussian_epsilon(noise / 2, 1, 1e-5))
    assert f"privacy/noise-{noise:g}" in result.out


# Errors.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("defences", "--methods", "fedproto"), "uploads no weights"),
        (("defences", "--methods", "fedavgg"), "did you mean"),
        (("defences", "--noise", "0"), "--noise is 0; it must be at least 0, and 0 disables it"),
        (("defences", "--noise", "loud"), "it must be numbers separated by commas"),
        (("defences", "--noise", "1", "--epsilon", "1"), "exclude each other"),
        (("defences", "--round", "0,best"), "'0,best' is not one of '0', 'best'"),
        (("defences", "--epsilon", "nan"), "--epsilon is 'nan'; each number must be at least 0"),
        (("defences", "--epsilon", "none"), "it must be numbers separated by commas, such as 1,4\n"),
        (("defences", "--epsilon", "0"), "--epsilon is 0; it must be above 0"),
        (("defences", "--epsilon", "4", "--noise", " 1 "), "exclude each other"),
        (("defences", "--top-k", "1"), "--top-k is 1; it must be above 0 and at most 1, and 1 disables it"),
        (("defences", "--bits", "32"), "--bits is 32; it must be at least 2 and at most 32, and 32 disables it"),
        (("defences", "--bits", "2.5"), "--bits is '2.5'; it must be integers separated by commas"),
        (("defences", "--attack-seed", "-1"), "(--attack-seed) is -1; it must be at least 0"),
        (("defences", "--iterations", "0"), "attack.iterations (--iterations) is 0; it must be at least 1"),
        (("defences", "--methods", "fedphp", "--example-noise", "1"), "use --example-noise none"),
        (("defences", "--set", "defence.clip=1"), "--set defence.… does not apply"),
        (("defences", "--images", "500"), "the attack needs"),
        (("leaks", "--seed", "-1"), "'--seed': -1 is not in the range"),
        (("attacks", "--psnr", "proper,reference"), "(--psnr) is 'proper,reference'; it must be one of"),
        (("attacks", "--images", "6"), "for batches of 4 it must be a multiple of 4"),
        (("attacks", "--kind", "nice"), "(--kind) is ['nice']"),
        (("attacks", "--set", "run.seed=1"), "run.seed"),
    ],
)
def test_impossible_studies_are_rejected(blobs: Command, words: tuple[str, ...], message: str) -> None:
    result = blobs("privacy", *words, *SMALL, "--out", "out", "--dry-run")
    assert result.code == 2
    assert message in result.err


def test_data_without_images_are_rejected_before_training(blobs: Command) -> None:
    toy = ("--set", "data.name=toy", "--set", "net.name=mlp", "--set", "partition.clients=2", "--set", "partition.beta=10")
    result = blobs("privacy", "attacks", *toy, "--out", "out", "--dry-run")
    assert result.code == 2
    assert "attacks reconstruct images" in result.err


@pytest.mark.parametrize("words", [("privacy", "attacks"), ("privacy", "leaks"), ("privacy", "defences")])
def test_missing_data_are_downloaded_unless_it_is_a_dry_run(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def get(names: list[str]) -> None:
        raise gpfl.GpflError(f"{names} would be downloaded")

    monkeypatch.setattr(privacy_command.grid, "has_data", lambda data: False)
    monkeypatch.setattr(privacy_command, "download_datasets", get)
    for flags, message in (
        ((), "['cifar100'] would be downloaded"),
        (("--dry-run",), "is not downloaded: gpfl data get cifar100"),
    ):
        result = command(*words, *flags)
        assert result.code == 2
        assert message in result.err


def test_reproduce_names_the_command_of_attacks(command: Command) -> None:
    for names in (("privacy",), ("table1,table5",)):
        result = command("reproduce", *names)
        assert result.code == 2
        assert result.err == "gpfl: the privacy table is made by attacks on uploads: gpfl privacy attacks\n"
