"""Exported models: the same probabilities without gpfl, in a process of their own."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import toy_federation
from exported import run_example, run_here
from patients import make_rows, write_rows
from torch import nn
from user_files import lines, message_of, write, write_image

import gpfl
from gpfl.core import tree
from gpfl.core.net import InputSpec
from gpfl.core.tree import Tree
from gpfl.data.columns import ColumnSchema, Schema
from gpfl.data.encoders import ImageFormat, Tokenizer
from gpfl.inference import ClientModel
from gpfl.inference.client_model import OutputSpec
from gpfl.inference.inputs import Encoder
from gpfl.inference.model_card import FILES
from gpfl.inference.threshold import Threshold
from gpfl.methods import METHODS
from gpfl.models.architectures import CNN4, MLP, FastText, ResNet18
from gpfl.models.custom import CustomNet, build_net

every_format = pytest.mark.parametrize("format", list(FILES))
NAMES = ("ill", "well")


def make_model(
    net: CustomNet,
    spec: InputSpec,
    encoder: Encoder | None = None,
    classes: tuple[str, ...] = NAMES,
    threshold: float | None = None,
    method: str = "fedavg",
) -> ClientModel:
    """Return a model with random weights and, if it has BatchNorm, random statistics."""
    built = build_net(net, spec.probe(), len(classes))
    weights: Tree = built.init(3)
    generator = torch.Generator().manual_seed(0)
    if "batch_norm_stats" in weights:
        for part in weights["batch_norm_stats"].values():  # type: ignore[union-attr]
            part.update({name: value + torch.rand(value.shape, generator=generator) / 20 for name, value in part.items()})  # type: ignore[union-attr]
    own = None if threshold is None else Threshold(threshold, "balanced_accuracy", 40, 0.8, 0.7)
    outputs = OutputSpec(classes, "outcome")
    return ClientModel(METHODS[method]().bind(built, lr=0.1, epochs=1), weights, "north", spec, encoder, outputs, own)


def check(model: ClientModel, folder: Path, format: str, data: Any, *files: Path, alone: bool = False) -> np.ndarray:
    """Assert that the exported model predicts files as the model predicts `data`, and return the probabilities."""
    model.export(folder, format)
    predictions, probabilities = run_example(folder, *files, alone=alone)
    expected = model.predict_proba(data)
    assert np.abs(probabilities - expected).max() < 1e-5
    assert predictions == list(map(str, model.predict(data)))
    assert expected.std(axis=0).max() > 1e-3, "not all the same"
    return probabilities


# Columns.

RANGES = {"chol": (100.0, 300.0), "age": (20.0, 70.0)}


def schema_of_patients(path: Path) -> Path:
    """Write a declared schema: some cholesterol values and the category `absent` are outside it."""
    numbers = [ColumnSchema(name, "numeric", low=low, high=high) for name, (low, high) in RANGES.items()]
    Schema((numbers[0], ColumnSchema("pain", "categorical", ("typical", "atypical", "none")), numbers[1])).write(path)
    return path


def patients_model(folder: Path, threshold: float | None = None, **options: Any) -> ClientModel:
    """Return a model of the patients' columns with the preprocessing of client north."""
    reading = {"client": "hospital", "label": "outcome", "ignore": ("patient",)}
    rows = make_rows()
    if options.get("missing", "error") == "error":
        rows = [row for row in rows if "" not in row]
    federation = gpfl.federate(write_rows(folder / "visits.csv", rows), **reading, **options)
    assert federation.preprocessing is not None
    encoder = federation.preprocessing.clients["north"]
    model = make_model(MLP(), federation.table.input_spec, encoder, threshold=threshold)
    if options.get("scale") == "none":  # else all probabilities are 0 or 1
        model.weights = tree.map_leaves(lambda w: 0.1 * w, model.weights)
    return model


def set_threshold(model: ClientModel, path: Path) -> float:
    """Set and return a threshold between the probabilities of the rows of a file, far from each."""
    p = np.sort(model.predict_proba(path)[:, 1])
    gap = len(p) // 4 + int(np.diff(p[len(p) // 4 : -len(p) // 4]).argmax())
    value = float(p[gap : gap + 2].mean())
    model.threshold = Threshold(value, "balanced_accuracy", 40, 0.8, 0.7)
    return value


def new_rows(*, gaps: bool = True, unseen: bool = False) -> list[tuple[str, ...]]:
    rows = [row for row in make_rows(40, seed=3) if gaps or "" not in row]
    texts = ("?", "NA", "N/a", " unknown ", "None") if gaps else ()
    rows += [("9", "" if k % 2 else "nan", "north", text, "61.5", "ill") for k, text in enumerate(texts)]
    return [*rows, *((("9", "250", "north", "stabbing", "61.5", "ill"),) if unseen else ())]


