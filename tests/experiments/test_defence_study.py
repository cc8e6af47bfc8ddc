"""The privacy studies: the commands make tables and figures, and go on where they were."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, ToyDataset
from privacy.test_attack import blobs

import gpfl
from gpfl.cli import privacy as privacy_command
from gpfl.cli.privacy import effort_of
from gpfl.data import DATASETS
from gpfl.defences.accounting import gaussian
from gpfl.experiments import defence_study as study
from gpfl.experiments import leaks
from gpfl.experiments import privacy_table as columns
from gpfl.privacy.label_inference import Leak
from gpfl.privacy.membership import Membership
from gpfl.report import defence_curves as curves
from gpfl.report.defence_curves import Curves, Point

SMALL = (
    "--set",
    "data.name=pictures",
    "--set",
    "partition.clients=2",
    "--set",
    "net.channels=[4, 8]",
    "--set",
    "net.hidden=16",
)
QUICK = (*SMALL, "--rounds", "1", "--images", "2", "--iterations", "3", "--restarts", "1", "--device", "cpu", "--out", "out")


@pytest.fixture
def pictures(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command with tiny images to study."""
    x, y = blobs(96)
    wide = np.kron(x, np.ones((1, 1, 2, 2), dtype=np.uint8))
    monkeypatch.setitem(DATASETS, "pictures", ToyDataset(make=lambda: gpfl.Table(wide, y, name="pictures"), name="pictures"))
    return command


# The nine columns.


def test_the_nine_columns_come_from_one_command_and_are_not_made_twice(pictures: Command, tmp_path: Path) -> None:
    words = ("privacy", "columns", *QUICK, "--kind", "geiping", "--batch", "1", "--steps", "one", "--round", "0")
    said = pictures(*words, "--dry-run")
    assert "5 cells to run, 0 done" in said.out
    assert "10 attacks of 3 iterations on 2 images follow" in said.out
    assert not (tmp_path / "out").exists()
    said = pictures(*words)
    assert said.code == 0, said.err
    text = (tmp_path / "out" / "privacy" / "table.md").read_text()
    assert (
        "| setting | Per-fe | Rep-fe | Avg-fe | Avg | RoD-fe | RoD | GPFL-fe | GPFL-sfe | GPFL-sm | start | mean image |"
        in text
    )
    assert "| paper, Cifar100 | 7.94 |" in text
    assert "| paper, Cifar100 | 7.94 |" in said.out
    assert "![" not in said.out, "a terminal shows no pictures"
    records = json.loads((tmp_path / "out" / "privacy" / "results.json").read_text())
    assert {record["column"] for record in records} == {*(column.label for column in columns.COLUMNS), "ceiling"}
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    assert "Run before: 5 of 5 runs." in pictures(*words).out
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}


# Labels and members.


def test_what_methods_tell_of_labels_and_members_is_tabled_and_not_asked_twice(pictures: Command, tmp_path: Path) -> None:
    quick = (*SMALL, "--rounds", "1", "--device", "cpu", "--out", "out")
    words = ("privacy", "leaks", *quick, "--methods", "gpfl,fedper,local")
    assert "3 cells to run, 0 done" in pictures(*words, "--dry-run").out
    said = pictures(*words)
    assert said.code == 0, said.err
    folder = tmp_path / "out" / "leaks"
    text = (folder / "table.md").read_text()
    assert text in said.out
    lines = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in text.splitlines() if line.startswith("| ")}
    found = [leaks.from_plain(held) for held in json.loads((folder / "results.json").read_text())]
    assert [findings.method for findings in found] == ["gpfl", "fedper", "local"]
    for findings in found:
        shown = lines[gpfl.experiments.definitions.display_name(findings.method)]
        guesses = [[leak.guess for leak in findings.labels[which]] for which in ("0", "best")]
        assert shown[:2] == [f"{np.mean(some):.3f}" if None not in some else "–" for some in guesses]
        assert shown[2].startswith(f"{np.mean([member.auc for member in findings.members]):.3f} ± ")
        assert shown[5] == f"{100 * findings.accuracy:.2f}"
    assert lines["GPFL"][0] != "–"
    assert lines["FedPer"][:2] == lines["Local"][:2] == ["–", "–"]
    made = {path: path.stat().st_mtime_ns for path in (folder / "kept").iterdir()}
    assert len(made) == 3
    assert "Run before: 3 of 3 runs." in pictures(*words).out
    assert made == {path: path.stat().st_mtime_ns for path in (folder / "kept").iterdir()}
    assert pictures("privacy", "leaks", *quick, "--methods", "gpfll").code == 2


