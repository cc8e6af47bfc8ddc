"""An archive of finished runs in one compressed file, from which tables and figures are drawn without the run folders.

A line of the archive is one folder of trials as JSON. Metrics are stored by column, rounded to six digits. Accuracies of
single clients are kept for the best, the selected and the last round. Models and checkpoints are left out.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from gpfl.errors import GpflError
from gpfl.experiments.feature_maps import read_map_record
from gpfl.experiments.run_checks import Sections, merge_configs
from gpfl.experiments.stored_runs import PROVENANCE_FILE, Provenance, StoredRun, StoredTrials, hash_partition, read_provenance
from gpfl.federation import MANIFEST
from gpfl.io import files, toml
from gpfl.io.legacy import FORMAT_VERSION, list_client_accuracies, read_version, upgrade_manifest
from gpfl.training import config as configs
from gpfl.training.run_dir import DIVERGED, MetricsRecord, RunDir

ARCHIVE = "runs.jsonl.xz"
"""Name of the archive in a folder of results, in place of the folder `runs`."""

DIGITS = 6

Content = dict[str, Any]


class ArchivedTrials(StoredTrials):
    """Runs of one config in an archive. `path` is that of the archive with the name of their folder."""

    def __init__(self, path: Path, content: Content) -> None:
        super().__init__(path)
        self._config, self._runs = content["config"], content["runs"]

    @property
    def config(self) -> Sections:
        """Complete config."""
        return cast(Sections, self._config)

    @property
    def data_hash(self) -> str:
        """Hash of the table, or "" if it is unknown."""
        return next((run["manifest"]["table"]["sha256"] for run in self._runs.values() if run["manifest"]), "")

    @property
    def data_warning(self) -> str:
        """What the data lack."""
        return next((run["provenance"]["data"] for run in self._runs.values() if run["provenance"]), "")

    def run(self, seed: int) -> ArchivedRun | None:
        """Return the run of a seed if it has finished."""
        content = self._runs.get(str(seed))
        if not content or not content["summary"]:
            return None
        config = merge_configs(self.config, {"run": {"seed": seed}})
        return ArchivedRun(self.path / f"seed-{seed}", config, content)

    def diverged_round(self, seed: int) -> int | None:
        """Return the round in which the run of a seed diverged, or None."""
        content = self._runs.get(str(seed), {})
        return content["diverged"]["round"] if "diverged" in content and not content["summary"] else None


class ArchivedRun(StoredRun):
    """A finished run in an archive."""

    def __init__(self, path: Path, config: Sections, content: Content) -> None:
        super().__init__(path)
        self._config, self._content = config, content

    @property
    def summary(self) -> Mapping[str, object]:
        """Content of summary.json."""
        return cast(Mapping[str, object], self._content["summary"])

    def config(self) -> Sections:
        """Return the complete config."""
        return self._config

    def metrics(self) -> list[MetricsRecord]:
        """Return the records of all evaluated rounds."""
        return _to_records(self._content["metrics"])

    @property
    def feature_record(self) -> Mapping[str, object] | None:
        """The run's feature map, if it has one."""
        return cast(Mapping[str, object] | None, self._content.get("features"))

    def partition_hash(self) -> str:
        """Return a hash of the table and of every client's samples."""
        if not self._content["manifest"]:
            raise GpflError(f"{self.path} was archived without its federation: add the run again")
        return hash_partition(self._content["manifest"])

    def provenance(self) -> Provenance:
        """Return how the run was made."""
        note = self._content["provenance"] or {}
        return Provenance(tuple(note.get("commits", ())), note.get("data", ""))


def read_trials(archive: Path) -> list[ArchivedTrials]:
    """Return all trials in an archive."""
    return [ArchivedTrials(archive / entry["name"], entry) for entry in read(archive)]