POLICIES: Mapping[str, Mapping[str, Any]] = {
    "error": {"scale": "federated"},
    "mean": {"scale": "federated", "missing": "mean", "missing_indicator": True},
    "local": {"scale": "local", "missing": "mean", "unseen": "ignore"},
    "median": {"scale": "local", "missing": "median", "schema": True, "unseen": "ignore", "missing_indicator": True},
    "most_frequent": {"scale": "none", "missing": "most_frequent", "schema": True, "unseen": "ignore"},
    "declared": {"scale": "none", "missing": "mean", "schema": True, "unseen": "error", "missing_indicator": True},
}


@every_format
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_encoded_as_gpfl_predict_encodes_them(policy: str, format: str, tmp_path: Path) -> None:
    options = dict(POLICIES[policy])
    if options.get("schema"):
        options["schema"] = str(schema_of_patients(tmp_path / "schema.toml"))
    model = patients_model(tmp_path, **options)
    rows = new_rows(gaps=policy != "error", unseen=options.get("unseen") == "ignore")
    if policy == "declared":
        rows = [row for row in rows if row[3].strip() != "absent"]
    path = write_rows(tmp_path / "new.csv", rows, ("age", "outcome", "pain", "hospital", "chol", "patient"))
    threshold = set_threshold(model, path)
    found = check(model, tmp_path / "north", format, path, path, alone=policy == "mean")
    assert 0 < (found[:, 1] >= threshold).sum() < len(found)


def test_onnx_answers_nan_where_gpfl_predict_stops(tmp_path: Path) -> None:
    model = patients_model(tmp_path)
    model.export(tmp_path / "north", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "north" / "model.onnx")
    types = {each.name: (each.type, each.shape) for each in session.get_inputs()}
    assert types == {
        name: (f"tensor({kind})", ["samples"]) for name, kind in (("chol", "double"), ("pain", "string"), ("age", "double"))
    }
    good: dict[str, Any] = {"chol": 230.0, "pain": "typical", "age": 50.0}
    bad = ({"chol": np.nan}, {"age": np.inf}, {"age": 1e300}, {"pain": ""}, {"pain": "NULL"}, {"pain": "stabbing"})
    rows = [good, *({**good, **change} for change in bad), good]
    columns = {name: [row[name] for row in rows] for name in good}
    arrays = {name: np.array(cells, dtype=object if name == "pain" else np.float64) for name, cells in columns.items()}
    probabilities, predictions = session.run(None, arrays)
    assert np.isnan(probabilities[1:-1]).all()
    assert not np.isnan(probabilities[[0, -1]]).any()
    assert predictions[1:-1].tolist() == [""] * len(bad)
    assert predictions[[0, -1]].tolist() == model.predict({name: cells[:1] for name, cells in columns.items()}).tolist() * 2
    for change in bad:
        with pytest.raises(gpfl.GpflError):
            model.predict([{**good, **change}])


def test_code_for_torch_stops_where_gpfl_predict_stops(tmp_path: Path) -> None:
    model = patients_model(tmp_path)
    model.export(tmp_path / "north")
    good = ("1", "230", "north", "typical", "50", "ill")
    for place, cell, message in (
        (1, "", "column 'chol' has missing values, which the model does not fill"),
        (3, "stabbing", "column 'pain' holds 'stabbing', which the model does not know"),
        (4, "1e300", "a number is too large or not finite"),
    ):
        path = write_rows(tmp_path / "new.csv", [good, (*good[:place], cell, *good[place + 1 :])])
        with pytest.raises(ValueError, match=f"^{message}$"):
            run_here(tmp_path / "north", path)
        with pytest.raises(gpfl.GpflError):
            model.predict(path)


@every_format
def test_dates_are_days(format: str, tmp_path: Path) -> None:
    rows = [(f"2024-{1 + k % 12:02d}-{1 + k % 28:02d}", k % 5, "ab"[k % 2], ("x", "y", "z")[k % 3]) for k in range(60)]
    path = write(tmp_path / "a.csv", lines(("day", "probabilities", "site", "label"), *rows))
    federation = gpfl.federate(path, client="site")
    assert federation.preprocessing is not None
    assert federation.preprocessing.federated.schema.columns[0].kind == "date"
    model = make_model(MLP(), federation.table.input_spec, federation.preprocessing.federated, ("x", "y", "z"))
    check(model, tmp_path / "out", format, path, path)


