"""The experiments: every file is read, every column runs, and the paper's numbers agree with each other."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ToyDataset
from torch import nn

import gpfl
from gpfl.core.module_checks import Parts
from gpfl.core.net import Shape
from gpfl.core.options import option
from gpfl.data import DATASETS
from gpfl.experiments import definitions as studies
from gpfl.experiments import grid, grid_runner
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.definitions import Cell, Experiment, PaperValue, TableColumn
from gpfl.experiments.grid import GridPlan
from gpfl.methods import METHODS
from gpfl.models.architectures import ResNet18
from gpfl.training.callbacks import Callback
from gpfl.training.config import PROTOCOLS, resolve_config
from gpfl.training.result import Result

ROOT = Path(__file__).parents[2]
ALL = studies.load_experiments()
COLUMNS = [(one, column) for one in ALL.values() for column in one.columns]


def accuracy(name: str, key: str) -> dict[str, PaperValue]:
    return {label: numbers for (column, label), numbers in ALL[name].paper.items() if column == key}


# The files.


def test_every_experiment_of_the_paper_is_there_under_its_name_and_number() -> None:
    assert {one.name for one in ALL.values()} >= {
        *("effectiveness", "real-world", "scalability", "fairness", "stability", "ablation", "features", "feature-shift"),
    }
    for word, names in {
        "table1": ["effectiveness"],
        "table2": ["real-world", "scalability"],
        "table3": ["fairness"],
        "table4": ["stability"],
        "table6": ["ablation"],
        "figure2": ["features"],
        "figure3": ["feature-shift"],
    }.items():
        assert [one.name for one in studies.find_experiments([word])] == names
    assert studies.find_experiments(["all"]) == list(ALL.values())
    assert [one.name for one in studies.find_experiments(["table1", "effectiveness"])] == ["effectiveness"]


def test_every_toml_is_one_experiment_and_goes_into_the_wheel() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.toml")} == set(ALL)
    assert studies.config_dir() == ROOT / "configs"
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["force-include"] == {"configs": "gpfl/configs"}
    assert "configs" in build["sdist"]["include"]


@pytest.mark.parametrize("one", ALL.values(), ids=ALL)
def test_paper_has_a_number_for_every_cell_but_those_it_leaves_out(one: Experiment) -> None:
    ours = {"stability": {"cifar100-10of50"}, "ablation": {"cifar100"}}.get(one.name, set())  # settings of our own
    columns = [column for column in one.columns if column.key.split("/")[0] not in ours]
    cells = {(column.key, row.label) for column in columns for row in one.rows}
    missing = {"scalability": {("cifar100/500", "perfedavg")}, "features": cells}.get(one.name, set())
    assert one.paper.keys() == cells - missing
    assert all(numbers.cov is not None for numbers in one.paper.values()) == (one.measure == "fairness" or not one.paper)
    assert len({column.key for column in one.columns}) == len(one.columns)
    labels = {"", *(row.label for row in one.rows)}
    assert all(key in {column.key for column in one.columns} and label in labels for key, label in one.remarks)


def test_unknown_names_are_told_the_closest() -> None:
    with pytest.raises(gpfl.GpflError, match="unknown experiment 'tabel1'; did you mean 'table1'"):
        studies.find_experiments(["tabel1"])


def test_columns_are_named_by_key_by_half_a_key_and_by_pattern() -> None:
    def named(word: str) -> list[str]:
        return [column.key for column in ALL["effectiveness"].columns if column.matches(word)]

    assert named("cifar100/practical") == ["cifar100/practical"]
    assert named("fmnist/*") == named("fmnist") == ["fmnist/pathological", "fmnist/practical"]
    assert len(named("practical")) == 5
    assert named("cifar") == []


WRONG = {
    'rows = ["fedavgg"]': "the row 'fedavgg' is not a method; did you mean 'fedavg'?",
    'rows = [{ label = "mine", name = "none" }]': "is not a method",
    "rows = 3": "one.toml is not an experiment",
    "tittle = 1": "one.toml is not an experiment .*unexpected keyword argument 'tittle'",
    "columns = [1]": "one.toml is not an experiment",
}


@pytest.mark.parametrize("line", WRONG)
def test_mistake_in_a_file_is_named(tmp_path: Path, line: str) -> None:
    key = line.split(" = ")[0]
    text = {"title": '"t"', "caption": '"c"', "measure": '"accuracy"', "rows": '["gpfl"]', "aliases": "[]"}
    lines = [line, *(f"{other} = {value}" for other, value in text.items() if other != key)]
    (tmp_path / "one.toml").write_text("\n".join(lines))
    with pytest.raises(gpfl.GpflError, match=WRONG[line]):
        studies.read_experiment(tmp_path / "one.toml")


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ("gpfl = 3", "one.toml is not an experiment"),
        ("gpfl = [1, 2, 3]", "one.toml is not an experiment"),
        ("ditto = [1.0, 0.1]", "has a number for 'ditto', which is not among the rows"),
    ],
)
def test_number_that_fits_no_cell_is_refused(tmp_path: Path, numbers: str, words: str) -> None:
    head = 'title = "t"\ncaption = "c"\nmeasure = "accuracy"\nrows = ["gpfl"]\n'
    column = '[[columns]]\nkey = "d/a"\nheading = "h"\ngroup = "g"\ndata = { name = "digits" }\n[columns.paper]\n'
    (tmp_path / "one.toml").write_text(head + column + numbers)
    with pytest.raises(gpfl.GpflError, match=words):
        studies.read_experiment(tmp_path / "one.toml")
    (tmp_path / "one.toml").write_text(head + column + 'gpfl = "/"')
    assert studies.read_experiment(tmp_path / "one.toml").paper == {}
    other = column.replace("d/a", "d/b").replace("[columns.paper]\n", "")
    (tmp_path / "one.toml").write_text(head + column + "gpfl = [1.5, 0.1]\n" + other + 'paper = "d/a"\n')
    both = studies.read_experiment(tmp_path / "one.toml").paper
    assert both["d/b", "gpfl"] == both["d/a", "gpfl"] == studies.PaperValue(1.5, 0.1)
    (tmp_path / "one.toml").write_text(head + column + "gpfl = [1.5]\n" + other + 'paper = "d/c"\n')
    with pytest.raises(gpfl.GpflError, match="d/c"):
        studies.read_experiment(tmp_path / "one.toml")
    (tmp_path / "one.toml").write_text(head + other + "paper = 3\n")
    with pytest.raises(gpfl.GpflError, match="is not an experiment"):
        studies.read_experiment(tmp_path / "one.toml")
    (tmp_path / "one.toml").write_text(head + column.replace("data = ", "dataa = "))
    with pytest.raises(gpfl.GpflError, match="unexpected keyword argument 'dataa'"):
        studies.read_experiment(tmp_path / "one.toml")


# The paper's numbers.


@pytest.mark.parametrize(
    ("one", "column"),
    [pair for pair in COLUMNS if accuracy(pair[0].name, pair[1].key)],
    ids=lambda value: getattr(value, "name", getattr(value, "key", "")),
)
def test_gpfl_is_the_best_of_every_column_as_the_paper_claims(one: Experiment, column: TableColumn) -> None:
    numbers = {label: (p.mean if p.cov is None else -p.cov) for label, p in accuracy(one.name, column.key).items()}
    assert max(numbers, key=lambda label: numbers[label]) == "gpfl"


@pytest.mark.parametrize(
    ("key", "table", "other"),
    [
        ("tiny/pathological", "effectiveness", "tiny/pathological"),
        ("cifar100/100", "scalability", "cifar100/100"),
        ("har/real-world", "real-world", "har/real-world"),
        ("amazon/feature-shift", "feature-shift", "amazon/feature-shift"),
    ],
)
def test_deviation_over_coefficient_gives_back_the_accuracy(key: str, table: str, other: str) -> None:
    for label, fairness in accuracy("fairness", key).items():
        assert fairness.cov is not None
        printed = accuracy(table, other)[label].mean
        room = 0.006 * printed * (1 / fairness.mean + 1 / fairness.cov)  # each is rounded to two digits
        assert 100 * fairness.mean / fairness.cov == pytest.approx(printed, abs=room if table != "feature-shift" else 0), label


def test_accuracy_that_follows_is_as_exact_as_the_printed_digits() -> None:
    shift = accuracy("feature-shift", "amazon/feature-shift")
    between = {label: shift[label].interval for label in ("fedavg", "gpfl", "fedproto")}
    assert between == {
        "fedavg": pytest.approx((87.53, 88.56), abs=0.005),
        "gpfl": pytest.approx((89.47, 90.53), abs=0.005),
        "fedproto": pytest.approx((87.05, 87.95), abs=0.005),
    }
    assert not any(one.interval for one in accuracy("fairness", "amazon/feature-shift").values())


def test_curves_without_a_coefficient_are_refused(tmp_path: Path) -> None:
    text = (studies.config_dir() / "feature-shift.toml").read_text().replace("gpfl = [1.62, 1.80]", "gpfl = [90.0]")
    (tmp_path / "one.toml").write_text(text)
    with pytest.raises(gpfl.GpflError, match=r"\[90.0\] must be the deviation over clients and its coefficient"):
        studies.read_experiment(tmp_path / "one.toml")


def test_settings_that_stand_in_two_tables_have_one_number_but_for_the_two_that_are_remarked() -> None:
    twice = {
        ("effectiveness", "cifar100/practical"): ("scalability", "cifar100/20"),
        ("stability", "cifar100/fraction-1"): ("scalability", "cifar100/50"),
        ("ablation", "tiny-resnet18/practical"): ("effectiveness", "tiny-resnet18/practical"),
    }
    odd = set()
    for (one, key), (two, other) in twice.items():
        mine, theirs = accuracy(one, key), accuracy(two, other)
        if one == "ablation":
            mine["fedper"] = mine["gpfl without cov+gce"]
        odd |= {(one, label) for label in mine.keys() & theirs.keys() if mine[label] != theirs[label]}
    assert odd == {("stability", "ditto"), ("stability", "fedphp")}
    for label in ("ditto", "fedphp"):
        assert "stability" in ALL["scalability"].remarks["cifar100/50", label]
        assert "scalability" in ALL["stability"].remarks["cifar100/fraction-1", label]


def test_har_has_the_papers_one_column_however_it_is_read() -> None:
    for other in ("har/interleaved", "har/recordings"):
        assert accuracy("real-world", other) == accuracy("real-world", "har/real-world")
    assert accuracy("fairness", "har/recordings") == accuracy("fairness", "har/real-world")


def test_page_names_every_setting_that_a_protocol_changes() -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text()
    table = [line for line in page.splitlines() if line.startswith(("| GPFL:", "| pFedMe:", "| all:"))]
    named = {(line.split(":")[0][2:], line.split("`")[1]) for line in table}
    changed = set()
    for method in METHODS:
        usual, *others = [
            tomllib.loads(
                resolve_config({"data": {"name": "digits"}, "method": {"name": method}, "run": {"protocol": name}}).to_toml()
            )
            for name in PROTOCOLS
        ]
        for other in others:
            changed |= {("all", key) for key, value in other["train"].items() if str(value) != str(usual["train"][key])}
            own = {key for key, value in other["method"].items() if str(value) != str(usual["method"][key])}
            changed |= {(studies.display_name(method), key) for key in own}
    assert named == changed


# Every column runs.


@dataclass(frozen=True, kw_only=True)
class Tiny(ToyDataset):
    """A table of the kind of a published one; a column says all that it is run with."""

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        return {}


@dataclass(frozen=True, kw_only=True)
class TinyHar(Tiny):
    """Windows of signals, which may be laid out in two ways."""

    layout: str = option("channels", "the layout of a window", choices=("channels", "interleaved"))
    group: str = option("windows", "what stays together", choices=("windows", "recordings"))

    def read(self) -> gpfl.Table:
        table = super().read()
        if self.group == "recordings":
            rows = np.arange(len(table))
            table.group_ids = rows % 30 + 30 * (rows // 60)  # two windows of each person
        return table


def rows(count: int, shape: tuple[int, ...], classes: int, high: int = 256) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).integers(0, high, (count, *shape), dtype=np.uint8)
    return x, np.arange(count) % classes


def images(name: str, count: int, shape: tuple[int, ...], classes: int) -> Callable[[], gpfl.Table]:
    return lambda: gpfl.Table(*rows(count, shape, classes), classes=classes, name=name)


def grouped(name: str, count: int, shape: tuple[int, ...], classes: int, groups: int) -> Callable[[], gpfl.Table]:
    def make() -> gpfl.Table:
        x, y = rows(count, shape, classes)
        return gpfl.Table(x.astype(np.float32) / 256, y, classes=classes, name=name, client_ids=np.arange(count) % groups)

    return make


def words() -> gpfl.Table:
    x, y = rows(240, (8,), 4, high=40)
    return gpfl.Table(x.astype(np.int64), y, classes=4, name="agnews", kind="tokens")


def cifar100(count: int) -> Tiny:
    return Tiny(name="cifar100", make=images("cifar100", count, (1, 16, 16), 100))


TINY = {
    "fmnist": Tiny(name="fmnist", make=images("fmnist", 400, (1, 16, 16), 10)),
    "cifar100": cifar100(1000),
    "tiny": Tiny(name="tiny", make=images("tiny", 800, (3, 16, 16), 200)),
    "agnews": Tiny(name="agnews", make=words),
    "amazon": Tiny(name="amazon", make=grouped("amazon", 80, (12,), 2, 4)),
    "har": TinyHar(name="har", make=grouped("har", 300, (9, 1, 40), 6, 30)),
}


def small_resnet(self: ResNet18, shape: Shape, classes: int) -> Parts:
    """Return a net with BatchNorm in place of ResNet-18, with which a round of 20 clients takes many times as long."""
    base = nn.Sequential(
        nn.Conv2d(shape[0], 4, 7, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return {"base": base, "head": nn.Linear(4, classes)}


@pytest.fixture
def tiny_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the same kinds as the published ones, of a few hundred rows; a small ResNet; no models."""
    monkeypatch.setattr(Result, "export", lambda result, folder: None)
    monkeypatch.setattr(ResNet18, "build", small_resnet)
    for name, source in TINY.items():
        monkeypatch.setitem(DATASETS, name, source)