def test_leaks_are_those_of_their_run(pictures: Command, tmp_path: Path) -> None:
    words = ("privacy", "leaks", *SMALL, "--rounds", "1", "--device", "cpu", "--out", "out", "--methods", "fedavg")
    rows = []
    for seed in ("0", "1", "0"):
        assert pictures(*words, "--seed", seed).code == 0
        rows.append((tmp_path / "out" / "leaks" / "table.md").read_text().splitlines()[2])
    assert rows[0] == rows[2] != rows[1]
    for damaged in ("", "{}", '{"mark": 1}'):
        for path in (tmp_path / "out" / "leaks" / "kept").iterdir():
            path.write_text(damaged)
        assert pictures(*words, "--seed", "0").code == 0
        assert (tmp_path / "out" / "leaks" / "table.md").read_text().splitlines()[2] == rows[0], "asked again"


def test_a_guess_no_better_than_none_is_called_weak() -> None:
    member = Membership("0", 0.6, 1.0, 1.2)

    def found(guess: float | None) -> str:
        leak = Leak("0", guess, 0.6, 0.5, 0.1)
        return leaks.markdown([leaks.Findings("gpfl", 3, "test", 0.5, 2, {"best": [leak]}, [member])], "")

    assert "this guess is weak" not in found(0.4)
    assert "At or above them (GPFL) this guess is weak" in found(0.55)
    assert "| GPFL | – |" in found(None)
    assert "mean over 1 of 2 clients, the others having too few rows to train, 0 is exact" in found(0.4)


# The curves.


def test_curves_come_from_one_command_with_a_point_for_each_value(pictures: Command, tmp_path: Path) -> None:
    values = ("--methods", "fedavg", "--noise", "0.1,1e30", "--example-noise", "0.5", "--top-k", "none", "--bits", "4")
    said = pictures("privacy", "curves", *QUICK, *values)
    assert said.code == 0, said.err
    points = json.loads((tmp_path / "out" / "defences" / "points.json").read_text())
    assert [(point["family"], point["value"]) for point in points] == [
        ("", 0),
        ("noise", 0.1),
        ("example_noise", 0.5),
        ("bits", 4),
    ]
    assert points[1]["epsilon"] > points[1]["epsilon_if_poisson"] > 0
    assert points[0]["epsilon"] is None
    text = (tmp_path / "out" / "defences" / "table.md").read_text()
    assert "Not ended: FedAvg, clip and noise, client level, 1e+30" in text, "a run that noise destroys is said, and no more"
    assert "train.lr" not in text, "the way out of a single run is none here"
    names = {path.name for path in (tmp_path / "out" / "defences").iterdir()}
    assert {"epsilon.png", "epsilon.pdf", "leak.png", "leak.pdf", "points.csv"} <= names
    assert text.endswith("\n\n![epsilon](epsilon.png)\n\n![leak](leak.png)\n")
    assert "**This table proves nothing**" in text, "three iterations on two images rebuild nothing of FedAvg either"


def test_magnitudes_by_rows_have_the_weight_of_the_setting(pictures: Command, tmp_path: Path) -> None:
    values = ("--methods", "gpfl", "--noise", "none", "--example-noise", "0.5", "--top-k", "none", "--bits", "none")
    said = pictures("privacy", "curves", *QUICK, *values, "--set", "gpfl.lam=0.5", "--set", "train.batch_size=16")
    assert said.code == 0, said.err
    methods = [tomllib.loads(path.read_text())["method"] for path in (tmp_path / "out" / "runs").glob("*/config.toml")]
    variants = sorted((method["mlg_norm"], method["lam"]) for method in methods)
    assert variants == [("batch", 0.5), ("sample_mean", 2.0), ("sample_mean", 2.0)], (
        "with a run of that variant without a defence"
    )
    points = json.loads((tmp_path / "out" / "defences" / "points.json").read_text())
    assert [(point["family"], point["variant"]) for point in points] == [
        ("", ""),
        ("", "--mlg-norm sample_mean --lam 2"),
        ("example_noise", "--mlg-norm sample_mean --lam 2"),
    ]


