"""Predictions of the clients' models for new samples, and their metrics where labels are known."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpfl.data.encoders import ImageFormat
from gpfl.data.files import new_rows
from gpfl.data.files.layout import SUFFIXES, file_suffix
from gpfl.data.files.raw_table import MISSING_LABELS, Array, Mask, RawTable, as_text, find_missing, join_names, to_text
from gpfl.data.files.roles import LABEL_NAMES, read_labels
from gpfl.data.preprocessing import Preprocessor
from gpfl.errors import GpflError, did_you_mean, pluralize
from gpfl.inference.bootstrap import Probabilities
from gpfl.inference.client_model import ClientModel
from gpfl.inference.inputs import NewData, NewInputs, ReadOptions, read_inputs
from gpfl.inference.load import list_models, load_model
from gpfl.inference.metrics import MetricsReport, describe_bootstrap, evaluate_predictions
from gpfl.inference.threshold import Threshold, describe_thresholds


@dataclass(frozen=True, eq=False)
class NewPredictions:
    """Predictions for new samples, in their order."""

    inputs: NewInputs
    client_of: Array  # name of the client whose model predicts each sample
    probabilities: Probabilities  # (samples, classes)
    decisions: npt.NDArray[np.int64]  # index of the predicted class of each sample
    model: ClientModel  # one of the models
    thresholds: Mapping[str, Threshold | None]  # of each client; None where the more probable class is predicted

    def __len__(self) -> int:
        return len(self.decisions)

    @property
    def clients(self) -> list[str]:
        """Names of the clients whose models were used."""
        return list(self.thresholds)

    @property
    def threshold_values(self) -> dict[str, float | None]:
        """Decision threshold of each client as a number."""
        return {name: None if each is None else each.value for name, each in self.thresholds.items()}

    def count_classes(self) -> dict[str, int]:
        """Return how many samples are predicted to be of each class."""
        counts = np.bincount(self.decisions, minlength=len(self.model.class_names)).tolist()
        return dict(zip(self.model.class_names, counts, strict=True))

    def describe(self) -> list[str]:
        """Return lines about the models, their thresholds and how the samples were read."""
        models = f"the models of {pluralize(len(self.clients), 'client')}"
        if len(self.clients) == 1:
            models = f"the model of client {self.clients[0]} ({self.model.method.name})"
        first = f"{self.inputs.table.path.name}: {pluralize(len(self), 'sample')}, predicted by {models}."
        return [first, *describe_thresholds(self.thresholds, self.model.class_names[-1]), *self.inputs.notes]

    def to_columns(self, keep: Sequence[str] = ()) -> dict[str, Array]:
        """Return the kept columns of the samples, `prediction` and the probability of each class."""
        kept = dict.fromkeys((*keep, *(("file",) if isinstance(self.model.encoder, ImageFormat) else ())))
        columns = {name: self._find_column(name) for name in kept}
        columns["prediction"] = self.model.classes_[self.decisions]
        names = (f"probability_{name}" for name in self.model.class_names)
        columns |= dict(zip(names, self.probabilities.T, strict=True))
        for name in kept:
            if name == "prediction" or name.startswith("probability_"):
                raise GpflError(f"--keep names column '{name}', which is also a column of the predictions: rename it")
        return columns

    def _find_column(self, name: str) -> Array:
        table = self.inputs.table
        if name not in table.columns or table.columns[name].shape != (len(self),):
            usable = [key for key, values in table.columns.items() if values.shape == (len(self),)]
            raise GpflError(f"--keep names '{name}', which is not a column of {table.path}; {did_you_mean(name, usable)}")
        values = table.columns[name]
        if values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.floor(values)).all():
            return values.astype(np.int64)  # whole numbers that were read as floats
        return values if values.dtype.kind in "biuf" else as_text(values.tolist())


def predict(
    source: str | Path,
    data: NewData,
    options: ReadOptions | None = None,
    *,
    client: str = "",
    client_column: str = "",
    keep: Collection[str] = (),
    threshold: float | None = None,
) -> NewPredictions:
    """Return the predictions of the clients' models for new samples.

    Args:
        source: Folder of a finished run, a folder of models, or a model file.
        data: New samples, see `gpfl.inference.inputs.NewData`.
        options: How the samples are read.
        client: Name of the client whose model predicts all samples; not needed if there is one model, or a column names them.
        client_column: Column that names the client of each sample.
        keep: Columns of the samples to keep next to the predictions.
        threshold: Probability at which the second of two classes is predicted, in place of the models' own.

    """
    if client and client_column:
        raise GpflError("--client and --client-column exclude each other: leave one out")
    options = options or ReadOptions()
    if threshold is not None and not 0 < threshold < 1:
        raise GpflError(f"--threshold is {threshold:g}; it must be above 0 and below 1, such as 0.5")
    files = list_models(source)
    if not client and not client_column and len(files) > 1:
        raise _name_clients_error(source, data, list(files))
    first = load_model(source, client or next(iter(files)))
    if threshold is not None and len(first.class_names) != 2:
        raise GpflError(f"--threshold is for models of two classes; this one has {len(first.class_names)}: leave it out")
    options = replace(options, others=(*options.others, *keep, *filter(None, [client_column])))
    inputs = read_inputs(data, first.encoder, first.input_spec, options)
    client_of = np.full(len(inputs), first.name, dtype=object)
    if client_column:
        client_of = _read_clients(inputs.table, client_column, list(files), source)
    probabilities = np.empty((len(inputs), len(first.class_names)))
    decisions = np.empty(len(inputs), dtype=np.int64)
    thresholds: dict[str, Threshold | None] = {}
    present = set(client_of.tolist())
    for name in (name for name in files if name in present):
        model = first if name == first.name else load_model(files[name])
        _check_alike(model, first)
        rows = np.flatnonzero(client_of == name)
        model.threshold = thresholds[name] = model.threshold if threshold is None else Threshold(threshold)
        probabilities[rows] = model.predict_proba(inputs.select(rows))
        decisions[rows] = model.decide(probabilities[rows])
    return NewPredictions(inputs, client_of, probabilities, decisions, first, thresholds)


@dataclass(frozen=True, eq=False)
class NewEvaluation:
    """Metrics of predictions for new samples."""

    predictions: NewPredictions  # the predictions of all samples
    label: str  # name of the column of labels
    report: MetricsReport  # the metrics
    notes: tuple[str, ...] = ()  # notes for the user on the labels

    def describe(self) -> list[str]:
        """Return lines on the predictions and the labels."""
        return [*self.predictions.describe(), *self.notes]

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON values, with the metrics as in metrics.json of a run."""
        predictions = self.predictions
        return {
            "data": str(predictions.inputs.table.path),
            "label": self.label,
            "thresholds": predictions.threshold_values,
            **describe_bootstrap(self.report.overall.n_samples * len(predictions.model.class_names)),
            "test": self.report.to_dict(),
        }


