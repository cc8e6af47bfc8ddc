"""Small federations that tests share, and the command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import gpfl
from gpfl.data import DATASETS, DataSource
from gpfl.training.round_loop import RoundLoop
from gpfl.training.run_dir import RunDir

torch.set_num_threads(1)


def toy_table(rows: int = 120, classes: int = 3, width: int = 6, seed: int = 0) -> gpfl.Table:
    """Gaussian blobs, one a class: a problem that a few steps solve."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(classes, width)) * 2
    y = np.arange(rows) % classes
    x = centres[y] + draw.normal(size=(rows, width))
    return gpfl.Table(x.astype(np.float32), y, classes=classes, name="toy")


def toy_federation(sizes: tuple[int, ...] = (41, 27, 33, 19), **settings: int) -> gpfl.Federation:
    """Clients of unequal sizes, the smallest with fewer rows than a batch of 10 and one partial batch each."""
    table = toy_table(sum(sizes), **settings)
    ends = np.cumsum(sizes)
    x, y = table.x.numpy(), table.y.numpy()
    parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return gpfl.federate([(x[p], y[p]) for p in parts])


@pytest.fixture
def federation() -> gpfl.Federation:
    return toy_federation()


@pytest.fixture(autouse=True)
def unmarked_tests_see_no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their bounds are those of a CPU: on a GPU, sums in another order flip a rounded or dropped entry now and then."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that a test starts


# The command.


class Said(NamedTuple):
    """How a call of the command ended."""

    code: int
    out: str
    err: str


Command = Callable[..., Said]


@dataclass(frozen=True, kw_only=True)
class Toy(DataSource):
    """A data set of a hundred rows, so that a run takes no time."""

    make: Callable[[], gpfl.Table] = lambda: toy_table(120)
    name: str = "toy"
    description: str = "blobs"

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        return {
            "partition": {"name": "pathological", "clients": 4, "classes_per_client": 2, "balanced": True},
            "net": {"name": "mlp"},
            "train": {"rounds": 2, "lr": 0.1},
        }

    def read(self) -> gpfl.Table:
        return self.make()


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command as `gpfl` runs it, in an empty folder, with a data set named toy beside the real ones."""
    from gpfl.cli import main as cli  # here, so that tests without the command need not have what it needs

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DATASETS, "toy", Toy())

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["gpfl", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return Said(int(ended.value.code or 0), said.out, said.err)

    return call


@pytest.fixture
def toy_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two tables of toys in place of the paper's; HAR is not on this machine."""
    from toy_tables import FAIR, TOYS, in_place_of_the_papers

    folder = tmp_path_factory.mktemp("configs")
    monkeypatch.setenv("GPFL_CACHE", str(folder / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    with in_place_of_the_papers(folder, toys=TOYS, fair=FAIR):
        yield


def diverge(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Lets FedPer diverge in round 1 of a trial."""
    real = RoundLoop._refuse_nan

    def refuse_nan(self: RoundLoop, cohort: Any, clients: list[int], round: int) -> None:
        if (self.facts["method"], self.options.seed, round) == ("fedper", seed, 1):
            cohort.terms["ce"][0] = float("nan")
        real(self, cohort, clients, round)

    monkeypatch.setattr(RoundLoop, "_refuse_nan", refuse_nan)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_time(folder: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in RunDir(folder).lines()]