def test_a_column_named_as_an_output_keeps_its_name(tmp_path: Path) -> None:
    rows = [(k % 7, k % 5, "ab"[k % 2], "xy"[k % 3 == 0]) for k in range(40)]
    path = write(tmp_path / "a.csv", lines(("prediction", "relu", "site", "label"), *rows))
    federation = gpfl.federate(path, client="site")
    assert federation.preprocessing is not None
    model = make_model(MLP(), federation.table.input_spec, federation.preprocessing.federated)
    check(model, tmp_path / "out", "onnx", path, path)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    assert [each.name for each in session.get_inputs()] == ["prediction", "relu"]
    assert [each.name for each in session.get_outputs()] == ["probabilities", "prediction_"]


# Images, texts and arrays.


@every_format
@pytest.mark.parametrize(("net", "channels"), [(CNN4(hidden=16), 1), pytest.param(ResNet18(), 3, marks=pytest.mark.slow)])
def test_images(net: CNN4 | ResNet18, channels: int, format: str, tmp_path: Path) -> None:
    model = make_model(net, InputSpec((channels, 18, 20), "pixels", 255), ImageFormat(channels, 18, 20, resize=True))
    sizes, modes = ((20, 18), (33, 21), (20, 18)), ("RGB", "RGB", "L")
    files = [tmp_path / f"{k}.png" for k in range(3)]
    for k, file in enumerate(files):
        write_image(file, k, size=sizes[k], mode=modes[k])
    check(model, tmp_path / "out", format, files, *files, alone=True)


@every_format
def test_a_image_of_another_size_is_an_error(format: str, tmp_path: Path) -> None:
    model = make_model(CNN4(hidden=4), InputSpec((3, 18, 20), "pixels", 255), ImageFormat(3, 18, 20))
    model.export(tmp_path / "out", format)
    write_image(tmp_path / "a.png", 0, size=(21, 18))
    with pytest.raises((ValueError, SystemExit), match=r"a\.png is 21×18; the model takes 20×18"):
        run_here(tmp_path / "out", tmp_path / "a.png")