def test_updates_that_are_bounded_have_no_weight_decay_in_them(pictures: Command, tmp_path: Path) -> None:
    values = ("--methods", "gpfl", "--noise", "0.1", "--example-noise", "none", "--top-k", "0.1", "--bits", "4")
    said = pictures("privacy", "curves", *QUICK, *values)
    assert said.code == 0, said.err
    assert "Weight decay" not in said.out
    points = json.loads((tmp_path / "out" / "defences" / "points.json").read_text())
    variants = [(point["family"], point["variant"]) for point in points]
    assert variants == [("", ""), ("", "--mu 0"), ("noise", "--mu 0"), ("top_k", "--mu 0"), ("bits", "")]
    text = (tmp_path / "out" / "defences" / "table.md").read_text()
    assert curves.UNDECAYED in text
    assert "| GPFL | none | `--mu 0` |" in text


def test_seed_0_of_victims_can_be_said() -> None:
    assert effort_of("attack", 0, 0, 0, False).seed == 0
    assert effort_of("attack", 0, 0, None, False).seed == 2023


def test_noise_of_curves_can_be_asked_for_by_epsilon(pictures: Command) -> None:
    values = ("--methods", "fedavg", "--epsilon", "4", "--example-noise", "none", "--top-k", "none", "--bits", "none")
    said = pictures("privacy", "curves", *QUICK, *values, "--dry-run")
    assert said.code == 0, said.err
    (noise,) = noises("fedavg", study.FAMILIES[0], 1e-5)
    assert f"privacy/noise-{noise:g}" in said.out


def noises(method: str, family: study.Family, delta: float) -> list[float]:
    common = {"data": {"name": "pictures"}, "partition": {"clients": 2}, "net": {"channels": [4, 8], "hidden": 16}}
    plan = gpfl.experiments.grid.Plan(out=Path("out"), seeds=(0,), rounds=1, patience=0, common=common)
    cell = study.spots([method], {family.name: [1.0]}, 0.2, 1.0, delta, weights=False)[1].cell
    return study.noises(family, [4.0], cell, plan, gpfl.experiments.grid.FederationCache())


@pytest.mark.usefixtures("pictures")
def test_noise_for_an_epsilon_knows_delta_and_how_often_rows_enter() -> None:
    client, example = study.FAMILIES[:2]
    for delta in (1e-5, 1e-7):
        (noise,) = noises("fedavg", client, delta)
        assert 3.95 < gaussian(noise / 2, 1, delta) <= 4
    (noise,) = noises("pfedme", example, 1e-5)
    assert 3.95 < gaussian(noise / 2, 5, 1e-5) <= 4, "pFedMe takes five steps on each batch"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("curves", "--methods", "fedproto"), "sends no update of weights"),
        (("curves", "--methods", "fedavgg"), "did you mean"),
        (("curves", "--noise", "0"), "its values must be above 0"),
        (("curves", "--noise", "loud"), "must be numbers with commas between, or none"),
        (("curves", "--noise", "1", "--epsilon", "1"), "were both given"),
        (("curves", "--round", "0,best"), "--round is '0,best'; give one of 0, best"),
        (("curves", "--epsilon", "nan"), "its values must be above 0, and finite"),
        (("curves", "--epsilon", "none"), "it must be numbers with commas between\n"),
        (("curves", "--epsilon", "4", "--noise", " 1 "), "were both given"),
        (("curves", "--top-k", "1"), "shares must be below 1"),
        (("curves", "--bits", "32"), "bits are whole numbers, 2 to 31"),
        (("curves", "--victims", "-1"), "--victims is -1"),
        (("curves", "--methods", "fedphp", "--example-noise", "1"), "say --example-noise none"),
        (("leaks", "--seed", "-1"), "the seed of a run is -1"),
        (("columns", "--psnr", "proper,reference"), "--psnr is 'proper,reference'; give one of proper, reference"),
        (("curves", "--set", "defence.clip=1"), "is not for studies"),
        (("curves", "--bits", "2.5"), "bits are whole numbers"),
        (("curves", "--images", "500"), "of them are asked for"),
        (("columns", "--images", "6"), "for batches of 4 it must be a multiple of 4"),
        (("columns", "--psnr", "nice"), "--psnr is 'nice'"),
        (("columns", "--kind", "nice"), "--kind is 'nice'"),
        (("columns", "--set", "run.seed=1"), "is not for studies"),
    ],
)
def test_what_a_study_cannot_do_is_refused(pictures: Command, words: tuple[str, ...], complaint: str) -> None:
    said = pictures("privacy", *words, *SMALL, "--out", "out", "--dry-run")
    assert said.code == 2
    assert complaint in said.err


