"""Models for clients that were not in training, from their own files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_federation
from patients import fit as fit_patients
from patients import make_rows, write_rows
from user_files import lines, message_of, write, write_image

import gpfl
from gpfl.core import tree
from gpfl.training.personalize import NewClient, personalize_data


def newcomer(path: Path, n: int = 40, name: str = "west") -> Path:
    return write_rows(path, [(row[0], row[1], name, *row[3:]) for row in make_rows(n, seed=7)])


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> gpfl.Result:
    return fit_patients(tmp_path_factory.mktemp("patients"), scale="local", validation_fraction=0.3, out=None)


@pytest.mark.parametrize("scale", ["federated", "local", "none"])
def test_the_model_is_that_of_the_training_rows(scale: str, tmp_path: Path) -> None:
    result = fit_patients(tmp_path, scale=scale, method="ditto", lr=1e-4 if scale == "none" else 0.05, out=None)
    path = newcomer(tmp_path / "west.csv")
    new = personalize_data(result, path, name="")
    assert (new.model.name, new.n_samples) == ("west", {"train": 30, "validation": 0, "test": 10})
    assert new.model.preprocessor is not None
    # Which rows are for training is seen in the metrics; the encoding is computed here from the text of the file.
    transform, y = new.model.preprocessor.transform, new.model.encode_labels([row[-1] for row in make_rows(40, seed=7)])
    raw = gpfl.federate(path, client="hospital", label="outcome", ignore=("patient",), missing="mean").table.raw
    assert raw is not None
    train = find_training_rows(result, raw.values[:, 1])
    if scale == "local":
        ages = np.array([float(row[4]) for row in make_rows(40, seed=7)])
        assert new.model.preprocessor.scaling["age"] == pytest.approx((ages[train].mean(), ages[train].std()), rel=1e-9)

    def x(rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(transform(raw.select(rows)))

    expected = result.personalize(x(train), y[train], name="west")
    expected.encoder = new.model.encoder
    assert np.abs(new.model.predict_proba(path) - expected.predict_proba(path)).max() < 1e-6
    test = np.setdiff1d(np.arange(40), train)
    assert new.reports["personal model"].overall.values["accuracy"] == expected.score(
        x(test), np.array(["ill", "well"])[y[test]]
    )


def find_training_rows(result: gpfl.Result, ages: np.ndarray) -> np.ndarray:
    """The first 30 of 40 rows in the order that the partition's seed gives the client after the last one."""
    from gpfl.core.randomness import generator

    seed = int(str(result.federation.partition["seed"]))
    return generator(seed, "cut", len(result.federation)).permutation(np.arange(len(ages)))[:30]


def test_test_rows_do_not_change_the_model(result: gpfl.Result, tmp_path: Path) -> None:
    rows = make_rows(40, seed=7)
    columns = ("patient", "chol", "pain", "age", "outcome")
    path = write_rows(tmp_path / "west.csv", rows, columns)
    new = personalize_data(result, path, name="")
    assert new.n_samples == {"train": 21, "validation": 9, "test": 10}
    test = np.setdiff1d(np.arange(40), find_training_rows(result, np.arange(40)))
    for k in test:
        rows[k] = (rows[k][0], "999", *rows[k][2:4], "1.0", "ill")
    other = personalize_data(result, write_rows(tmp_path / "west.csv", rows, columns), name="")
    assert other.model.preprocessor == new.model.preprocessor
    assert all(
        torch.equal(one, two) for one, two in zip(tree.leaves(other.model.weights), tree.leaves(new.model.weights), strict=True)
    )
    assert other.model.threshold == new.model.threshold
    assert other.reports["personal model"].overall.values != new.reports["personal model"].overall.values


def test_the_threshold_is_chosen_on_validation_rows(result: gpfl.Result, tmp_path: Path) -> None:
    path = newcomer(tmp_path / "west.csv", 60)
    new = personalize_data(result, path, name="", rounds=3)
    assert new.model.threshold is not None
    assert new.model.threshold.n_samples == new.n_samples["validation"] == 14
    assert any(note.startswith("Decision threshold for ") for note in new.notes)
    assert personalize_data(result, path, name="", rounds=1, validation_fraction=0.0).model.threshold is None


def test_the_shared_model_is_measured_where_the_method_shares_a_whole_net(tmp_path: Path) -> None:
    path = newcomer(tmp_path / "west.csv")
    for method, note in (
        ("fedavg", "fedavg keeps nothing private, so the model of client west is the shared one."),
        ("fedper", "fedper shares no complete net, so a new client has no model without training."),
        ("gpfl", "gpfl shares no complete net, so a new client has no model without training."),
        ("ditto", None),
    ):
        result = fit_patients(tmp_path, method=method, rounds=2, out=None)
        new = personalize_data(result, path, name="", rounds=2)
        assert [line for line in new.notes if line.startswith(method)] == ([note] if note else [])
        shared = result.shared_model()
        assert ("shared model" in new.reports) == (shared is not None) == (method in ("fedavg", "ditto"))
        if shared is not None:
            x = torch.randn(5, *result.federation.table.shape, generator=torch.Generator().manual_seed(0))
            net, state = result.engine.method.net, result.outcome.selected.shared
            parts = {part: net.make_module(part) for part in ("base", "head")}
            for part, module in parts.items():
                module.load_state_dict(state[part])  # type: ignore[arg-type]
            with torch.no_grad():
                assert np.allclose(shared.logits(x), parts["head"](parts["base"](x)).numpy(), atol=1e-6)


