"""Train and evaluate a model for a client that was not in training, from its own file."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpfl.core.local_round import Indices
from gpfl.data import FileDataset
from gpfl.data.columns import RawColumns
from gpfl.data.files.raw_table import Mask, RawTable, join_names, to_text
from gpfl.data.files.roles import Roles, read_names, read_splits
from gpfl.data.table import SPLITS, Table
from gpfl.errors import GpflError, did_you_mean, pluralize
from gpfl.federation.federation import MAX_NAME_BYTES
from gpfl.federation.partition import Natural
from gpfl.inference.client_model import ClientModel
from gpfl.inference.inputs import NewData, NewInputs, ReadOptions, read_inputs
from gpfl.inference.metrics import MetricsReport, evaluate_predictions
from gpfl.inference.predict import find_label, read_known_labels
from gpfl.inference.threshold import choose_threshold, describe_thresholds
from gpfl.training.result import Result


@dataclass(frozen=True)
class NewClient:
    """A model for a client that was not in training."""

    model: ClientModel
    n_samples: dict[str, int]  # in each split
    reports: dict[str, MetricsReport]  # on test samples: of the model, and of the shared model if the method has one
    notes: tuple[str, ...]  # notes for the user on the samples and the method


PERSONAL, SHARED = "personal model", "shared model"


def personalize_data(
    result: Result,
    data: NewData,
    *,
    name: str,
    label: str = "",
    rounds: int = 20,
    test_fraction: float | None = None,
    validation_fraction: float | None = None,
    options: ReadOptions | None = None,
) -> NewClient:
    """Return a model for a new client, and its metrics on test samples that it was not trained on.

    The data are read and encoded as those of the run, with its statistics; with `--scale local` the client scales by its own
    training samples. They are divided like those of the run's clients: by its column of splits if they have it, else at
    random, groups kept whole.

    Args:
        result: The run.
        data: The client's samples with labels. Of a file with the run's column of clients, the rows of this client.
        name: Name of the client, "" if that column holds only one.
        label: Column of labels, by default that of the run.
        rounds: Number of local rounds, in which only the client's private state changes.
        test_fraction: Fraction of the samples for testing, by default that of the run; 0 trains on all.
        validation_fraction: Fraction of the training samples from which a decision threshold is chosen.
        options: How the samples are read, besides what the run fixes.

    """
    federation, metadata = result.federation, result.federation.table.metadata
    roles = {role: str(metadata.get(role, "")) for role in ("client", "group", "split_column")}
    inputs = _read(result, data, options or ReadOptions(), tuple(filter(None, roles.values())))
    name, rows = _select_client(inputs.table, roles["client"], name)
    if name in [shard.name for shard in federation.shards]:
        raise GpflError(f"client '{name}' took part in training and has a model: choose another name with --client")
    if len(name.encode()) > MAX_NAME_BYTES:
        raise GpflError(f"the client name '{name[:20]}…' names a file and has over {MAX_NAME_BYTES} bytes: shorten --client")
    schema = inputs.x.schema.index if isinstance(inputs.x, RawColumns) else ()
    label = find_label(inputs.table, label, str(metadata.get("label", "")), schema)
    y, known, label_notes = read_known_labels(
        inputs.table.filter(rows),
        label,
        federation.class_names,
        "the run",
        drop_missing=getattr(federation.table.source, "missing_labels", "") == "drop",
    )
    rows[rows] = known
    notes = [*inputs.notes, *label_notes]
    table = _make_table(result, inputs, rows, y, roles, name)
    splits = _split(result, table, test_fraction, validation_fraction)
    train, validation, test = splits
    model = result.personalize(_samples(table, train), y[train], rounds=rounds, name=name)
    if len(validation) and result.threshold_metric != "none" and len(federation.class_names) == 2:
        model.threshold = choose_threshold(
            y[validation], model.predict_proba(_samples(table, validation)), result.threshold_metric
        )
        notes += describe_thresholds({name: model.threshold}, federation.class_names[-1])
    shared = result.shared_model(name, model.encoder)
    reports = {}
    if len(test):
        models = {PERSONAL: model, **({SHARED: shared} if shared is not None else {})}
        reports = {key: _evaluate(each, table, y, test) for key, each in models.items()}
    method = result.engine.method
    if shared is None:
        notes.append(f"{method.name} shares no complete net, so a new client has no model without training.")
    elif np.array_equal(model.logits(_samples(table, train)), shared.logits(_samples(table, train))):
        notes.append(f"{method.name} keeps nothing private, so the model of client {name} is the shared one.")
    sizes = {split: len(samples) for split, samples in zip(SPLITS, splits, strict=True)}
    return NewClient(model, sizes, reports, tuple(notes))


def _read(result: Result, data: NewData, options: ReadOptions, others: tuple[str, ...]) -> NewInputs:
    """Return the samples as the run reads and encodes its own."""
    table = result.federation.table
    preprocessing, source = result.federation.preprocessing, table.source
    if isinstance(source, FileDataset):
        options = dataclasses.replace(
            options,
            unreadable="missing" if source.unreadable == "missing" else "error",
            missing="drop" if source.missing == "drop" else "error",
        )
    encoder = preprocessing.federated if preprocessing else table.encoder
    return read_inputs(data, encoder, table.input_spec, dataclasses.replace(options, others=(*options.others, *others)))


def _select_client(table: RawTable, column: str, name: str) -> tuple[str, Mask]:
    everything = np.ones(len(table), dtype=bool)
    if not column or column not in table.columns:
        return name or table.path.name.split(".")[0], everything
    clients = to_text(table.columns[column])
    names = sorted(set(clients.tolist()) - {""})
    if not name and len(names) > 1:
        raise GpflError(
            f"column '{column}' of {table.path} names {pluralize(len(names), 'client')}: choose one with --client "
            f"({join_names(names)})"
        )
    if name and name not in names:
        raise GpflError(f"column '{column}' of {table.path} does not name client '{name}'; {did_you_mean(name, names)}")
    if not names:
        raise GpflError(f"column '{column}' of {table.path} is empty: name the client there, or leave the column out")
    return name or names[0], clients == (name or names[0])


def _make_table(
    result: Result, inputs: NewInputs, rows: Mask, y: npt.NDArray[np.int64], roles: dict[str, str], name: str
) -> Table:
    client_table = inputs.table.filter(rows)
    split_column, group = (role if role in client_table.columns else "" for role in (roles["split_column"], roles["group"]))
    splits = read_splits(client_table, Roles("", split_column=split_column)) if split_column else None
    return Table(
        inputs.select(np.flatnonzero(rows)),
        y,
        classes=result.federation.table.classes,
        name=f"client {name}",
        input_spec=result.federation.table.input_spec,
        splits=None if splits is None else np.array([SPLITS.index(split) for split in splits.tolist()]),
        group_ids=read_names(client_table, group) if group else None,
    )


def _split(
    result: Result, table: Table, test_fraction: float | None, validation_fraction: float | None
) -> tuple[Indices, Indices, Indices]:
    """Return the training, validation and test samples, by default in the fractions of the run."""
    if table.splits is not None and test_fraction is not None:
        raise GpflError("--test-fraction is given, but the file has test samples already: leave it out")
    fractions = {"test_fraction": test_fraction, "validation_fraction": validation_fraction}
    options = {key: value for key, value in result.federation.partition.items() if key in (*fractions, "seed")}
    options |= {key: value for key, value in fractions.items() if value is not None}
    partition = dataclasses.replace(Natural(), **options)  # type: ignore[arg-type]
    everything, index = np.arange(len(table)), len(result.federation)
    if table.splits is None and not partition.test_fraction:  # of groups, `split` would always take one for testing
        splits = (*partition.split_validation(table, everything, index), everything[:0])
    else:
        splits = partition.split(table, everything, index)
    needed = {"training": splits[0], **({"testing": splits[2]} if partition.test_fraction else {})}
    for purpose, samples in needed.items():
        if not len(samples):
            raise GpflError(
                f"{table.name} has {pluralize(len(table), 'sample')}, which leaves none for {purpose}: give more, or change "
                "--test-fraction"
            )
    return splits


def _samples(table: Table, samples: Indices) -> RawColumns | npt.NDArray[np.generic]:
    return table.raw.select(samples) if table.raw is not None else table.x.numpy()[samples]


def _evaluate(model: ClientModel, table: Table, y: npt.NDArray[np.int64], test: Indices) -> MetricsReport:
    probabilities = model.predict_proba(_samples(table, test))
    return evaluate_predictions({model.name: y[test]}, {model.name: probabilities}, model.class_names)
