"""Finished runs as tables, figures and statistics read them, in run directories or in an archive.

`StoredRun` is one run, `StoredTrials` the runs of one config. `Trials` are the finished ones under their label in tables.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import cast

import numpy as np

from gpfl.errors import GpflError
from gpfl.experiments.run_checks import Sections, is_finished
from gpfl.federation import MANIFEST
from gpfl.io import toml
from gpfl.io.legacy import list_client_accuracies
from gpfl.training import config as configs
from gpfl.training.run_dir import MetricsRecord, RunDir

PROVENANCE_FILE = "made-{}.json"
"""The file beside a run of this seed that says how it was made."""


@dataclass(frozen=True)
class Provenance:
    """How a run was made: the commits of the code, and what its data lack."""

    commits: tuple[str, ...] = ()
    data_warning: str = ""


class StoredRun(ABC):
    """A finished run with one seed.

    `path` names it in messages. Models and checkpoints, if there are any, are below it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def summary(self) -> Mapping[str, object]:
        """Content of summary.json."""

    @abstractmethod
    def config(self) -> Sections:
        """Return the complete config with today's keys."""

    @abstractmethod
    def metrics(self) -> list[MetricsRecord]:
        """Return the records of all evaluated rounds. Raise if some are missing."""

    @abstractmethod
    def partition_hash(self) -> str:
        """Return a hash of the table and of every client's samples. Runs with equal hashes have the same clients."""

    @abstractmethod
    def provenance(self) -> Provenance:
        """Return how the run was made."""

    @property
    def feature_record(self) -> Mapping[str, object] | None:
        """The run's feature map as archived; None if it is in the run's folder, if anywhere."""
        return None

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return cast(int, self.summary["seed"])

    def accuracies(self, round: object) -> tuple[list[float], float]:
        """Return the test accuracy of each client in a round, and that over all samples. Raise if they were not kept."""
        record = next((record for record in self.metrics() if record["round"] == round), {})
        clients = list_client_accuracies(record)
        if clients is None:
            raise GpflError(f"{self.path} holds no accuracies of single clients in round {round}: remove it and run it again")
        return clients, cast(float, record["accuracy"])


class FolderRun(StoredRun):
    """A finished run in its run directory."""

    @cached_property
    def summary(self) -> Mapping[str, object]:
        """Content of summary.json."""
        return RunDir(self.path).read_summary()

    def config(self) -> Sections:
        """Return the complete config with today's keys."""
        return cast(Sections, toml.read(self.path / "config.toml"))

    def metrics(self) -> list[MetricsRecord]:
        """Return the records of all evaluated rounds. Raise if some are missing."""
        return RunDir(self.path).read_complete_metrics()

    def partition_hash(self) -> str:
        """Return a hash of the table and of every client's samples. Runs with equal hashes have the same clients."""
        path = self.path / MANIFEST
        try:
            return _read_partition_hash(path.read_bytes())
        except OSError as problem:
            raise GpflError(f"{path} cannot be read ({problem.strerror})") from None
        except (ValueError, KeyError, TypeError):
            raise GpflError(
                f"{path} is damaged: put a good copy in its place, or remove {self.path} and run it again"
            ) from None

    def provenance(self) -> Provenance:
        """Return how the run was made; nothing is known if the file is missing or damaged."""
        note = read_provenance(self.path.parent / PROVENANCE_FILE.format(self.path.name.removeprefix("seed-")))
        return Provenance(tuple(cast(Sequence[str], note.get("commits", ()))), str(note.get("data", "")))


class StoredTrials(ABC):
    """Runs of one config with several seeds, finished or not."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def config(self) -> Sections:
        """Complete config."""

    @property
    @abstractmethod
    def data_hash(self) -> str:
        """Hash of the table, or "" if it is unknown."""

    @property
    @abstractmethod
    def data_warning(self) -> str:
        """What the data lack."""

    @abstractmethod
    def run(self, seed: int) -> StoredRun | None:
        """Return the run of a seed if it has finished and is undamaged."""

    @abstractmethod
    def diverged_round(self, seed: int) -> int | None:
        """Return the round in which the run of a seed diverged, or None."""


class FolderTrials(StoredTrials):
    """Runs in a folder, each in its own folder seed-N."""

    @cached_property
    def config(self) -> Sections:
        """Complete config."""
        return configs.read_sections(self.path / "config.toml")

    @cached_property
    def data_hash(self) -> str:
        """Hash of the table, or "" if it is unknown."""
        for path in (self.path / MANIFEST, *sorted(self.path.glob(f"seed-*/{MANIFEST}"))):
            with suppress(OSError, ValueError, KeyError):
                # The samples of clients are long and follow these sections.
                head = re.split(r"\n\[(?:partition|split)\]", path.read_text(encoding="utf-8"), maxsplit=1)[0]
                return str(tomllib.loads(head)["table"]["sha256"])
        return ""

    @property
    def data_warning(self) -> str:
        """What the data lack."""
        notes = map(read_provenance, sorted(self.path.glob(PROVENANCE_FILE.format("*"))))
        return next((str(note["data"]) for note in notes if "data" in note), "")

    def run(self, seed: int) -> StoredRun | None:
        """Return the run of a seed if it has finished and is undamaged."""
        path = self.path / f"seed-{seed}"
        return FolderRun(path) if is_finished(path) else None

    def diverged_round(self, seed: int) -> int | None:
        """Return the round in which the run of a seed diverged, or None."""
        run_dir = RunDir(self.path / f"seed-{seed}")
        return None if run_dir.finished else run_dir.diverged_round


@dataclass(frozen=True)
class Trials:
    """The finished runs of one config, one per seed. `method` is the label in tables."""

    method: str
    runs: Sequence[StoredRun]

    @property
    def summaries(self) -> list[Mapping[str, object]]:
        """Summary of each run."""
        return [run.summary for run in self.runs]

    def values(self, key: str) -> list[float]:
        """Return a number of each run's summary."""
        return [cast(float, run.summary[key]) for run in self.runs]

    def mean(self, key: str) -> float:
        """Return the mean over runs."""
        return float(np.mean(self.values(key)))

    def std(self, key: str) -> float:
        """Return the population standard deviation over runs, as in the paper."""
        return float(np.std(self.values(key)))


def read_provenance(path: Path) -> dict[str, object]:
    """Return the content of a provenance file; {} if it is missing or damaged."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        commits, data = note.get("commits", []), note.get("data", "")
    except (OSError, ValueError, AttributeError):
        return {}
    valid = isinstance(data, str) and isinstance(commits, list) and all(isinstance(commit, str) for commit in commits)
    return cast(dict[str, object], note) if valid else {}


def hash_partition(manifest: Mapping[str, object]) -> str:
    """Return a hash of the table and of every client's samples in a manifest."""
    table = cast(Mapping[str, object], manifest["table"])
    return hashlib.sha256(json.dumps([table["sha256"], manifest["client"]], sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=16)  # most runs of a table share a manifest, and parsing one takes half a second
def _read_partition_hash(manifest: bytes) -> str:
    return hash_partition(tomllib.loads(manifest.decode()))