@every_format
def test_texts(format: str, tmp_path: Path) -> None:
    words = ("good", "bad", "film", "don", "'", "t", ".", "straße", "a")
    encoder = Tokenizer(words, 6, ("title", "body"))
    model = make_model(FastText(vocabulary=10), InputSpec((6,), "tokens", vocabulary=10), encoder)
    rows = [
        ("Good film.", "a GOOD film; a good film: good<br />good"),
        ("Bad", '"don\'t"'),
        ("a", " "),
        ("STRAßE", "nonsense, unheard of"),
        ("bad bad bad", "bad bad bad good good"),
    ]
    quoted = [tuple('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    path = write(tmp_path / "new.csv", lines(("title", "body"), *quoted))
    check(model, tmp_path / "out", format, path, path, alone=True)


@every_format
@pytest.mark.parametrize(
    ("spec", "net"),
    [
        (InputSpec((6,)), MLP()),
        (InputSpec((1, 8, 8), "pixels", 16), CNN4(hidden=8)),
        (InputSpec((6,), "counts"), MLP(hidden=(8, 4))),
        (InputSpec((5,), "tokens", vocabulary=7), FastText(vocabulary=7)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_arrays(spec: InputSpec, net: CustomNet, format: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 6)) if spec.kind == "floats" else rng.integers(0, 7, (9, *spec.shape))
    np.savez(tmp_path / "new.npz", x=x)
    model = make_model(net, spec, classes=("0", "1", "2"))
    check(model, tmp_path / "out", format, x, tmp_path / "new.npz", alone=spec.kind == "floats")


def test_onnx_answers_nan_for_numbers_that_are_no_samples(tmp_path: Path) -> None:
    for spec, net, bad in (
        (InputSpec((3,)), MLP(), np.array([[0, np.nan, 0], [0, 0, 0]], np.float32)),
        (InputSpec((3,), "tokens", vocabulary=7), FastText(vocabulary=7), np.array([[0, 7, 0], [0, 6, 0]])),
        (InputSpec((3,), "tokens", vocabulary=7), FastText(vocabulary=7), np.array([[0, -1, 0], [0, 0, 0]])),
        (InputSpec((3,), "pixels", 16), MLP(), np.array([[0, 17, 0], [0, 16, 0]], np.uint8)),
    ):
        folder = tmp_path / f"{spec.kind}-{bad.min()}"
        make_model(net, spec).export(folder, "onnx")
        probabilities, _ = onnxruntime.InferenceSession(folder / "model.onnx").run(None, {"x": bad})
        assert np.isnan(probabilities).all(axis=1).tolist() == [True, False]


# Methods and nets.


class Scaled(nn.Module):
    """A net with BatchNorm, a constant buffer, and a size that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.linspace(0.5, 2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f = self.norm(self.first(x)) * self.scale
        return self.head(torch.relu(f).reshape(x.shape[0] * 2, 4).reshape(x.shape[0], 8))


@every_format
@pytest.mark.parametrize("method", METHODS)
def test_models_of_every_method(method: str, format: str, tmp_path: Path) -> None:
    model = gpfl.fit(method, toy_federation(), net="mlp", rounds=1, lr=0.1, engine="loop").clients[1]
    x = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
    model.export(tmp_path / "out", format)
    expected = model.predict_proba(x)
    if format == "onnx":
        found, _ = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx").run(None, {"x": x})
    else:
        from safetensors.torch import load_file

        names: dict[str, Any] = {}
        exec((tmp_path / "out" / "net.py").read_text(), names)
        found = (
            names["logits"](load_file(tmp_path / "out" / "model.safetensors"), torch.from_numpy(x)).softmax(1).detach().numpy()
        )
    assert np.abs(found - expected).max() < 1e-5
    assert expected.std(axis=0).max() > 1e-3


@every_format
def test_a_net_of_the_user_with_batch_norm_and_constants(format: str, tmp_path: Path) -> None:
    model = make_model(Scaled(), InputSpec((6,)))
    x = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    check(model, tmp_path / "out", format, x, tmp_path / "x.npy")


# The folder.


def test_folder_holds_what_the_card_lists(tmp_path: Path) -> None:
    model = patients_model(tmp_path, threshold=0.4, missing="mean", missing_indicator=True)
    for kind, expected in (
        ("safetensors", {"model.safetensors", "net.py", "preprocessing.json", "encode.py", "example.py", "README.md"}),
        ("onnx", {"model.onnx", "encode.py", "example.py", "README.md"}),
    ):
        folder = tmp_path / kind
        paths = model.export(folder, kind)
        assert {path.name for path in paths} == {path.name for path in folder.iterdir()} == expected
        card = (folder / "README.md").read_text()
        assert all(f"`{name}`" in card for name in expected - {"README.md"})
        assert "`well` is predicted at a probability of 0.4 or more." in card
        assert "| chol | numeric | scaled by mean " in card
        assert len((folder / "example.py").read_text().splitlines()) < 40
    content = json.loads((tmp_path / "safetensors" / "preprocessing.json").read_text())
    assert (content["client"], content["label"], content["threshold"]) == ("north", "outcome", 0.4)
    assert content["inputs"]["names"] == model.preprocessor.input_names
    proto = onnx.load(tmp_path / "onnx" / "model.onnx")
    assert json.loads({each.key: each.value for each in proto.metadata_props}["gpfl"])["classes"] == ["ill", "well"]
    assert not {path.name for path in tmp_path.iterdir() if path.name.startswith(".")}, "no temporary folder is left"


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    model = make_model(MLP(), InputSpec((6,)))
    write(tmp_path / "out" / "mine.txt", "1")
    assert message_of(lambda: model.export(tmp_path / "out")) == (
        f"{tmp_path / 'out'} exists and nothing is overwritten: choose another -o, or remove it"
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert message_of(lambda: model.export(tmp_path / "new", "onxx")) == "--format is 'onxx'; did you mean 'onnx'?"


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, written = make_model(MLP(), InputSpec((6,))), []

    def write_bytes(path: Path, content: bytes) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(path.write_bytes(content))

    monkeypatch.setattr("gpfl.io.files.write_bytes", write_bytes)
    with pytest.raises(KeyboardInterrupt):
        model.export(tmp_path / "out")
    assert written
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def import_module(name: str, *arguments: Any) -> Any:
        if name.split(".")[0] == "onnxscript":
            raise ImportError(name="onnxscript")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", import_module)
    model = make_model(MLP(), InputSpec((6,)))
    assert message_of(lambda: model.export(tmp_path / "out", "onnx")) == (
        "the format onnx needs the package onnxscript, which is not installed: pip install 'gpfl[onnx]'"
    )
    assert list(tmp_path.iterdir()) == []
    assert model.export(tmp_path / "out"), "safetensors needs no extra"


@every_format
def test_a_net_that_cannot_be_exported_is_an_error(format: str, tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.stack([each * (1 if each.detach().sum().item() > 0 else -1) for each in self.first(x)]))

    message = message_of(lambda: make_model(Odd(), InputSpec((6,))).export(tmp_path / "out", format))
    assert message.startswith("net 'custom' cannot be exported (")
    assert message.endswith("): use operators of torch alone, and no branches on values of tensors")
    assert list(tmp_path.iterdir()) == []
