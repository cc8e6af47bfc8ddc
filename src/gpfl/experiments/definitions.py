"""The paper's tables and figures with its numbers, read from configs/, and their columns and rows chosen by name."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpfl.errors import GpflError, did_you_mean
from gpfl.experiments.compare import MethodVariant, parse_methods
from gpfl.io import toml
from gpfl.methods import METHODS
from gpfl.training.config import SECTIONS, ConfigDict

ROUNDS, PATIENCE = 2000, 100
"""The paper's rounds, and the patience that the authors' code allows. Many runs reach their best round long before: GPFL on
Cifar100 near round 190, methods on TINY* at rounds 25 to 230. On HAR and AG News most continue beyond round 300."""

HALF_DIGIT = 0.005  # rounding error of a number printed with two decimals
MAX_PAPER_STDS = 2.0  # a difference from the paper of more of its standard deviations than this is marked

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

CellKey = tuple[str, str]  # key of a column and label of a row


@dataclass(frozen=True)
class PaperValue:
    """What the paper prints, in percent.

    For fairness `mean` is the standard deviation over clients and `cov` the coefficient of variation, in hundredths.
    """

    mean: float
    std: float | None = None  # over trials
    cov: float | None = None
    interval: tuple[float, float] | None = None  # range of a mean that is not printed, but follows from other numbers


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
    measure: str  # accuracy, fairness, curves or features; the last two also have a table of accuracies
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


def read_experiment(path: Path) -> Experiment:
    """Return the experiment of a file in configs/."""
    content = toml.read(path)
    try:
        return _parse_experiment(path.stem, content)
    except GpflError as error:
        raise GpflError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GpflError(f"{path} is not an experiment ({error!r}): compare it with the other files") from None


def _parse_experiment(name: str, content: Mapping[str, Any]) -> Experiment:
    fields = dict(content)
    rows = {row.label: row for row in map(_parse_row, fields.pop("rows"))}
    columns: list[TableColumn] = []
    numbers: dict[str, Mapping[str, Any]] = {}
    paper: dict[CellKey, PaperValue] = {}
    for values in fields.pop("columns", []):
        settings = {section: values[section] for section in SECTIONS if section in values}
        options = {key: value for key, value in values.items() if key not in (*settings, "paper")}
        column = TableColumn(**options, settings=settings)
        columns.append(column)
        printed = values.get("paper", {})
        numbers[column.key] = numbers[printed] if isinstance(printed, str) else printed  # a key: those of an earlier column
        for label, value in numbers[column.key].items():
            if label not in rows:
                raise GpflError(f"{column.key} has a number for '{label}', which is not among the rows")
            if value != "/":  # the paper's sign for no number
                paper[column.key, label] = _parse_paper_value(fields["measure"], *value)
    remarks = {(remark["column"], remark.get("row", "")): remark["text"] for remark in fields.pop("remarks", [])}
    fields |= {"rows": tuple(rows.values()), "columns": tuple(columns), "aliases": tuple(fields.get("aliases", []))}
    return Experiment(name, paper=paper, remarks=remarks, **fields)


def _parse_row(row: object) -> MethodVariant:
    known = {variant.label: variant for variant in parse_methods("all,ablations")}
    if isinstance(row, str) and row in known:
        return known[row]
    if isinstance(row, dict) and isinstance(row.get("label"), str) and row.get("name") in METHODS:
        return MethodVariant(row["label"], {key: value for key, value in row.items() if key != "label"})
    raise GpflError(f"the row {row!r} is not a method; {did_you_mean(str(row), known)}")


def _parse_paper_value(measure: str, first: float, second: float | None = None) -> PaperValue:
    """Return the paper's numbers: mean and std over trials, for fairness and curves std over clients and CoV."""
    if measure == "fairness":
        return PaperValue(float(first), cov=second)
    if measure == "curves":
        if second is None or second <= HALF_DIGIT:
            raise GpflError(f"[{first}] must be the deviation over clients and its coefficient")
        # The accuracy that follows from them, within the range that their rounding allows.
        low, high = 100 * (first - HALF_DIGIT) / (second + HALF_DIGIT), 100 * (first + HALF_DIGIT) / (second - HALF_DIGIT)
        return PaperValue(100 * first / second, interval=(low, high))
    return PaperValue(float(first), second)


@dataclass(frozen=True)
class Selection:
    """Columns and rows of experiments, by the experiment's name."""

    experiments: list[Experiment]
    columns: dict[str, list[TableColumn]]
    rows: dict[str, list[MethodVariant]]

    @property
    def cells(self) -> list[Cell]:
        """All cells, experiment by experiment, column by column."""
        return [
            Cell(experiment, column, row)
            for experiment in self.experiments
            for column in self.columns[experiment.name]
            for row in self.rows[experiment.name]
        ]


def select_cells(experiments: list[Experiment], cells: str | None, methods: str) -> Selection:
    """Return the columns and rows that --cells and --methods name. Raise if a name has no match."""
    columns = {each.name: [column for column in each.columns if not column.extra] for each in experiments}
    if cells is not None:
        names = parse_names("--cells", cells)
        for name in names:
            if not any(column.matches(name) for each in experiments for column in each.columns):
                keys = {column.key for each in experiments for column in each.columns}
                known = keys if "/" in name else {half for key in keys for half in key.split("/")}
                raise GpflError(f"--cells names '{name}', which is not a cell; {did_you_mean(name, known)}")
        columns = {
            each.name: [column for column in each.columns if any(column in _find_columns(name, each.columns) for name in names)]
            for each in experiments
        }
    names = parse_names("--methods", methods)
    rows = {each.name: [row for row in each.rows if any(_matches_row(name, row) for name in names)] for each in experiments}
    for name in names:
        if name in ("all", "ablations") or any(_matches_row(name, row) for each in experiments for row in each.rows):
            continue
        if name not in METHODS:
            known = {row.label for each in experiments for row in each.rows} | {*METHODS, "all", "ablations"}
            raise GpflError(f"--methods names '{name}', which is not a method; {did_you_mean(name, known)}")
        for experiment_rows in rows.values():  # a row that the paper does not have
            experiment_rows.append(MethodVariant(name, {"name": name}))
    selected = [each for each in experiments if columns[each.name] and rows[each.name]]
    if not selected:
        titles = ", ".join(each.name for each in experiments)
        labels = ", ".join(dict.fromkeys(row.label for each in experiments for row in each.rows))
        fix = f"; its rows are {labels}" if cells is None else f" in the columns of --cells {cells}: leave one of them out"
        raise GpflError(f"{titles} has no row of --methods {methods}{fix}")
    return Selection(selected, columns, rows)


def parse_names(flag: str, text: str) -> list[str]:
    """Return the names of a list separated by commas, each once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise GpflError(f"{flag} is '{text}'; it must be names separated by commas")
    return names


def _find_columns(name: str, columns: Sequence[TableColumn]) -> list[TableColumn]:
    """Return the columns that a name means. Half a key means an extra column only if it means no other."""
    matches = [column for column in columns if column.matches(name)]
    return [column for column in matches if not column.extra or "/" in name] or matches


def _matches_row(name: str, row: MethodVariant) -> bool:
    return name == "all" or name in (row.label, row.folder) or (name == "ablations" and "without" in row.label)
