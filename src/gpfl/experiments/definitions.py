"""The paper's tables and figures with its numbers, read from configs/."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import cast

from gpfl.errors import GpflError, did_you_mean
from gpfl.experiments.compare import MethodVariant, parse_methods
from gpfl.io import toml
from gpfl.methods import METHODS
from gpfl.training.config import SECTIONS, ConfigDict

MEASURES = ("accuracy", "fairness", "curves", "features")
"""What an experiment shows. `curves` and `features` also have a table of accuracies."""

ROUNDS, PATIENCE = 2000, 100
"""The paper's rounds, and the patience that the authors' code allows. Many runs reach their best round long before: GPFL on
Cifar100 near round 190, methods on TINY* at rounds 25 to 230. On HAR and AG News most continue beyond round 300."""

HALF_DIGIT = 0.005
"""Rounding error of a number printed with two decimals."""

MAX_PAPER_STDS = 2.0
"""A difference from the paper of more of its standard deviations than this is marked."""

KEYS = ("title", "caption", "measure", "aliases", "rows", "columns", "remarks")
COLUMN_KEYS = ("key", "heading", "group", "note", "extra", "weights", "paper")

DISPLAY_NAMES: Mapping[str, str] = {
    "gpfl": "GPFL",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "perfedavg": "Per-FedAvg",
    "pfedme": "pFedMe",
    "ditto": "Ditto",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "fedrod": "FedRoD",
    "fedphp": "FedPHP",
    "fedproto": "FedProto",
    "local": "Local",
    "fedavg-ft": "FedAvg+FT",
    "gpfl without pci": "GPFL w/o PCI",
    "gpfl without cov": "GPFL w/o CoV",
    "gpfl without mlg": "GPFL w/o MLG",
    "gpfl without gce": "GPFL w/o GCE",
    "gpfl without cov+gce": "FedPer (w/o CoV & GCE)",
}
"""Rows as the paper writes them."""

CellKey = tuple[str, str]
"""Key of a column and label of a row."""


@dataclass(frozen=True)
class PaperValue:
    """What the paper prints, in percent.

    For fairness `mean` is the standard deviation over clients and `cov` the coefficient of variation, in hundredths.
    """

    mean: float
    std: float | None = None  # over trials
    cov: float | None = None
    between: tuple[float, float] | None = None  # range of a mean that is not printed, but follows from other numbers

    @classmethod
    def from_fairness(cls, std: float, cov: float) -> PaperValue:
        """Return the accuracy that follows from the printed deviation over clients and coefficient of variation."""
        low, high = 100 * (std - HALF_DIGIT) / (cov + HALF_DIGIT), 100 * (std + HALF_DIGIT) / (cov - HALF_DIGIT)
        return cls(100 * std / cov, between=(low, high))


@dataclass(frozen=True)
class TableColumn:
    """A setting in which all methods are run."""

    key: str
    heading: str
    group: str
    settings: ConfigDict = field(hash=False)
    note: str = ""
    extra: bool = False  # run only on request, if --cells names it
    weights: bool = False  # models are kept for a figure

    @property
    def data(self) -> str:
        """Name of the dataset."""
        return str(self.settings["data"]["name"])

    def matches(self, name: str) -> bool:
        """Return whether a name means this column: its key, half of it, or a pattern such as fmnist/*."""
        return fnmatch.fnmatchcase(self.key, name) or name in self.key.split("/")


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    caption: str
    measure: str
    rows: tuple[MethodVariant, ...]
    columns: tuple[TableColumn, ...]
    paper: Mapping[CellKey, PaperValue] = field(hash=False)
    remarks: Mapping[CellKey, str] = field(hash=False, default_factory=dict)  # of a column if the row is ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One method in one setting of one experiment."""

    experiment: Experiment
    column: TableColumn
    variant: MethodVariant

    @property
    def key(self) -> CellKey:
        """Key of the column and label of the row."""
        return self.column.key, self.variant.label


def display_name(label: str) -> str:
    """Return a row's name as the paper writes it."""
    return DISPLAY_NAMES.get(label, label)


def config_dir() -> Path:
    """Return the folder of the experiments: in the installed package, or in the root of a checkout."""
    path = Path(__file__).resolve()
    for folder in (path.parents[1] / "configs", path.parents[3] / "configs"):
        if folder.is_dir():
            return folder
    raise GpflError(f"the experiments are missing from {path.parents[1] / 'configs'}: install gpfl again")


@cache
def load_experiments() -> Mapping[str, Experiment]:
    """Return all experiments by name, in the order of the paper: tables before figures."""

    def order(experiment: Experiment) -> tuple[bool, str, bool, str]:
        first = experiment.aliases[0] if experiment.aliases else "~"
        return not first.startswith("table"), first, experiment.name != "real-world", experiment.name

    experiments = sorted((read_experiment(path) for path in config_dir().glob("*.toml")), key=order)
    return MappingProxyType({experiment.name: experiment for experiment in experiments})


def find_experiments(names: Sequence[str], other_names: Sequence[str] = ()) -> list[Experiment]:
    """Return the experiments of names such as "scalability", "table1", "figure3" or "all", each once.

    `other_names` are suggested for a misspelled name too.
    """
    known = load_experiments()
    experiments: dict[str, Experiment] = {}
    for name in names:
        matches = {each.name: each for each in known.values() if name == "all" or name in (each.name, *each.aliases)}
        if not matches:
            suggestions = {*known, *other_names, "all", *(alias for each in known.values() for alias in each.aliases)}
            raise GpflError(f"unknown experiment '{name}'; {did_you_mean(name, suggestions)}")
        experiments |= matches
    return list(experiments.values())


# Files of experiments.


def read_experiment(path: Path) -> Experiment:
    """Return the experiment of a file in configs/."""
    content = toml.read(path)
    _check_keys(path, content, KEYS)
    measure = _read_text(path, content, "measure")
    if measure not in MEASURES:
        raise GpflError(f"{path}: measure is '{measure}'; {did_you_mean(measure, MEASURES)}")
    rows = tuple(_read_row(path, row) for row in _read_list(path, content, "rows"))
    labels = {row.label for row in rows}
    columns: list[TableColumn] = []
    paper: dict[CellKey, PaperValue] = {}
    printed: dict[str, Mapping[str, object]] = {}
    for values in _read_list(path, content, "columns"):
        if not isinstance(values, dict):
            raise GpflError(f"{path}: columns must be sections, [[columns]]")
        column = _read_column(path, values)
        columns.append(column)
        printed[column.key] = _read_paper(path, column.key, values.get("paper", {}), printed)
        for label, numbers in printed[column.key].items():
            if label not in labels:
                raise GpflError(f"{path}: {column.key} has a number for '{label}', which is not among the rows")
            if numbers != "/":  # the paper's sign for no number
                paper[column.key, label] = _parse_paper_value(f"{path}: {column.key} {label}", numbers, measure)
    remarks: dict[CellKey, str] = {}
    for remark in cast(list[dict[str, object]], _read_list(path, content, "remarks")):
        key, label = str(remark.get("column", "")), str(remark.get("row", ""))
        if key not in printed or label not in {"", *labels}:
            raise GpflError(f"{path}: a remark is about '{key}' and '{label}', which the table does not have")
        remarks[key, label] = str(remark.get("text", ""))
    return Experiment(
        name=path.stem,
        title=_read_text(path, content, "title"),
        caption=_read_text(path, content, "caption"),
        measure=measure,
        rows=rows,
        columns=tuple(columns),
        paper=paper,
        remarks=remarks,
        aliases=tuple(str(alias) for alias in _read_list(path, content, "aliases")),
    )


def _read_column(path: Path, values: Mapping[str, object]) -> TableColumn:
    _check_keys(path, values, (*COLUMN_KEYS, *(section for section in SECTIONS if section != "method")))
    settings = {section: dict(cast(Mapping[str, object], values[section])) for section in SECTIONS if section in values}
    if "name" not in settings.get("data", {}):
        raise GpflError(f"{path}: column '{values.get('key', '')}' does not name its data")
    return TableColumn(
        key=_read_text(path, values, "key"),
        heading=_read_text(path, values, "heading"),
        group=_read_text(path, values, "group"),
        settings=settings,
        note=str(values.get("note", "")),
        extra=bool(values.get("extra", False)),
        weights=bool(values.get("weights", False)),
    )


def _read_row(path: Path, row: object) -> MethodVariant:
    """Return a row: the name of a method or of an ablation, or a method's settings with the label of the row."""
    known = {variant.label: variant for variant in parse_methods("all,ablations")}
    if isinstance(row, str) and row in known:
        return known[row]
    if isinstance(row, dict) and isinstance(row.get("label"), str) and row.get("name") in METHODS:
        return MethodVariant(row["label"], {key: value for key, value in row.items() if key != "label"})
    raise GpflError(f"{path}: the row {row!r} is no method; {did_you_mean(str(row), known)}")


def _read_paper(path: Path, key: str, value: object, earlier: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
    """Return the paper's numbers of a column by row: its own, or those of an earlier column, given its key."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise GpflError(f"{path}: paper of {key} is {value!r}; it must be a section, or the key of an earlier column")
    if value not in earlier:
        raise GpflError(f"{path}: {key} has the numbers of '{value}', which is no earlier column")
    return earlier[value]


def _parse_paper_value(where: str, numbers: object, measure: str) -> PaperValue:
    """Return the paper's numbers: [mean, std] or [mean], for fairness and curves [std over clients, CoV]."""
    if not isinstance(numbers, list) or len(numbers) not in (1, 2) or not all(isinstance(n, (int, float)) for n in numbers):
        raise GpflError(f'{where} is {numbers!r}; it must be one or two numbers in brackets, or "/"')
    first, second = float(numbers[0]), float(numbers[1]) if len(numbers) == 2 else None
    if measure == "fairness":
        return PaperValue(first, cov=second)
    if measure == "curves":
        if second is None or second <= HALF_DIGIT:
            raise GpflError(f"{where} is {numbers!r}; it must be the deviation over clients and its coefficient")
        return PaperValue.from_fairness(first, second)
    return PaperValue(first, second)


def _read_text(path: Path, values: Mapping[str, object], key: str) -> str:
    value = values.get(key)
    if not isinstance(value, str) or not value:
        raise GpflError(f"{path}: {key} is {value!r}; it must be text")
    return value


def _read_list(path: Path, values: Mapping[str, object], key: str) -> list[object]:
    value = values.get(key, [])
    if not isinstance(value, list):
        raise GpflError(f"{path}: {key} is {value!r}; it must be a list")
    return value


def _check_keys(path: Path, values: Mapping[str, object], known: Sequence[str]) -> None:
    for key in values:
        if key not in known:
            raise GpflError(f"{path}: unknown key '{key}'; {did_you_mean(key, known)}")