def test_the_client_of_the_rows_is_found_by_the_column_of_the_run(result: gpfl.Result, tmp_path: Path) -> None:
    rows = make_rows(60, seed=7)
    both = write_rows(tmp_path / "two.csv", [(row[0], row[1], "we"[k % 2] * 2, *row[3:]) for k, row in enumerate(rows)])
    assert message_of(lambda: personalize_data(result, both, name="")) == (
        f"column 'hospital' of {both} names 2 clients: choose one with --client (ee, ww)"
    )
    new = personalize_data(result, both, name="ww", rounds=1)
    assert (new.model.name, sum(new.n_samples.values())) == ("ww", 30)
    assert message_of(lambda: personalize_data(result, both, name="w")) == (
        f"column 'hospital' of {both} does not name client 'w'; did you mean 'ww'?"
    )
    own = newcomer(tmp_path / "north.csv", name="north")
    assert message_of(lambda: personalize_data(result, own, name="")) == (
        "client 'north' took part in training and has a model: choose another name with --client"
    )
    none = newcomer(tmp_path / "none.csv", name="")
    assert message_of(lambda: personalize_data(result, none, name="")) == (
        f"column 'hospital' of {none} is empty: name the client there, or leave the column out"
    )
    bare = write_rows(tmp_path / "a.b.csv", rows, ("chol", "pain", "age", "outcome"))
    assert personalize_data(result, bare, name="", rounds=0).model.name == "a"
    assert message_of(lambda: personalize_data(result, bare, name="x" * 65)) == (
        "the client name 'xxxxxxxxxxxxxxxxxxxx…' names a file and has over 64 bytes: shorten --client"
    )


def test_too_few_rows_and_wrong_labels_are_errors(result: gpfl.Result, tmp_path: Path) -> None:
    path = newcomer(tmp_path / "west.csv", 1)
    assert message_of(lambda: personalize_data(result, path, name="", validation_fraction=0.0)) == (
        "client west has 1 sample, which leaves none for training: give more, or change --test-fraction"
    )
    odd = write(tmp_path / "odd.csv", newcomer(path).read_text().replace(",ill", ",dead"))
    assert message_of(lambda: personalize_data(result, odd, name="")).endswith(
        "which is not among the classes of the run (ill, well): correct the file"
    )
    assert message_of(lambda: personalize_data(result, path, name="", label="outcom")) == (
        f"--label is 'outcom', which is not a column of {path}; did you mean 'outcome'?"
    )
    assert personalize_data(result, path, name="", test_fraction=0.0, rounds=1).reports == {}


def test_the_files_are_read_as_those_of_the_run(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = ("u", "v", "site", "patient", "part", "label")

    def rows(n: int, site: str) -> list[tuple[object, ...]]:
        parts = ["test" if k // 3 % 4 == 0 else "train" for k in range(n)]
        values = [("" if k == 4 else ">9" if k == 5 else f"{rng.normal():.3f}") for k in range(n)]
        return [(values[k], k % 5, site, f"p{k // 3}", parts[k], "" if k == 7 else ["no", "yes"][k % 2]) for k in range(n)]

    path = write(tmp_path / "a.csv", lines(columns, *rows(48, "a"), *rows(48, "b")))
    reading = {"client": "site", "label": "label", "missing": "drop", "missing_labels": "drop", "unreadable": "missing"}
    west = write(tmp_path / "west.csv", lines(columns, *rows(48, "west")))
    result = gpfl.fit("fedper", gpfl.federate(path, **reading, ignore=("patient",)), rounds=1)
    new = personalize_data(result, west, name="", rounds=1)
    assert new.n_samples == {"train": 33, "validation": 0, "test": 12}, "of 48 rows, 3 are incomplete"
    assert {"2 rows with missing values left out.", "1 row without a label left out."} <= set(new.notes)
    assert message_of(lambda: personalize_data(result, west, name="", test_fraction=0.5)) == (
        "--test-fraction is given, but the file has test samples already: leave it out"
    )
    grouped = gpfl.federate(path, **reading, ignore=("part",), group="patient")
    fitted = gpfl.fit("fedper", grouped, rounds=1)
    assert personalize_data(fitted, west, name="", rounds=1).n_samples["test"] > 0
    one = write(tmp_path / "one.csv", lines(columns, *((*row[:3], "p", *row[4:]) for row in rows(48, "west"))))
    assert message_of(lambda: personalize_data(fitted, one, name="")) == (
        "client west has 45 samples, which leaves none for testing: give more, or change --test-fraction"
    )


def test_images_and_arrays_of_a_new_client(tmp_path: Path) -> None:
    for client in ("a", "b", "west"):
        for k in range(12):
            write_image(tmp_path / ("new" if client == "west" else "train") / client / ("cat", "dog")[k % 2] / f"{k}.png", k)
    result = gpfl.fit("fedper", gpfl.federate(tmp_path / "train"), rounds=1, lr=0.05)
    new = personalize_data(result, tmp_path / "new" / "west", name="", rounds=1)
    assert (new.model.name, sum(new.n_samples.values())) == ("west", 12)
    assert new.model.predict(tmp_path / "new").shape == (12,)
    arrays = gpfl.fit("fedper", toy_federation(), net="mlp", rounds=1, lr=0.1)
    table = arrays.federation.table
    np.savez(tmp_path / "late.npz", x=np.asarray(table.x[:30]), y=np.asarray(table.y[:30]))
    late: NewClient = personalize_data(arrays, tmp_path / "late.npz", name="", rounds=1)
    assert (late.model.name, late.n_samples["train"]) == ("late", 22)
    assert late.reports["personal model"].overall.n_samples == 8