def evaluate(
    source: str | Path,
    data: NewData,
    options: ReadOptions | None = None,
    *,
    client: str = "",
    client_column: str = "",
    label: str = "",
    missing_labels: Literal["error", "drop"] = "error",
    threshold: float | None = None,
) -> NewEvaluation:
    """Return the metrics of the clients' models on new samples with labels, by default in the column of the training data.

    The other arguments are those of `predict`.
    """
    predictions = predict(source, data, options, client=client, client_column=client_column, threshold=threshold)
    table, names = predictions.inputs.table, predictions.model.class_names
    inputs = predictions.model.preprocessor.schema.index if predictions.model.preprocessor else ()
    label = find_label(table, label, predictions.model.output_spec.label, inputs)
    y, known, notes = read_known_labels(table, label, names, "the model", drop_missing=missing_labels == "drop")
    labels: dict[str, npt.NDArray[np.int64]] = {}
    probabilities: dict[str, Probabilities] = {}
    for name in predictions.clients:
        rows = known & (predictions.client_of == name)
        if rows.any():
            labels[name], probabilities[name] = y[rows[known]], predictions.probabilities[rows]
    report = evaluate_predictions(labels, probabilities, names, thresholds=predictions.threshold_values)
    return NewEvaluation(predictions, label, report, notes)


