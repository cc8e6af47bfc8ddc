"""What `gpfl reproduce` says before it runs: the plan on terminals of any width, words that are meant, equal budgets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from toy_tables import assert_rejected, replace_experiments

from gpfl.experiments import stored_runs

DOCS = Path(__file__).parents[2] / "docs"
TOYS = """
title = "Toys"
caption = "The accuracy (%) on toys."
measure = "accuracy"
rows = ["fedavg", "fedprox", "gpfl", "gpfl without pci"]

[[columns]]
key = "toy/whole"
heading = "Whole"
group = "toys"
data = { name = "toy" }
"""


@pytest.fixture
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A table of toys in place of the paper's."""
    with replace_experiments(tmp_path_factory.mktemp("configs"), toys=TOYS):
        yield


# What our runs say of rounds.


def recorded() -> list[dict[str, Any]]:
    """Rounds of recorded runs: planned, patience, ended, best."""
    found = []
    for entry in stored_runs.read_archive(DOCS / "results" / stored_runs.ARCHIVE):
        config, partition = entry["config"], entry["config"]["partition"]
        for run in entry["runs"].values():
            if run["summary"]:
                found.append(
                    {
                        "data": config["data"]["name"],
                        "partition": partition["name"],
                        "own": partition.get("rng") != "pfllib" or partition["seed"] != 1,
                        "beta": partition.get("beta"),
                        "clients": partition.get("clients"),
                        "method": config["method"]["name"],
                        "protocol": config["run"]["protocol"],
                        "planned": config["train"]["rounds"],
                        "patience": config["train"]["patience"],
                        "ended": run["summary"]["rounds"],
                        "best": run["summary"]["best_round"],
                    }
                )
    return found


def test_words_on_rounds_are_true_of_recorded_runs() -> None:
    runs = [run for run in recorded() if run["planned"] <= 300 and run["patience"]]
    early = {
        name: [run["ended"] < run["planned"] for run in runs if run["data"] == name] for name in {run["data"] for run in runs}
    }
    assert all(early["amazon"])
    assert max(run["ended"] for run in runs if run["data"] == "amazon") <= 120
    assert sum(early["cifar100"]) > len(early["cifar100"]) / 2
    assert 0 < sum(early["fmnist"]) < len(early["fmnist"]) / 2
    for name in ("har", "agnews"):
        assert 0 < sum(early[name]) < len(early[name]) / 4, name
    late = [run for run in recorded() if run["data"] == "agnews" and run["planned"] == 2000 and run["beta"] == 1]
    assert all(run["best"] < 250 if run["method"] == "fedproto" else run["best"] > 850 for run in late)
    most = [run["ended"] > 300 for run in recorded() if run["data"] == "agnews" and run["planned"] > 300]
    assert sum(most) > len(most) / 2
    page = (DOCS / "reproduce.md").read_text()
    assert "all on Amazon, by round 120, most on Cifar100, less than half on FMNIST, few on HAR and AG News" in page
    assert "with 2000 rounds the best came after round 850 (FedProto's before 250)" in page


@pytest.mark.parametrize(
    ("methods", "practical", "pathological"),
    [
        (("fedper", "fedrep"), (58, 80), (75, 123)),
        (("gpfl",), (178, 216), (155, 176)),
        (("ditto",), (253, 259), (278, 288)),
    ],
)
def test_best_rounds_of_the_page_are_those_of_recorded_runs(
    methods: tuple[str, ...], practical: tuple[int, int], pathological: tuple[int, int]
) -> None:
    page = (DOCS / "reproduce.md").read_text()
    for split, (low, high) in (("dirichlet", practical), ("pathological", pathological)):
        best = [run["best"] for run in cifar(split) if run["method"] in methods]
        assert (min(best), max(best)) == (low, high)
        assert f"{low} to {high}" in page
        assert all(run["best"] >= 280 for run in cifar(split) if run["method"] in ("fedphp", "pfedme"))


def cifar(split: str) -> list[dict[str, Any]]:
    wanted = {"data": "cifar100", "partition": split, "clients": 20, "own": False, "protocol": "corrected"}
    return [run for run in recorded() if {**wanted, "planned": 300, "patience": 50}.items() <= run.items()]


# Words that are meant.


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--methods GPFL", "--methods names 'GPFL', which is not a method; did you mean 'gpfl'?"),
        ("--methods FedAvg,gpfl", "--methods names 'FedAvg', which is not a method; did you mean 'fedavg'?"),
        ("--methods Per-FedAvg", "did you mean 'perfedavg'?"),
        ("--cells TOY/whole", "--cells names 'TOY/whole', which is not a cell; did you mean 'toy/whole'?"),
        ("--cells TOY", "did you mean 'toy'?"),
        ("--cells toy/hole", "did you mean 'toy/whole'?"),
        ("--set train.lr=abc", "toy/whole fedavg: train.lr is 'abc'; it must be a number"),
        ("--rounds 0", "train.rounds (--rounds) is 0"),
        ("--lr 0.1", "No such option '--lr': use --set train.lr=…"),
        ("--classes-per-client 2", "use --set partition.classes_per_client=…"),
    ],
)
def test_names_as_tables_print_them_are_refused_with_ours(command: Command, given: str, words: str) -> None:
    assert_rejected(command("reproduce", "toys", *given.split()), words)


# Tuned values.


@pytest.mark.usefixtures("toys")
def test_unequal_budgets_are_refused_until_they_are_equal(command: Command) -> None:
    pytest.importorskip("optuna")
    search = ("--data", "toy", "--rounds", 1, "--out", "search")
    for name, budget in (("gpfl", 3), ("fedprox", 1), ("fedavg", 1)):
        assert command("tune", name, *search, "--budget", budget).code == 0
    given = ("reproduce", "toys", "--rounds", 1, "--seeds", 0, "--methods", "fedavg,fedprox", "--tuned", "search", "--dry-run")
    assert_rejected(
        command(*given),
        "--tuned search was searched with unequal budgets (fedprox 1 candidate, gpfl 3 candidates): "
        "search fedprox with --budget 3, or gpfl with --budget 1, which trains nothing",
    )
    before = Path("search/gpfl/optuna.log").read_bytes()
    assert command("tune", "gpfl", *search, "--budget", 1).code == 0
    assert command(*given).code == 0, "gpfl's first candidate alone counts"
    assert Path("search/gpfl/optuna.log").read_bytes() == before
    assert command("tune", "gpfl,fedprox", *search, "--budget", 3).code == 0
    assert command(*given).code == 0


@pytest.mark.usefixtures("toys")
def test_candidates_beyond_the_budget_are_not_counted_in_tables(command: Command) -> None:
    pytest.importorskip("optuna")
    for budget in (3, 2):
        assert command("tune", "gpfl", "--data", "toy", "--rounds", 1, "--out", "search", "--budget", budget).code == 0
    given = ("--rounds", 1, "--seeds", 0, "--methods", "gpfl", "--tuned", "search", "--no-figures")
    assert command("reproduce", "toys", *given).code == 0
    assert "tuned on validation samples (candidates: gpfl 2; " in Path("results/toys/table.md").read_text()
