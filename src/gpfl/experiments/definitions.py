"""Experiments: the paper's tables and figures, with its numbers, as the files of the folder configs/ hold them."""

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
"""What an experiment is about; `curves` and `features` have a table of accuracies as well."""

ROUNDS, PATIENCE = 2000, 100
"""The paper's rounds, and the rounds without a better accuracy after which a run ends. The authors' code has this early stop,
and many runs reach their best long before: GPFL on Cifar100 near round 190, methods on TINY* at rounds 25 to 230. On HAR and AG
News most go on beyond 300."""

HALF = 0.005
"""How far off a number may be that is printed with two digits."""

MAX_PAPER_STDS = 2.0
"""Standard deviations of the paper beyond which a difference from it is marked."""

KEYS = ("title", "caption", "measure", "aliases", "rows", "columns", "remarks")
COLUMN_KEYS = ("key", "heading", "group", "note", "extra", "weights", "paper")

SPELLED: Mapping[str, str] = {
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


@dataclass(frozen=True)
class PaperValue:
    """What the paper prints, in percent: mean and standard deviation over its trials.

    For fairness `mean` is the standard deviation over clients and `cov` the coefficient of variation, in hundredths. `between`
    are the least and the most that a mean may be that the paper does not print, but that follows from others of it.
    """

    mean: float
    std: float | None = None
    cov: float | None = None
    between: tuple[float, float] | None = None

    @classmethod
    def follows(cls, std: float, cov: float) -> PaperValue:
        """Gives the accuracy that follows from a deviation over clients and its coefficient, both as they are printed."""
        return cls(100 * std / cov, between=(100 * (std - HALF) / (cov + HALF), 100 * (std + HALF) / (cov - HALF)))


@dataclass(frozen=True)
class TableColumn:
    """A setting in which all methods are run."""

    key: str
    heading: str
    group: str
    given: ConfigDict = field(hash=False)
    note: str = ""
    extra: bool = False  # run only where --cells means it: `gpfl.experiments.selection.meant`
    weights: bool = False  # models are kept: a figure needs them

    @property
    def data(self) -> str:
        """The name of its data."""
        return str(self.given["data"]["name"])

    def named_by(self, word: str) -> bool:
        """Tells whether a word means this column: its key, either half of it, or a pattern such as fmnist/*."""
        return fnmatch.fnmatchcase(self.key, word) or word in self.key.split("/")


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    name: str
    title: str
    caption: str
    measure: str
    rows: tuple[MethodVariant, ...]
    columns: tuple[TableColumn, ...]
    paper: Mapping[tuple[str, str], PaperValue] = field(hash=False)  # by column key and row label
    remarks: Mapping[tuple[str, str], str] = field(hash=False, default_factory=dict)  # by the same; a row of "" is the column's
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One method in one setting of one experiment."""

    experiment: Experiment
    column: TableColumn
    variant: MethodVariant


def display_name(label: str) -> str:
    """Gives a row's name as the paper writes it."""
    return SPELLED.get(label, label)


# The files.


def config_dir() -> Path:
    """Gives the folder of the experiments: within the installed package, or at the root of a checkout."""
    here = Path(__file__).resolve()
    places = (here.parents[1] / "configs", here.parents[3] / "configs")
    found = next((place for place in places if place.is_dir()), None)
    if found is None:
        raise GpflError(f"the experiments are not where they should be, {places[0]}: install gpfl again")
    return found


@cache
def load_experiments() -> Mapping[str, Experiment]:
    """Gives all experiments by name, in the order of the paper."""
    found = [read(path) for path in sorted(config_dir().glob("*.toml"))]
    return MappingProxyType({one.name: one for one in sorted(found, key=place)})


def place(experiment: Experiment) -> tuple[bool, str, bool, str]:
    """Gives where an experiment stands: tables before figures, each in the paper's order."""
    first = experiment.aliases[0] if experiment.aliases else "~"
    return not first.startswith("table"), first, experiment.name != "real-world", experiment.name


def find_experiments(words: Sequence[str], others: Sequence[str] = ()) -> list[Experiment]:
    """Gives the experiments of names such as "scalability", "table1", "figure3" or "all", each once.

    `others` are names of what is no experiment here, and may be meant.
    """
    known = load_experiments()
    found: dict[str, Experiment] = {}
    for word in words:
        meant = [one for one in known.values() if word == "all" or word in (one.name, *one.aliases)]
        if not meant:
            names = {*known, *others, "all", *(alias for one in known.values() for alias in one.aliases)}
            raise GpflError(f"unknown experiment '{word}'; {did_you_mean(word, names)}")
        found |= {one.name: one for one in meant}
    return list(found.values())


def read(path: Path) -> Experiment:
    """Gives the experiment of a file."""
    content = toml.read(path)
    refuse_keys(path, content, KEYS)
    measure = text(path, content, "measure")
    if measure not in MEASURES:
        raise GpflError(f"{path}: measure is '{measure}'; {did_you_mean(measure, MEASURES)}")
    rows = tuple(entrant(path, row) for row in listed(path, content, "rows"))
    columns, paper = [], {}
    printed: dict[str, Mapping[str, object]] = {}
    for values in listed(path, content, "columns"):
        if not isinstance(values, dict):
            raise GpflError(f"{path}: columns must be sections, [[columns]]")
        column = read_column(path, values)
        columns.append(column)
        printed[column.key] = numbers_of(path, column.key, values.get("paper", {}), printed)
        for label, numbers in printed[column.key].items():
            if label not in {row.label for row in rows}:
                raise GpflError(f"{path}: {column.key} has a number for '{label}', which is not among the rows")
            if numbers != "/":  # the paper's word for none
                paper[column.key, label] = published(path, f"{column.key} {label}", numbers, measure)
    return Experiment(
        name=path.stem,
        title=text(path, content, "title"),
        caption=text(path, content, "caption"),
        measure=measure,
        rows=rows,
        columns=tuple(columns),
        paper=paper,
        remarks=remarks(path, content, columns, rows),
        aliases=tuple(str(alias) for alias in listed(path, content, "aliases")),
    )


def read_column(path: Path, values: Mapping[str, object]) -> TableColumn:
    """Gives a column and the sections of its config."""
    known = (*COLUMN_KEYS, *(section for section in SECTIONS if section != "method"))
    refuse_keys(path, values, known)
    given = {section: dict(cast(Mapping[str, object], values[section])) for section in SECTIONS if section in values}
    if "name" not in given.get("data", {}):
        raise GpflError(f"{path}: column '{values.get('key', '')}' does not name its data")
    return TableColumn(
        key=text(path, values, "key"),
        heading=text(path, values, "heading"),
        group=text(path, values, "group"),
        given=given,
        note=str(values.get("note", "")),
        extra=bool(values.get("extra", False)),
        weights=bool(values.get("weights", False)),
    )


def numbers_of(path: Path, key: str, given: object, before: Mapping[str, Mapping[str, object]]) -> Mapping[str, object]:
    """Gives the paper's numbers of a column by row: its own, or by its key those of one before it."""
    if isinstance(given, str) and given not in before:
        raise GpflError(f"{path}: {key} has the numbers of '{given}', which is no column before it")
    if not isinstance(given, (str, dict)):
        raise GpflError(f"{path}: paper of {key} is {given!r}; it must be a section, or the key of a column before it")
    return before[given] if isinstance(given, str) else given


def entrant(path: Path, row: object) -> MethodVariant:
    """Gives a row: the name of a method or of an ablation, or a method's settings with the label of the row."""
    known = {one.label: one for one in parse_methods("all,ablations")}
    if isinstance(row, str) and row in known:
        return known[row]
    if isinstance(row, dict) and isinstance(row.get("label"), str) and row.get("name") in METHODS:
        return MethodVariant(row["label"], {key: value for key, value in row.items() if key != "label"})
    raise GpflError(f"{path}: the row {row!r} is no method; {did_you_mean(str(row), known)}")


def published(path: Path, where: str, numbers: object, measure: str) -> PaperValue:
    """Gives the paper's numbers: [mean, std] or [mean], for fairness [std, CoV], for curves what follows from such."""
    if not isinstance(numbers, list) or len(numbers) not in (1, 2) or not all(isinstance(n, (int, float)) for n in numbers):
        raise GpflError(f'{path}: {where} is {numbers!r}; it must be one or two numbers in brackets, or "/"')
    values = [float(number) for number in numbers]
    second = values[1] if len(values) == 2 else None
    if measure == "fairness":
        return PaperValue(values[0], cov=second)
    if measure == "curves":
        if second is None or second <= HALF:
            raise GpflError(f"{path}: {where} is {numbers!r}; it must be the deviation over clients and its coefficient")
        return PaperValue.follows(values[0], second)
    return PaperValue(values[0], second)


def remarks(
    path: Path, content: Mapping[str, object], columns: Sequence[TableColumn], rows: Sequence[MethodVariant]
) -> dict[tuple[str, str], str]:
    """Gives the remarks of a file by column and row."""
    found = {}
    for remark in listed(path, content, "remarks"):
        key, label, words = (str(cast(dict[str, object], remark).get(part, "")) for part in ("column", "row", "text"))
        if key not in {column.key for column in columns} or label not in {"", *(row.label for row in rows)}:
            raise GpflError(f"{path}: a remark is about '{key}' and '{label}', which the table does not have")
        found[key, label] = words
    return found


def text(path: Path, values: Mapping[str, object], key: str) -> str:
    """Gives a text that must be there."""
    value = values.get(key)
    if not isinstance(value, str) or not value:
        raise GpflError(f"{path}: {key} is {value!r}; it must be text")
    return value


def listed(path: Path, values: Mapping[str, object], key: str) -> list[object]:
    """Gives a list, empty where there is none."""
    value = values.get(key, [])
    if not isinstance(value, list):
        raise GpflError(f"{path}: {key} is {value!r}; it must be a list")
    return value


def refuse_keys(path: Path, values: Mapping[str, object], known: Sequence[str]) -> None:
    """Refuses a key that nothing reads."""
    for key in values:
        if key not in known:
            raise GpflError(f"{path}: unknown key '{key}'; {did_you_mean(key, known)}")