def test_data_that_are_no_images_are_refused_before_anything_is_trained(pictures: Command) -> None:
    toy = ("--set", "data.name=toy", "--set", "net.name=mlp", "--set", "partition.clients=2", "--set", "partition.beta=10")
    said = pictures("privacy", "columns", *toy, "--out", "out", "--dry-run")
    assert said.code == 2
    assert "attacks rebuild images" in said.err


def test_reproduce_makes_table_5_with_the_runs_of_its_first_seed(pictures: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    said = pictures("reproduce", "table5", *SMALL, "--rounds", 3, "--dry-run")
    assert said.code == 0, said.err
    assert "5 cells to run, 0 done; at most 3 rounds, patience 100" in said.out
    assert "146 attacks of 1000 iterations on 20 images follow" in said.out
    asked: list[dict[str, object]] = []
    monkeypatch.setattr(privacy_command, "columns", lambda **given: asked.append(given))
    assert (
        pictures("reproduce", "privacy", *SMALL, "--rounds", 3, "--seeds", "4,1", "--device", "cpu", "--out", "out").code == 0
    )
    expected = {"seed": 4, "rounds": 3, "patience": 100, "device": "cpu", "engine": "auto", "out": "out", "dry_run": False}
    assert asked == [{**expected, "assignments": tuple(SMALL[1::2])}]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("table1,privacy",), "privacy is made by attacks, which table1 is not: ask for one at a time"),
        (("privacy", "all"), "privacy is made by attacks, which all is not"),
        (("privacy", "--patience", "-3"), "train.patience (--patience) is -3"),
        (("privacy", "--set", "train.rounds=7"), "--set train.rounds would not be named in tables: give --rounds"),
        (("privacy", "--set", "defence.clip=1"), "--set defence.… is not for studies"),
        (("privacy", "--out", "file"), "--out file is a file; choose a folder"),
        (("privcy",), "did you mean 'privacy'"),
    ],
)
def test_reproduce_refuses_attacks_before_data_are_got(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], complaint: str
) -> None:
    monkeypatch.setattr(privacy_command, "download_datasets", lambda names: pytest.fail("data are got"))
    Path("file").write_text("mine")
    said = command("reproduce", *words)
    assert said.code == 2
    assert complaint in said.err


@pytest.mark.parametrize(
    "words", [("reproduce", "privacy"), ("privacy", "columns"), ("privacy", "leaks"), ("privacy", "curves")]
)
def test_data_that_are_not_here_are_got_but_by_a_dry_run(
    command: Command, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def get(names: list[str]) -> None:
        raise gpfl.GpflError(f"{names} would be got")

    monkeypatch.setattr(privacy_command.grid, "here", lambda data: False)
    monkeypatch.setattr(privacy_command, "download_datasets", get)
    for more, complaint in (((), "['cifar100'] would be got"), (("--dry-run",), "not here: gpfl data get cifar100")):
        said = command(*words, *more)
        assert said.code == 2
        assert complaint in said.err
    assert ("Attacks are on the runs of one seed, 0.\n" in said.out) == (words[0] == "reproduce")


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (("--methods", "gpfl"), "--methods"),
        (("--cells", "cifar100/practical"), "--cells"),
        (("--protocol", "paper"), "--protocol"),
        (("--set", "fedprox.mu=0.1"), "--set fedprox.…"),
        (("--only-tables", "--no-figures"), "--only-tables, --no-figures"),
    ],
)
def test_reproduce_refuses_what_attacks_do_not_listen_to(command: Command, words: tuple[str, ...], flag: str) -> None:
    said = command("reproduce", "privacy", *words)
    assert said.code == 2
    assert f"privacy does not listen to {flag}: leave out one or the other; gpfl privacy columns --help" in said.err


# Figures by their data.


def point(method: str, family: str, value: float, accuracy: float, psnr: float, epsilon: float | None = None) -> Point:
    return Point(
        *(method, family, "", value, accuracy, 0.0, 1, 1e6, epsilon, epsilon and epsilon / 3, 1e-5 if epsilon else None),
        *(False, "model", psnr, 0.5, 11.0, "leaks", psnr - 0.25),
    )