def contents() -> list[Any]:
    """Every column once, whatever tables it stands in."""
    found = {str(sorted(column.settings.items())): (one, column) for one, column in COLUMNS}
    slow = {("scalability", "cifar100/500")}
    return [
        pytest.param(one, column, marks=[pytest.mark.slow] if (one.name, column.key) in slow else [])
        for one, column in found.values()
    ]


def small(column: TableColumn, *, min_samples: int, batch_size: int) -> dict[str, dict[str, object]]:
    """Settings for few rows and little time."""
    split = {"min_samples": min_samples} if column.settings["partition"]["name"] == "dirichlet" else {}
    net: dict[str, object] = {"channels": [2, 2], "hidden": 8} if column.settings["net"]["name"] == "cnn4" else {}
    return {"train": {"batch_size": batch_size}, "partition": dict(split), "net": net}


@pytest.mark.usefixtures("tiny_data")
@pytest.mark.parametrize(("one", "column"), contents(), ids=lambda value: getattr(value, "key", getattr(value, "name", "")))
def test_every_column_runs_for_a_round_on_tiny_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: Experiment, column: TableColumn
) -> None:
    wanted = int(str(column.settings["partition"].get("clients", 0)))
    if wanted >= 100:
        monkeypatch.setitem(DATASETS, "cifar100", cifar100(10 * wanted))
    engine, batch_size = ("vmap", 10) if wanted >= 100 else ("loop", 400)  # many clients of few rows, or one step of all rows
    common = small(column, min_samples=2, batch_size=batch_size)
    plan = GridPlan(out=tmp_path, seeds=(0,), rounds=1, run={"engine": engine}, common=common)
    [job], wrong = grid.make_jobs([Cell(one, column, MethodVariant("fedavg", {"name": "fedavg"}))], plan)
    assert wrong == {}
    assert grid_runner.run_all([job], plan, lambda label: Callback(), {"command": "test", "commit": "none"}) == {}
    trials = job.trials("fedavg", (0,))
    assert trials is not None
    assert trials.summaries[0]["rounds"] == 1
    assert trials.summaries[0]["clients"] == (wanted or {"amazon": 4, "har": 30}[column.data])


