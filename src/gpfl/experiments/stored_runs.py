"""Read stored runs for tables, figures and statistics, from run folders or from an archive; compare and merge their configs.

`StoredRun` is a finished run, `StoredTrials` are the runs of one config, and `Trials` the finished ones under their label in
tables. A line of the archive is one folder of trials as JSON: metrics by column, rounded to six digits, accuracies of single
clients for the best, the selected and the last round, and no models or checkpoints.
"""

import hashlib
import json
import lzma
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from gpfl.errors import GpflError
from gpfl.federation import MANIFEST
from gpfl.io.legacy import list_client_accuracies, read_version
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict
from gpfl.training.run_dir import MetricsRecord, RunDir

ARCHIVE = "runs.jsonl.xz"  # name of the archive in a folder of results, in place of the folder `runs`
PROVENANCE_FILE = "made-{}.json"  # the file beside a run that records its command and commit, with the seed

UNCOMPARED = (*(("run", key) for key in ("seed", "engine", "device", "compile", "checkpoint_every")), ("partition", "file"))
"""Settings that do not change results, or in which the trials of one config differ."""

Content = dict[str, Any]  # a folder of trials, or a run of one, as archived

Sections = Mapping[str, Mapping[str, object]]  # a complete config by section and key


class StoredRun:
    """A finished run with one seed, in its folder or `archived`.

    `path` names it in messages. Models and checkpoints, if there are any, are below it.
    """

    def __init__(self, path: Path, archived: Content | None = None) -> None:
        self.path, self.archived = path, archived

    @cached_property
    def summary(self) -> Mapping[str, object]:
        """Content of summary.json."""
        return self.archived["summary"] if self.archived else RunDir(self.path).read_summary()

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return cast(int, self.summary["seed"])

    @property
    def provenance(self) -> Mapping[str, Any]:
        """The command and commits of the run, as far as they were recorded."""
        return (self.archived["provenance"] if self.archived else read_provenance(self.path)) or {}

    @property
    def commits(self) -> list[str]:
        """The commits of the code that made the run; ["unknown"] if they were not recorded."""
        return self.provenance.get("commits") or ["unknown"]

    def metrics(self) -> list[MetricsRecord]:
        """Return the records of all evaluated rounds. Raise if some are missing."""
        return _unpack_metrics(self.archived["metrics"]) if self.archived else RunDir(self.path).read_complete_metrics()

    def accuracies(self, round: object) -> tuple[list[float], float]:
        """Return the test accuracy of each client in a round, and that over all samples. Raise if they were not kept."""
        record = next((record for record in self.metrics() if record["round"] == round), {})
        clients = list_client_accuracies(record)
        if clients is None:
            raise GpflError(f"{self.path} holds no accuracies of single clients in round {round}: remove it and run it again")
        return clients, cast(float, record["accuracy"])

    def partition_hash(self) -> str:
        """Return a hash of the table and of every client's samples. Runs with equal hashes have the same clients."""
        path = self.path / MANIFEST
        try:
            return hash_partition(self.archived["manifest"]) if self.archived else _read_partition_hash(path.read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            raise GpflError(
                f"{path} cannot be read: replace it with a good copy, or remove {self.path} and run it again"
            ) from None


class StoredTrials:
    """Runs of one config with several seeds, finished or not, in a folder or `archived`."""

    def __init__(self, path: Path, archived: Content | None = None) -> None:
        self.path, self.archived = path, archived

    @cached_property
    def config(self) -> Sections:
        """Complete config."""
        if self.archived:
            return cast(Sections, self.archived["config"])
        try:
            return configs.read_sections(self.path / "config.toml")
        except GpflError as error:
            raise GpflError(f"{error}; delete {self.path} to run it again") from None

    @cached_property
    def data_hash(self) -> str:
        """Hash of the table, or "" if it is unknown."""
        if self.archived:
            return next((run["manifest"]["table"]["sha256"] for run in self.archived["runs"].values() if run["manifest"]), "")
        for path in (self.path / MANIFEST, *sorted(self.path.glob(f"seed-*/{MANIFEST}"))):
            with suppress(OSError, ValueError, KeyError, TypeError):
                # The samples of clients are long and follow these sections.
                head = re.split(r"\n\[(?:partition|split)\]", path.read_text(encoding="utf-8"), maxsplit=1)[0]
                return str(tomllib.loads(head)["table"]["sha256"])
        return ""

    @property
    def data_warning(self) -> str:
        """A warning if the data are incomplete or unverified, or ""."""
        folders = sorted(self.path.glob("seed-*"))
        runs = (
            [StoredRun(self.path, run) for run in self.archived["runs"].values()] if self.archived else map(StoredRun, folders)
        )
        return next((run.provenance["data"] for run in runs if "data" in run.provenance), "")

    def run(self, seed: int) -> StoredRun | None:
        """Return the run of a seed if it has finished."""
        path = self.path / f"seed-{seed}"
        if self.archived is None:
            return StoredRun(path) if RunDir(path).finished else None
        content = self.archived["runs"].get(str(seed))
        return StoredRun(path, content) if content and content["summary"] else None

    def diverged_round(self, seed: int) -> int | None:
        """Return the round in which the run of a seed diverged, or None."""
        if self.archived is None:
            run_dir = RunDir(self.path / f"seed-{seed}")
            return None if run_dir.finished else run_dir.diverged_round
        content = self.archived["runs"].get(str(seed), {})
        return content["diverged"]["round"] if "diverged" in content and not content["summary"] else None


@dataclass(frozen=True)
class Trials:
    """The finished runs of one config, one per seed. `method` is the label in tables."""

    method: str
    runs: Sequence[StoredRun]

    @property
    def summaries(self) -> list[Mapping[str, object]]:
        """Summary of each run."""
        return [run.summary for run in self.runs]

    @property
    def commits(self) -> tuple[str, ...]:
        """The commits of the code that made the runs."""
        return tuple(sorted({commit for run in self.runs for commit in run.commits}))

    def values(self, key: str) -> list[float]:
        """Return a number of each run's summary."""
        return [cast(float, run.summary[key]) for run in self.runs]

    def mean(self, key: str) -> float:
        """Return the mean over runs."""
        return float(np.mean(self.values(key)))

    def std(self, key: str) -> float:
        """Return the population standard deviation over runs, as in the paper."""
        return float(np.std(self.values(key)))


def read_stored_trials(out: Path) -> list[StoredTrials]:
    """Return all trials of a folder of results: its run folders or, if it has none, its archive."""
    archive = out / ARCHIVE
    if archive.exists() and not (out / "runs").exists():
        return [StoredTrials(archive / entry["name"], entry) for entry in read_archive(archive)]
    return [StoredTrials(path.parent) for path in sorted(out.glob("runs/*/config.toml"))]


def read_archive(archive: Path) -> Iterator[Content]:
    """Yield the folders of trials in an archive. Raise if it is damaged or of a newer version."""
    try:
        for line in lzma.decompress(archive.read_bytes()).decode().splitlines():
            entry = json.loads(line)
            read_version(entry, archive)
            yield entry
    except (OSError, ValueError, lzma.LZMAError) as problem:
        raise GpflError(f"{archive} cannot be read ({problem}): replace it with a good copy") from None


def _unpack_metrics(metrics: Content) -> list[MetricsRecord]:
    """Return the records of evaluated rounds from columns, and from sparse columns by index of the round."""
    columns = {key: dict(enumerate(values)) for key, values in metrics["columns"].items()}
    records: list[Content] = [{} for _ in metrics["columns"]["round"]]
    for key, values in (*columns.items(), *metrics["sparse"].items()):
        section, _, name = key.rpartition(".")
        for index, value in values.items():
            record = records[int(index)]
            if value is not None:
                (record.setdefault(section, {}) if section else record)[name] = value
    return records


def read_provenance(run: Path) -> dict[str, Any]:
    """Return the command and commits of a run from the file beside it; {} if it is missing or damaged."""
    try:
        note = json.loads((run.parent / PROVENANCE_FILE.format(run.name.removeprefix("seed-"))).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def hash_partition(manifest: Mapping[str, object]) -> str:
    """Return a hash of the table and of every client's samples in a manifest."""
    table = cast(Mapping[str, object], manifest["table"])
    return hashlib.sha256(json.dumps([table["sha256"], manifest["client"]], sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=16)  # most runs of a table share a manifest, and parsing one takes half a second
def _read_partition_hash(manifest: bytes) -> str:
    return hash_partition(tomllib.loads(manifest.decode()))


def first_difference(old: Sections, new: Sections) -> tuple[str, str, str] | None:
    """Return the first setting in which two configs differ, with both values, or None. Settings in `UNCOMPARED` may differ."""
    for section in {**new, **old}:
        old_values, new_values = old.get(section, {}), new.get(section, {})
        for key in {**new_values, **old_values}:
            before, after = (repr(values[key]) if key in values else "its default" for values in (old_values, new_values))
            if before != after and (section, key) not in UNCOMPARED:
                return f"{section}.{key}", before, after
    return None


def check_same_config(out: Path, old: Sections, new: Sections, holds: str) -> None:
    """Raise if what a folder or a file holds was made under another config."""
    if difference := first_difference(old, new):
        key, before, now = difference
        raise GpflError(f"{out} holds {holds} with {key} = {before}, now it is {now}: choose another --out")


def merge_configs(*layers: Sections) -> ConfigDict:
    """Return the sections of several configs in one. Later configs override earlier ones."""
    return {name: {key: value for layer in layers for key, value in layer.get(name, {}).items()} for name in chain(*layers)}