MADE = Curves(
    (
        *(point("gpfl", "", 0, 0.6, 30), point("gpfl", "noise", 1, 0.4, 12, 10.0), point("gpfl", "noise", 0.1, 0.5, 20, 300.0)),
        *(point("fedavg", "", 0, 0.3, 31), point("fedavg", "bits", 4, 0.3, 25), point("fedavg", "noise", 1, 0.1, 9, 10.0)),
    ),
    *(30.0, 20, 50, "0"),
)


def test_the_figures_show_the_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(curves.drawing, "write", lambda figure, stem: drawn.append(figure) or [])
    curves.draw_epsilon(MADE, tmp_path / "epsilon")
    curves.draw_leak(MADE, tmp_path / "leak")
    lines = {line.get_label(): line.get_xydata().tolist() for line in drawn[0].axes[0].get_lines()}
    assert lines["GPFL"] == [[300, 50], [10, 40]]
    assert lines["FedAvg"] == [[10, 10]]
    leak = {line.get_label(): line.get_xydata().tolist() for line in drawn[1].axes[0].get_lines()}
    assert leak["clip and noise, client level"] == [[50, 20], [40, 12]]
    assert leak["no defence"] == [[60, 30]]
    marks = [line.get_marker() for line in drawn[0].axes[0].get_lines() if not line.get_label().startswith("_")]
    assert len(set(marks)) == 2, "a mark a method, without any colour"


def test_the_table_says_where_it_proves_nothing_and_no_more_than_it_holds() -> None:
    assert "proves" not in curves.markdown(MADE, "")
    assert "It proves nothing." in curves.markdown(dataclasses.replace(MADE, doubt="It proves nothing."), "")
    for variant, words in (("--mlg-norm sample_mean", curves.BY_ROWS), ("--mu 0", curves.UNDECAYED)):
        varied = dataclasses.replace(point("gpfl", "noise", 1, 0.4, 12, 10.0), variant=variant)
        assert words not in curves.markdown(MADE, "")
        assert words in curves.markdown(dataclasses.replace(MADE, points=(*MADE.points, varied)), "")


def test_the_table_says_whose_promise_leaves_labels_out() -> None:
    known = dataclasses.replace(point("gpfl", "example_noise", 1, 0.4, 12, 10.0), label_counts_known=True)
    words = "At example level the ε of GPFL is for a row exchanged for another of its class"
    assert words not in curves.markdown(MADE, "")
    assert words in curves.markdown(dataclasses.replace(MADE, points=(*MADE.points, known)), "")


def test_numbers_at_near_marks_stand_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(curves.drawing, "write", lambda figure, stem: drawn.append(figure) or [])
    near = tuple(point("gpfl", "noise", 0.1 * step, 0.5 + 0.001 * step, 9, 10.0) for step in range(1, 6))
    curves.draw_leak(dataclasses.replace(MADE, points=(*near, point("gpfl", "", 0, 0.6, 30))), tmp_path / "leak")
    (figure,) = drawn
    figure.draw_without_rendering()
    values = [text for text in figure.axes[0].texts if text.get_text() != "floor"]
    assert [text.get_text() for text in values] == ["0.1", "0.2", "0.3", "0.4", "0.5"]
    boxes = sorted((text.get_window_extent() for text in values), key=lambda box: box.y0)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert boxes[0].y0 > figure.axes[0].get_window_extent().y0, "none lies on the axis"


def test_the_table_says_what_its_numbers_are() -> None:
    text = curves.markdown(MADE, "made by hand")
    assert "| GPFL | clip and noise, client level |  | model | leaks | 0.1 | 50.00 | 300 | 100 | 20.00 | 0.500 | 1.0 |" in text
    assert "best of 50 rounds" in text
    assert "As found (points.csv) PSNR is at most 0.25 dB lower" in text
    assert "ceiling (fedavg, no defence, untrained) 30.00 dB" in text
    rows = curves.as_csv(MADE).splitlines()
    assert len(rows) == 7
    assert rows[0].startswith(
        "method,family,variant,value,accuracy,std,trials,bytes_up,epsilon,epsilon_if_poisson,delta,label_counts_known,target,psnr"
    )
