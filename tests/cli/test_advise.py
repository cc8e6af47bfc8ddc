"""The command `gpfl advise`: output, page and JSON, resuming, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, assert_error, toy_table
from user_files import lines, write

import gpfl
from gpfl.data import DATASETS
from gpfl.experiments import advise
from gpfl.experiments.repeats import RepeatStore

ADVISE = (
    "advise",
    "--data",
    "toy",
    "--methods",
    "fedper",
    "--repeats",
    5,
    "--rounds",
    2,
    "--rope",
    0.5,
    "--clients",
    2,
    "--out",
    "here",
)
"""A gain of 50 points is not to be expected, so that no learning curves are measured."""


def content_of(folder: str = "here") -> dict[str, object]:
    """Return advice.json without wall-clock times."""
    content = json.loads(Path(folder, "advice.json").read_text())
    for cost in content["costs"].values():
        del cost["seconds"]
    return content  # type: ignore[no-any-return]


def test_advice_is_printed_and_saved_and_finished_repeats_are_reused(command: Command) -> None:
    result = command(*ADVISE)
    assert (result.code, result.err) == (0, "")
    printed, content = result.out.splitlines(), content_of()
    assert printed[0] == "Training local, fedavg, fedper: 5 repeats of up to 2 rounds each."
    assert re.match(r"The first 2 repeats took \d+ s; the others take about \d+ s", printed[1])
    assert "toy, 2 clients, 5 repeats" in printed
    assert printed[-2] == "Page: here/advice.html. Numbers: here/advice.json"
    assert printed[-1] == content["sentence"]
    assert list(content["clients"]) == ["0", "1"]  # type: ignore[call-overload]
    assert list(content["costs"]) == ["local", "fedavg", "fedper"]  # type: ignore[call-overload]
    assert content["recommendation"] in ("alone", "global", "personalised", "unclear")
    page = Path("here/advice.html").read_text()
    assert page.count("<svg") == 1
    assert not re.search(r'<(script|link|img|iframe)\b|(src|href)="(?!#)|url\((?!#)|@import', page)  # nothing is loaded
    again = command(*ADVISE)
    assert "repeats took" not in again.out
    assert "5/5 repeats" not in again.out
    assert content_of() == content
    assert "now it is 3: choose another --out" in command(*ADVISE, "--rounds", 3).err


def test_interrupted_advice_resumes_exactly(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--methods", "fedavg", *ADVISE[5:-1])
    assert command(*ADVISE[:3], *options, "whole").code == 0
    real, added = RepeatStore.append, []

    def append(store: RepeatStore, record: object) -> None:
        if len(added) == 4:
            raise KeyboardInterrupt
        added.append(record)
        real(store, record)  # type: ignore[arg-type]

    monkeypatch.setattr(RepeatStore, "append", append)
    result = command(*ADVISE[:3], *options, "here")
    resume = "gpfl advise --data toy --methods fedavg --repeats 5 --rounds 2 --rope 0.5 --clients 2 --out here"
    assert (result.code, result.err) == (130, f"gpfl: stopped; resume with: {resume}\n")
    monkeypatch.setattr(RepeatStore, "append", real)
    assert command(*resume.split()[1:]).code == 0
    without_command = [{**content_of(folder), "command": ""} for folder in ("here", "whole")]
    assert without_command[0] == without_command[1]


def test_unclear_answers_come_with_learning_curves(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "FRACTIONS", (0.5,))
    result = command(*ADVISE, "--metric", "log_loss", "--rope", 0)
    assert "50% of the training samples, local: 5/5 repeats" in result.out
    assert "more samples for" in result.out
    content = content_of()
    assert (content["metric"], content["region_of_practical_equivalence"]) == ("log_loss", 0)
    assert content["clients"]["0"]["alone"] > 0  # type: ignore[index]  # a loss, not its negative
    curve = content["learning_curve"]
    assert curve["fractions"] == [0.5, 1.0]  # type: ignore[index]
    assert np.shape(curve["alone"]) == (5, 2, 2)  # type: ignore[index]  # repeats, fractions, clients


def test_own_files_are_advised_on_and_names_are_escaped(command: Command) -> None:
    rng = np.random.default_rng(0)
    rows = [(*rng.normal(size=2).round(3), f"<b>{k % 2}</b>", k % 3 % 2) for k in range(80)]
    write(Path("visits.csv"), lines(("a", "b", "site", "ill"), *rows))
    options = ("--client", "site", "--label", "ill", "--methods", "fedavg-ft", "--repeats", 5, "--rounds", 2, "--rope", 0.5)
    result = command("advise", "--data", "visits.csv", *options)
    assert (result.code, result.err) == (0, "")
    assert "<b>0</b>" in result.out
    page = Path("runs/visits-advice/advice.html").read_text()
    assert "&lt;b&gt;0&lt;/b&gt;" in page
    assert "<b>0</b>" not in page


# Refusals.


def split_table() -> gpfl.Table:
    """Return toys that say which samples are for testing."""
    table = toy_table(120)
    clients = np.arange(120) % 4
    return gpfl.Table(table.x, table.y, name="toy", client_ids=clients, splits=np.where(np.arange(120) < 90, 0, 2))


@pytest.mark.parametrize(
    ("arguments", "phrases"),
    [
        (("--methods", "fedpr"), ("unknown method 'fedpr'", "fedper")),
        (("--repeats", 4), ("4 is not in the range x>=5",)),
        (("--rope", -1), ("-1.0 is not in the range x>=0",)),
        (
            ("--validation-fraction", 0),
            ("is 0, but gpfl advise chooses the method on validation samples", "never on test samples", "0.2"),
        ),
        (("--select", "last"), ("is 'last', but gpfl advise chooses rounds on", "validation samples: leave it out")),
        (("--metric", "ece"), ("is 'ece', by which always predicting", "use log_loss or brier")),
        (("--partition-rng", "pfllib"), ("leave out --partition-rng pfllib",)),
        (("--clients", 1, "--total-clients", 2), ("data 'toy' has one client", "at least 2", "--client")),
        (("--set", "ditto.mu=1"), ("--set ditto.… is for a method that is not run",)),
    ],
)
def test_bad_options_are_refused(command: Command, arguments: tuple[object, ...], phrases: tuple[str, ...]) -> None:
    assert_error(command(*ADVISE, *arguments), *phrases)
    assert not Path("here").exists()


def test_a_manifest_is_refused(command: Command) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--out", "run").code == 0
    result = command("advise", "--federation", "run/federation.toml", "--data", "toy")
    assert_error(result, "a manifest fixes every client's samples", "leave out --federation")


def test_data_with_their_own_test_samples_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "toy", type(DATASETS["toy"])(make=split_table))
    assert_error(command(*ADVISE, "--partition", "natural"), "data 'toy' says which samples are for testing", "--split-column")


def test_a_table_of_one_client_is_refused(command: Command) -> None:
    write(Path("visits.csv"), lines(("a", "site", "ill"), *((k, "north", k % 2) for k in range(40))))
    result = command("advise", "--data", "visits.csv", "--client", "site", "--label", "ill")
    assert_error(result, "data 'visits.csv' has one client, north", "--client")


def test_clients_without_validation_samples_are_refused(command: Command) -> None:
    rows = [(k, f"p{k if k < 40 else 40 + k % 2}", "north" if k < 40 else "south", k % 2) for k in range(80)]
    write(Path("visits.csv"), lines(("a", "patient", "site", "ill"), *rows))
    options = ("--client", "site", "--label", "ill", "--group", "patient")
    assert_error(command("advise", "--data", "visits.csv", *options), "client south has no validation samples")


def test_a_metric_that_is_undefined_everywhere_is_refused(command: Command) -> None:
    rows = [(k, "north" if k < 20 else "south", int(k < 20)) for k in range(40)]  # one class at each client
    write(Path("visits.csv"), lines(("a", "site", "ill"), *rows))
    options = ("--client", "site", "--label", "ill", "--metric", "auroc")
    result = command("advise", "--data", "visits.csv", *options)
    assert_error(result, "AUROC is undefined in most of 20 repeats at every client", "choose --metric accuracy")