def pack(runs: Path, archive: Path) -> int:
    """Add the folders of trials in `runs` to an archive and return how many it holds; a folder of the same name is merged."""
    entries = {entry["name"]: entry for entry in read(archive)} if archive.exists() else {}
    for folder in sorted(path.parent for path in runs.glob("*/config.toml")):
        entry = _pack_folder(folder)
        if entry["runs"]:
            known = entries.get(folder.name, {}).get("runs", {})
            entries[folder.name] = {
                **entry,
                "runs": dict(sorted({**known, **entry["runs"]}.items(), key=lambda item: int(item[0]))),
            }
    lines = "".join(json.dumps(entries[name], separators=(",", ":")) + "\n" for name in sorted(entries))
    files.write_bytes(archive, lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    return len(entries)


def read(archive: Path) -> Iterator[Content]:
    """Yield the folders of trials in an archive. Raise if it is damaged or of a newer version."""
    try:
        lines = lzma.decompress(archive.read_bytes()).decode().splitlines()
        for line in lines:
            entry = json.loads(line)
            read_version(entry, archive)
            yield entry
    except (OSError, ValueError, lzma.LZMAError) as problem:
        raise GpflError(f"{archive} cannot be read ({problem}): put a good copy in its place") from None


def _pack_folder(folder: Path) -> Content:
    runs = {
        path.name.removeprefix("seed-"): _pack_run(RunDir(path))
        for path in folder.glob("seed-*")
        if RunDir(path).finished or (path / DIVERGED).exists()
    }
    return {
        "format_version": FORMAT_VERSION,
        "name": folder.name,
        "config": configs.read_sections(folder / "config.toml"),
        "runs": runs,
    }


def _pack_run(run: RunDir) -> Content:
    summary = run.read_summary() if run.finished else {}
    records = run.read_metrics()
    kept_rounds = {summary["best_round"], summary["selected_round"], records[-1]["round"]} if summary else set()
    for record in records:
        if record["round"] not in kept_rounds:
            record.pop("client_accuracies", None)
        elif accuracies := list_client_accuracies(record):
            record["client_accuracies"] = accuracies
    return {
        "summary": {key: value for key, value in summary.items() if key != "metrics"},
        "metrics": _to_columns(records),
        "manifest": _pack_manifest(run.path / MANIFEST),
        "provenance": read_provenance(run.path.parent / PROVENANCE_FILE.format(run.path.name.removeprefix("seed-"))) or None,
        **({} if run.diverged_round is None else {"diverged": {"round": run.diverged_round}}),
        **({"features": feature_map} if (feature_map := read_map_record(run.path)) else {}),
    }


def _pack_manifest(path: Path) -> Content | None:
    """Return a manifest with the hash of its clients' samples in their place."""
    if not path.exists():
        return None
    manifest = upgrade_manifest(toml.read(path))
    clients = manifest["client"]
    if isinstance(clients, list):
        manifest["client"] = {"sha256": hashlib.sha256(json.dumps(clients, sort_keys=True).encode()).hexdigest()}
    return manifest


def _to_columns(records: Sequence[Mapping[str, Any]]) -> Content:
    columns: dict[str, list[Any]] = {}
    sparse: dict[str, dict[str, Any]] = {}
    for index, record in enumerate(records):
        flat = {key: value for key, value in record.items() if key != "train"}
        flat |= {f"train.{name}": value for name, value in record.get("train", {}).items()}
        for key, value in flat.items():
            if isinstance(value, list):
                sparse.setdefault(key, {})[str(index)] = [_rounded(entry) for entry in value]
            else:
                columns.setdefault(key, [None] * len(records))[index] = _rounded(value)
    return {"columns": columns, "sparse": sparse}


def _to_records(metrics: Mapping[str, Any]) -> list[Content]:
    columns, sparse = metrics["columns"], metrics["sparse"]
    records: list[Content] = [{} for _ in columns["round"]]
    for key, values in (*columns.items(), *sparse.items()):
        section, _, name = key.rpartition(".")
        for index, value in values.items() if isinstance(values, dict) else enumerate(values):
            record = records[int(index)]
            if value is not None:
                (record.setdefault(section, {}) if section else record)[name] = value
    return records


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value