@pytest.mark.usefixtures("tiny_data")
@pytest.mark.parametrize("one", ALL.values(), ids=ALL)
def test_every_row_of_every_experiment_can_be_laid_out(tmp_path: Path, one: Experiment) -> None:
    column = one.columns[0]
    plan = GridPlan(out=tmp_path, common=small(column, min_samples=8, batch_size=2))
    cells = [Cell(one, column, row) for row in one.rows]
    grid.check_cells(cells, plan)
    jobs, wrong = grid.make_jobs(cells, plan)
    assert wrong == {}
    assert len(jobs) == len(one.rows)


@pytest.mark.usefixtures("tiny_data")
def test_settings_that_stand_in_several_tables_are_run_once(tmp_path: Path) -> None:
    shared = [
        {("effectiveness", "cifar100/practical"), ("scalability", "cifar100/20")},
        {("scalability", "cifar100/50"), ("stability", "cifar100/fraction-1")},
        {("scalability", "cifar100/100"), ("fairness", "cifar100/100")},
        {("effectiveness", "tiny-resnet18/practical"), ("ablation", "tiny-resnet18/practical")},
        {("effectiveness", "tiny/pathological"), ("fairness", "tiny/pathological")},
        {("real-world", "har/real-world"), ("fairness", "har/real-world")},
        {("real-world", "har/recordings"), ("fairness", "har/recordings")},
        {("feature-shift", "amazon/feature-shift"), ("fairness", "amazon/feature-shift")},
    ]
    wanted = {place for places in shared for place in places}
    cells = [
        Cell(one, column, MethodVariant("gpfl", {"name": "gpfl"}))
        for one, column in COLUMNS
        if (one.name, column.key) in wanted
    ]
    plan = GridPlan(out=tmp_path, common={"partition": {"seed": 2}})
    jobs, wrong = grid.make_jobs(cells, plan)
    assert wrong == {}
    found = [{(cell.experiment.name, cell.column.key) for cell in job.cells} for job in jobs]
    assert sorted(map(sorted, found)) == sorted(map(sorted, shared))
