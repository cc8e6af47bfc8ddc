"""Predictions for new samples: equal to the engine's, by the client that a flag or a column names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from conftest import toy_federation
from patients import COLUMNS, HOSPITALS, LABEL, fit, make_rows, write_rows
from user_files import lines, message_of, write, write_image

import gpfl
from gpfl.data.files.writer import check_output, format_table
from gpfl.inference.inputs import ReadOptions
from gpfl.inference.metrics import softmax
from gpfl.inference.predict import NewPredictions, evaluate, predict

BY_HOSPITAL = {"client_column": "hospital"}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> gpfl.Result:
    return fit(tmp_path_factory.mktemp("patients"), validation_fraction=0.3)


@pytest.fixture(scope="module")
def run(result: gpfl.Result) -> Path:
    return folder_of(result) / "run"


def folder_of(result: gpfl.Result) -> Path:
    source = result.federation.table.source
    assert source is not None
    return Path(source.config_name).parent


def engine_probabilities(result: gpfl.Result) -> dict[str, np.ndarray]:
    """The engine's predictions of each client's test samples, without a saved model."""
    state = result.outcome.selected
    logits = result.engine.predict(state.shared, state.private, state.round, "test")
    return {shard.name: softmax(own.numpy()) for shard, own in zip(result.federation.shards, logits, strict=True)}


def write_test_rows(result: gpfl.Result, path: Path, columns: tuple[str, ...] = COLUMNS) -> tuple[Path, np.ndarray]:
    """Write all clients' test rows in a mixed order; return the file and the engine's predictions in that order."""
    rows, probabilities = make_rows(), engine_probabilities(result)
    pairs = [
        (rows[sample], p)
        for shard in result.federation.shards
        for sample, p in zip(shard.test, probabilities[shard.name], strict=True)
    ]
    order = np.random.default_rng(3).permutation(len(pairs))
    write_rows(path, [pairs[k][0] for k in order], columns)
    return path, np.stack([pairs[k][1] for k in order])


@pytest.mark.parametrize("scale", ["federated", "local", "none"])
def test_predictions_of_raw_rows_equal_those_of_the_engine(scale: str, tmp_path: Path) -> None:
    result = fit(tmp_path, scale=scale, lr=1e-4 if scale == "none" else 0.1)
    path, expected = write_test_rows(result, tmp_path / "new.csv", ("age", "pain", "patient", "hospital", "chol"))
    found = predict(tmp_path / "run", path, **BY_HOSPITAL)
    assert np.abs(found.probabilities - expected).max() < 1e-6
    assert expected.std() > 1e-3, "not all the same"
    for name in HOSPITALS:
        model, mine = gpfl.load_model(tmp_path / "run", name), found.client_of == name
        assert mine.any()
        assert np.abs(model.predict_proba(path)[mine] - expected[mine]).max() < 1e-6
        assert np.abs(predict(tmp_path / "run", path, client=name).probabilities[mine] - expected[mine]).max() < 1e-6


@pytest.mark.parametrize("scale", ["federated", "local", "none"])
def test_metrics_of_the_test_rows_are_those_of_the_run(scale: str, tmp_path: Path) -> None:
    result = fit(tmp_path, scale=scale, validation_fraction=0.3, lr=1e-4 if scale == "none" else 0.1)
    path, _ = write_test_rows(result, tmp_path / "new.csv")
    saved = json.loads((tmp_path / "run" / "metrics.json").read_text())
    for threshold, thresholds in ((0.5, {}), (None, saved.get("thresholds", {}).get("test", {}))):
        content = evaluate(tmp_path / "run", path, **BY_HOSPITAL, label=LABEL, threshold=threshold).to_dict()
        found = json.loads(json.dumps(content))
        assert found["bootstrap"] == saved["bootstrap"]
        for name in (*HOSPITALS, None):
            own, expected = (
                content["test"]["clients"][name] if name else content["test"]["overall"] for content in (found, saved)
            )
            decided = thresholds.get("clients", {}).get(name) if name else thresholds.get("overall")
            for metric, value in {**expected, **(decided or {})}.items():
                if isinstance(value, float):
                    assert own[metric] == pytest.approx(value, abs=1e-6), (name, metric)
            assert own["samples"] == expected["samples"]


def test_the_threshold_of_validation_samples_decides(result: gpfl.Result, run: Path, tmp_path: Path) -> None:
    assert any(own is not None and own.value != 0.5 for own in result.thresholds.values())
    path = write_rows(tmp_path / "new.csv", make_rows(90, seed=1))
    found, given = predict(run, path, **BY_HOSPITAL), predict(run, path, **BY_HOSPITAL, threshold=0.9)
    values = {name: 0.5 if own is None else own.value for name, own in result.thresholds.items()}
    limits = np.array([values[name] for name in found.client_of])
    assert np.array_equal(found.decisions, found.probabilities[:, 1] >= limits)
    assert not np.array_equal(found.decisions, found.probabilities[:, 1] >= 0.5)
    assert np.array_equal(given.decisions, found.probabilities[:, 1] >= 0.9)
    assert given.describe()[1] == "Decision threshold for 'well': 0.9 (--threshold)."
    assert found.describe()[1].startswith("Decision threshold for 'well': ")
    for name in HOSPITALS:
        model, mine = gpfl.load_model(run, name), found.client_of == name
        assert np.array_equal(model.predict(path)[mine], np.array(["ill", "well"])[found.decisions[mine]])


def test_arrays_and_lists_of_rows_are_raw(run: Path, tmp_path: Path) -> None:
    """Their columns are those of training, in its order: numbers in them are not taken for inputs that are encoded already."""
    model = gpfl.load_model(run, "north")
    assert model.preprocessor is not None
    names = list(model.preprocessor.schema.index)
    path = write_rows(tmp_path / "new.csv", make_rows(40, seed=1))
    expected = model.predict_proba(path)
    frame = pl.read_csv(path).select(names)
    rows = [list(row) for row in frame.iter_rows()]
    for given in (rows, np.array(rows, dtype=object), np.array(pl.read_csv(path, infer_schema=False).select(names))):
        assert np.array_equal(model.predict_proba(given), expected)
    order = "chol, pain, age"
    assert ", ".join(names) == order
    for wrong, shape in ((np.zeros((2, 2)), "(2, 2)"), ([rows[0], rows[1][:2]], "(2,)"), ([1.0, 2.0, 3.0], "(3,)")):
        assert message_of(lambda wrong=wrong: model.predict(wrong)).startswith(
            f"x has shape {shape}; give rows of the 3 columns of the model in this order: {order}; or give a data frame"
        )


def test_a_new_client_of_raw_rows_gets_the_model_of_its_file(result: gpfl.Result, tmp_path: Path) -> None:
    rows = make_rows(30, seed=2)
    path = write_rows(tmp_path / "west.csv", rows)
    y = [("ill", "well").index(row[-1]) for row in rows]
    cells = [[row[1], row[3], row[4]] for row in rows]
    from_file, from_list = (result.personalize(x, y, rounds=1) for x in (path, cells))
    assert np.array_equal(from_file.predict_proba(path), from_list.predict_proba(path))
    assert not np.array_equal(from_file.predict_proba(path), result.clients[0].predict_proba(path))


def test_columns_of_predictions_keep_ids_as_they_are(run: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "new.csv", make_rows(6, seed=1))
    columns = predict(run, path, client="north", keep=["patient", "age"]).to_columns(["patient", "age"])
    assert list(columns) == ["patient", "age", "prediction", "probability_ill", "probability_well"]
    assert columns["patient"].tolist() == [f"{k:04d}" for k in range(6)]
    assert columns["age"].tolist() == [row[4] for row in make_rows(6, seed=1)]
    pl.read_csv(path).write_parquet(tmp_path / "new.parquet")
    kept = predict(run, tmp_path / "new.parquet", client="north").to_columns(["patient"])
    assert kept["patient"].tolist() == list(range(6)), "numbers of a Parquet file stay numbers"
    for name, message in (
        ("patinet", f"--keep names 'patinet', which is not a column of {path}; did you mean 'patient'?"),
        ("prediction", f"--keep names 'prediction', which is not a column of {path}; known: "),
    ):
        assert message_of(lambda name=name: predict(run, path, client="north").to_columns([name])).startswith(message)
    both = write(tmp_path / "both.csv", path.read_text().replace("patient", "prediction"))
    assert message_of(lambda: predict(run, both, client="north").to_columns(["prediction"])) == (
        "--keep names column 'prediction', which is also a column of the predictions: rename it"
    )


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl"])
def test_predictions_are_written_in_every_format(suffix: str, run: Path, tmp_path: Path) -> None:
    rows = make_rows(6, seed=1)
    path = write_rows(tmp_path / "new.csv", [("", *rows[0][1:]), ('"a ""b"", c"', *rows[1][1:]), *rows[2:]])
    found = predict(run, path, client="north", keep=["patient"])
    file = tmp_path / f"out{suffix}"
    file.write_bytes(format_table(found.to_columns(["patient"]), suffix))
    read = {".csv": pl.read_csv, ".parquet": pl.read_parquet, ".jsonl": pl.read_ndjson}[suffix](file)
    assert read["patient"].to_list()[:2] == [None, 'a "b", c']
    assert np.array_equal(read["probability_ill"].to_numpy(), found.probabilities[:, 0]), "to the last digit"
    assert read["prediction"].to_list() == [found.model.class_names[k] for k in found.decisions]


def test_outputs_are_not_overwritten(tmp_path: Path) -> None:
    suffixes = (".csv", ".jsonl")
    path = write(tmp_path / "a.csv", "1")
    check_output(path, suffixes, overwrite=True)
    assert message_of(lambda: check_output(path, suffixes, overwrite=False)) == (
        f"{path} exists and is not overwritten: choose another file, or add --force"
    )
    assert message_of(lambda: check_output(tmp_path / "a.xlsx", suffixes, overwrite=True)) == (
        f"cannot write {tmp_path}/a.xlsx: its name must end in .csv or .jsonl"
    )
    (tmp_path / "b.csv").mkdir()
    assert message_of(lambda: check_output(tmp_path / "b.csv", suffixes, overwrite=True)) == (
        f"cannot write {tmp_path}/b.csv: it is a folder; name a file"
    )


# Clients.


def test_the_client_must_be_known(run: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "new.csv", make_rows(6))
    assert message_of(lambda: predict(run, path)) == (
        f"{run} has the models of 3 clients: name one with --client (St. Mary, north, south), or the column that names the "
        "client of each row with --client-column (hospital may be one)"
    )
    assert message_of(lambda: predict(run, tmp_path / "absent.csv")).endswith("client of each row with --client-column")
    assert message_of(lambda: predict(run, path, client="nort")) == (
        f"{run} has no model of a client 'nort'; did you mean 'north'?"
    )
    assert message_of(lambda: predict(run, path, client="north", client_column="hospital")) == (
        "--client and --client-column exclude each other: leave one out"
    )
    assert message_of(lambda: predict(run, path, client_column="hospitl")) == (
        f"--client-column is 'hospitl', which is not a column of {path}; did you mean 'hospital'?"
    )


def test_rows_of_unknown_clients_are_an_error_that_names_them(run: Path, tmp_path: Path) -> None:
    rows = make_rows(6)
    new = [rows[0], *((row[0], row[1], name, *row[3:]) for row, name in zip(rows[1:4], "yxx", strict=True))]
    path = write_rows(tmp_path / "new.csv", new)
    assert message_of(lambda: predict(run, path, **BY_HOSPITAL)) == (
        f"column 'hospital' names 2 clients without a model: x, y, first in new.csv, line 3; {run} has models of St. Mary, "
        "north, south: correct the names, or make a model with gpfl personalize --client x"
    )
    path = write_rows(tmp_path / "new.csv", [rows[0], (*rows[1][:2], "", *rows[1][3:])])
    assert message_of(lambda: predict(run, path, **BY_HOSPITAL)) == (
        "column 'hospital' has 1 missing value, in new.csv, line 3: fill in the file"
    )


def test_models_of_different_runs_are_not_mixed(run: Path, tmp_path: Path) -> None:
    other = fit(tmp_path, scale="federated", rounds=1)
    table, folder = tmp_path / "new.csv", tmp_path / "mixed"
    write_rows(table, make_rows(6))
    for model in (gpfl.load_model(run, "north"), other.clients[-1]):
        model.save(folder / f"client-{model.name}.safetensors")
    assert len(predict(folder, write_rows(table, make_rows(6)[:2]), **BY_HOSPITAL)) == 2, "of runs on the same data"
    plain = gpfl.fit("fedavg", toy_federation(), net="mlp", rounds=1, lr=0.1).clients[0]
    plain.name = "south"
    plain.save(folder / "client-south.safetensors")
    assert message_of(lambda: predict(folder, table, **BY_HOSPITAL)) == (
        "the models of clients 'north' and 'south' have different classes, so they are not from the same run: predict the rows "
        "of each client with its own --client"
    )


def test_a_threshold_is_for_two_classes_and_below_one(run: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "new.csv", make_rows(6))
    assert message_of(lambda: predict(run, path, **BY_HOSPITAL, threshold=1.5)) == (
        "--threshold is 1.5; it must be above 0 and below 1, such as 0.5"
    )
    gpfl.fit("fedavg", toy_federation(), net="mlp", rounds=1, lr=0.1, out=tmp_path / "three")
    x = write(tmp_path / "x.npz", b"")
    assert message_of(lambda: predict(tmp_path / "three", x, client="0", threshold=0.3)) == (
        "--threshold is for models of two classes; this one has 3: leave it out"
    )


# Labels.


def test_labels_are_found_by_name_and_must_be_classes_of_the_model(run: Path, tmp_path: Path) -> None:
    rows = make_rows(8)
    path = write_rows(tmp_path / "new.csv", rows)
    found = evaluate(run, path, **BY_HOSPITAL)
    assert found.label == LABEL
    assert found.report.overall.n_samples == 8
    assert message_of(lambda: evaluate(run, path, **BY_HOSPITAL, label="outcme")) == (
        f"--label is 'outcme', which is not a column of {path}; did you mean 'outcome'?"
    )
    bare = write_rows(tmp_path / "bare.csv", rows, COLUMNS[:-1])
    assert message_of(lambda: evaluate(run, bare, **BY_HOSPITAL)) == (
        f"{bare} has no label column; the model was trained on 'outcome': name it with --label; the columns are "
        "patient, chol, hospital, pain, age"
    )
    renamed = write(tmp_path / "renamed.csv", path.read_text().replace("outcome", "Label"))
    assert evaluate(run, renamed, **BY_HOSPITAL).report == found.report
    wrong = write_rows(tmp_path / "wrong.csv", [*rows, (*rows[0][:-1], "dead")])
    assert message_of(lambda: evaluate(run, wrong, **BY_HOSPITAL)) == (
        "column 'outcome' holds 'dead' in wrong.csv, line 10, which is not among the classes of the model (ill, well): "
        "correct the file"
    )


def test_rows_without_a_label_are_left_out_on_request(run: Path, tmp_path: Path) -> None:
    rows = make_rows(12)
    path = write_rows(tmp_path / "new.csv", [*rows[:9], *((*row[:-1], "") for row in rows[9:])])
    assert message_of(lambda: evaluate(run, path, **BY_HOSPITAL)) == (
        "column 'outcome' has 3 missing values, first in new.csv, line 11: fill in the file, or leave such rows out with "
        "--missing-labels drop"
    )
    found = evaluate(run, path, **BY_HOSPITAL, missing_labels="drop")
    assert found.describe()[-1] == "3 rows without a label left out."
    nine = evaluate(run, write_rows(tmp_path / "nine.csv", rows[:9]), **BY_HOSPITAL)
    assert found.report.overall.n_samples == nine.report.overall.n_samples == 9
    assert found.report.overall.values == pytest.approx(nine.report.overall.values, abs=1e-6)
    path = write_rows(tmp_path / "none.csv", [(*row[:-1], "") for row in rows])
    assert message_of(lambda: evaluate(run, path, **BY_HOSPITAL, missing_labels="drop")) == (
        f"column 'outcome' of {path} has no label in any row"
    )


# Texts, images and arrays.


def test_a_folder_with_a_file_per_client_names_the_clients(result: gpfl.Result, run: Path, tmp_path: Path) -> None:
    rows = make_rows(30, seed=1)
    whole = predict(run, write_rows(tmp_path / "new.csv", rows), **BY_HOSPITAL)
    hospitals = [row[COLUMNS.index("hospital")] for row in rows]
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name in HOSPITALS:
        write_rows(folder / f"{name}.csv", [row for row, own in zip(rows, hospitals, strict=True) if own == name])
    found = predict(run, folder, client_column="client")
    assert found.client_of.tolist() == sorted(hospitals)
    order = np.argsort(hospitals, kind="stable")
    np.testing.assert_allclose(found.probabilities, whole.probabilities[order], atol=1e-6)
    assert message_of(lambda: predict(run, folder)).endswith("with --client-column (client, hospital may be one)")
    (folder / "south.csv").write_text("age,pain\n50,none\n")
    assert "all files must have the same columns" in message_of(lambda: predict(run, folder, client_column="client"))
    split = tmp_path / "split"
    (split / "north").mkdir(parents=True)
    write_rows(split / "north" / "train.csv", rows)
    assert "holds a train split" in message_of(lambda: predict(run, split, client_column="client"))


def test_images_are_predicted_by_folder_and_listed_by_file(tmp_path: Path) -> None:
    for client in ("a", "b"):
        for k in range(12):
            write_image(tmp_path / "train" / client / ("cat", "dog")[k % 2] / f"{k}.png", k)
    result = gpfl.fit("fedper", gpfl.federate(tmp_path / "train"), rounds=1, lr=0.05, out=tmp_path / "run")
    pixels = {name: write_image(tmp_path / "new" / name, seed=50 + k) for k, name in enumerate(("b/dog/1.png", "a/cat/2.png"))}
    found = predict(tmp_path / "run", tmp_path / "new", client_column="client")
    columns = found.to_columns()
    assert columns["file"].tolist() == ["a/cat/2.png", "b/dog/1.png"]
    for k, name in enumerate(columns["file"]):
        client = result.clients["ab".index(name[0])]
        assert np.abs(client.predict_proba(pixels[name][None])[0] - found.probabilities[k]).max() < 1e-6
    assert evaluate(tmp_path / "run", tmp_path / "new", client_column="client").report.overall.n_samples == 2
    one = predict(tmp_path / "run", tmp_path / "new" / "a" / "cat" / "2.png", client="a")
    assert one.to_columns()["file"].tolist() == ["2.png"]
    assert one.describe()[0].startswith("2.png: 1 sample, ")
    assert np.array_equal(one.probabilities, found.probabilities[:1])


def test_arrays_are_predicted_and_evaluated_by_their_client(tmp_path: Path) -> None:
    result = gpfl.fit("fedper", toy_federation(), net="mlp", rounds=1, lr=0.1, out=tmp_path / "run")
    x, y = np.asarray(result.federation.table.x), np.asarray(result.federation.table.y)
    names = np.repeat(["0", "3"], [10, 20])
    np.savez(tmp_path / "new.npz", x=x[:30], y=y[:30], site=names)
    found = evaluate(tmp_path / "run", tmp_path / "new.npz", client_column="site", label="y")
    for name in ("0", "3"):
        own = result.clients[int(name)]
        assert np.abs(own.predict_proba(x[:30][names == name]) - found.predictions.probabilities[names == name]).max() < 1e-6
        assert found.report.clients[name].values["accuracy"] == own.score(x[:30][names == name], y[:30][names == name])


def test_rows_with_missing_values_that_are_not_filled(tmp_path: Path) -> None:
    rows = [(k, "" if k == 3 else k % 5, "ab"[k % 2]) for k in range(30)]
    path = write(tmp_path / "a.csv", lines(("u", "v", "label"), *rows))
    federation = gpfl.federate(path, partition="dirichlet", clients=2, beta=10.0, missing="drop")
    gpfl.fit("fedavg", federation, rounds=1, out=tmp_path / "run")

    def measure(options: ReadOptions | None = None) -> NewPredictions:
        return evaluate(tmp_path / "run", path, options, client="1").predictions

    assert message_of(measure) == (
        "column 'v' has 1 missing value, in a.csv, line 5, and the model does not fill missing values: fill in the data, or "
        "train with --missing mean"
    )
    found = measure(ReadOptions(missing="drop"))
    assert len(found) == 29
    assert found.describe()[-1] == "1 row with missing values left out."
