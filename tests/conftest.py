"""Fixtures that tests share: small federations and the command `gpfl`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import gpfl
from gpfl.data import DATASETS, DataSource
from gpfl.training.callbacks import Callback
from gpfl.training.round_loop import RoundLoop
from gpfl.training.run_dir import MetricsRecord, RunDir

torch.set_num_threads(1)
STARTED = time.monotonic()


def toy_table(samples: int = 120, classes: int = 3, width: int = 6, seed: int = 0) -> gpfl.Table:
    """Return Gaussian blobs, one per class: a problem that a few steps solve."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(classes, width)) * 2
    y = np.arange(samples) % classes
    x = centres[y] + rng.normal(size=(samples, width))
    return gpfl.Table(x.astype(np.float32), y, classes=classes, name="toy")


def toy_federation(sizes: tuple[int, ...] = (41, 27, 33, 19), **settings: int) -> gpfl.Federation:
    """Return clients of unequal sizes, the smallest with fewer training samples than two batches of 10."""
    table = toy_table(sum(sizes), **settings)
    ends = np.cumsum(sizes)
    x, y = table.x.numpy(), table.y.numpy()
    slices = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return gpfl.federate([(x[each], y[each]) for each in slices])


@pytest.fixture
def federation() -> gpfl.Federation:
    """A small federation."""
    return toy_federation()


@pytest.fixture(autouse=True)
def hide_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPU from tests that are not marked `gpu`: their tolerances are for the order of sums on a CPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for processes that a test starts


@pytest.fixture(autouse=True, scope="session")
def skip_fsync() -> Iterator[None]:
    """Let files reach the disk when they may: thousands of small ones are written, and no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


# The command.


class CommandResult(NamedTuple):
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., CommandResult]


@dataclass(frozen=True, kw_only=True)
class ToyDataset(DataSource):
    """A dataset of 120 samples, so that a run takes no time."""

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
    """The command `gpfl` in an empty folder, with a dataset named toy added to the real ones."""
    from gpfl.cli import main as cli  # not at the top: tests of the engines run without it

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(DATASETS, "toy", ToyDataset())

    def call(*arguments: object) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["gpfl", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        return CommandResult(int(ended.value.code or 0), output.out, output.err)

    return call


def assert_error(result: CommandResult, *phrases: str) -> None:
    """Assert that a command failed with exit code 2 and one line that has all phrases, and printed nothing else."""
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("gpfl: ")
    assert (result.err.count("\n"), result.err[-1]) == (1, "\n")
    for phrase in phrases:
        assert phrase in result.err


@pytest.fixture
def toy_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two tables of toy datasets instead of the paper's; HAR is missing on this machine."""
    from toy_tables import FAIR, TOYS, replace_experiments

    folder = tmp_path_factory.mktemp("configs")
    monkeypatch.setenv("GPFL_CACHE", str(folder / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    with replace_experiments(folder, toys=TOYS, fair=FAIR):
        yield


def make_fedper_diverge(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Make FedPer diverge in round 1 of a trial."""
    real = RoundLoop._check_losses

    def check_losses(self: RoundLoop, cohort: Any, clients: list[int], round: int) -> None:
        if (self.metadata["method"], self.options.seed, round) == ("fedper", seed, 1):
            cohort.terms["ce"][0] = float("nan")
        real(self, cohort, clients, round)

    monkeypatch.setattr(RoundLoop, "_check_losses", check_losses)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def metrics_without_time(folder: Path) -> list[dict[str, object]]:
    """Return the metrics of a run without wall-clock times."""
    return [{key: value for key, value in line.items() if key != "seconds"} for line in RunDir(folder).read_metrics()]


class KilledError(Exception):
    """The simulated end of the process."""


class KillAt(Callback):
    """Raise right after a round is evaluated."""

    def __init__(self, round: int) -> None:
        self.round = round

    def on_evaluate(self, record: MetricsRecord) -> None:
        if record["round"] == self.round:
            raise KilledError


# Faults of deployments.


@pytest.fixture
def table(record_property: Callable[[str, object], None]) -> object:
    """The lines of a test in the table of faults."""
    from fault_deployment import FaultTable  # not at the top: it needs gpfl[flower]

    return FaultTable(record_property)


START = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Note the commit and the machine for the table of faults."""
    if os.environ.get("GPFL_FAULTS_TABLE"):
        from fault_deployment import describe_start

        config.stash[START] = describe_start()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the table of faults if GPFL_FAULTS_TABLE asks for it; tests may have run in several processes."""
    if os.environ.get("GPFL_FAULTS_TABLE"):
        from fault_deployment import PROPERTY, write_table

        reports = [each for each in terminalreporter.stats.get("passed", []) if each.when == "call"]
        lines = [line for report in reports for key, line in report.user_properties if key == PROPERTY]
        seconds = time.monotonic() - STARTED
        write_table(lines, config.stash[START], seconds, getattr(config.option, "numprocesses", 0) or 1)