def read_known_labels(
    table: RawTable, label: str, classes: Sequence[str], declared_by: str, *, drop_missing: bool
) -> tuple[npt.NDArray[np.int64], Mask, tuple[str, ...]]:
    """Return the labels of the rows that have one, which rows these are, and a note if others are left out."""
    known = np.ones(len(table), dtype=bool)
    if drop_missing:
        known = ~find_missing(table.columns[label], MISSING_LABELS)
    if not known.any():
        raise GpflError(f"column '{label}' of {table.path} has no label in any row")
    y, _ = read_labels(table.filter(known), label, classes, declared_by)
    left_out = int((~known).sum())
    return y, known, (f"{pluralize(left_out, 'row')} without a label left out.",) if left_out else ()


def find_label(table: RawTable, label: str, trained: str, inputs: Collection[str]) -> str:
    """Return the column of labels: the one that is named, that of the training data, or one with a usual name."""
    usable = [name for name, values in table.columns.items() if values.shape == (len(table),)]
    if label:
        if label not in usable:
            raise GpflError(f"--label is '{label}', which is not a column of {table.path}; {did_you_mean(label, usable)}")
        return label
    if trained in usable:
        return trained
    lower = {name.lower(): name for name in usable if name not in inputs}
    found = next((lower[name] for name in LABEL_NAMES if name in lower), "")
    if not found:
        hint = f"; the model was trained on '{trained}'" if trained else ""
        raise GpflError(f"{table.path} has no label column{hint}: name it with --label; the columns are {join_names(usable)}")
    return found


def _name_clients_error(source: str | Path, data: NewData, names: Sequence[str]) -> GpflError:
    """Return the error for samples whose client is unknown, with the columns that may name it."""
    columns: list[str] = []
    if not isinstance(data, (str, Path)) or file_suffix(Path(data)) in SUFFIXES or Path(data).is_dir():
        with suppress(GpflError, TypeError, AttributeError):
            table = new_rows.read_columns(data, ())  # type: ignore[arg-type]
            columns = [
                name
                for name, values in table.columns.items()
                if values.ndim == 1 and len(values) and set(to_text(values).tolist()) <= set(names)
            ]
    fix = f" ({join_names(columns)} may be one)" if columns else ""
    return GpflError(
        f"{source} has the models of {pluralize(len(names), 'client')}: name one with --client ({join_names(names)}), or the "
        f"column that names the client of each row with --client-column{fix}"
    )


def _read_clients(table: RawTable, column: str, names: Sequence[str], source: str | Path) -> Array:
    """Return the client of each row. Raise if one is missing or has no model."""
    if column not in table.columns or table.columns[column].shape != (len(table),):
        raise GpflError(
            f"--client-column is '{column}', which is not a column of {table.path}; {did_you_mean(column, table.columns)}"
        )
    cells = table.columns[column]
    missing = find_missing(cells, MISSING_LABELS)
    if missing.any():
        raise GpflError(f"column '{column}' has {table.describe_missing(missing)}: fill in the file")
    clients = to_text(cells).astype(object)
    unknown = ~np.isin(clients, list(names))
    if unknown.any():
        others = sorted(set(clients[unknown].tolist()))
        raise GpflError(
            f"column '{column}' names {pluralize(len(others), 'client')} without a model: {join_names(others, 5)}, first in "
            f"{table.locate_first(unknown)}; {source} has models of {join_names(names)}: correct the names, or make a model "
            f"with gpfl personalize --client {others[0]}"
        )
    return clients


def _check_alike(model: ClientModel, first: ClientModel) -> None:
    """Raise if two models do not take the same inputs or do not predict the same classes."""
    if model.class_names == first.class_names and _describe_inputs(model) == _describe_inputs(first):
        return
    what = "inputs" if model.class_names == first.class_names else "classes"
    raise GpflError(
        f"the models of clients '{first.name}' and '{model.name}' have different {what}, so they are not from the same run: "
        "predict the rows of each client with its own --client"
    )


def _describe_inputs(model: ClientModel) -> tuple[object, ...]:
    encoder = model.encoder
    if isinstance(encoder, Preprocessor):
        return encoder.schema, encoder.input_names, sorted(encoder.fill), encoder.unseen
    return model.input_spec, encoder
