"""An archive of finished runs in one compressed file, from which tables and figures are rebuilt without the run folders.

A line of the archive is one folder of trials as JSON. Metrics are stored by column, rounded to six digits. Accuracies of
single clients are kept for the best, the selected and the last round. Models and checkpoints are left out.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpfl.errors import GpflError
from gpfl.federation import MANIFEST
from gpfl.io import files, toml
from gpfl.io.legacy import (
    FORMAT_VERSION,
    read_version,
    upgrade_config,
    upgrade_manifest,
    upgrade_record,
)

ARCHIVE = "runs.jsonl.xz"
"""Name of the archive in a folder of results, in place of the folder `runs`."""

DIGITS = 6
JSON_FILES = ("diverged", "features")
"""Files of a run that are kept as they are, if it has them."""

Content = dict[str, Any]


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


def unpack(archive: Path, runs: Path) -> None:
    """Write the run folders of an archive, as far as they were kept, into the new folder `runs`."""
    for entry in read(archive):
        folder = runs / entry["name"]
        for seed, run in entry["runs"].items():
            path = folder / f"seed-{seed}"
            path.mkdir(parents=True)
            config = {**entry["config"], "run": {**entry["config"]["run"], "seed": int(seed)}}
            _write_toml(path / "config.toml", config)
            _write_toml(path / MANIFEST, run["manifest"])
            _write_json(path / "summary.json", {"format_version": FORMAT_VERSION, **run["summary"]} if run["summary"] else None)
            for name in JSON_FILES:
                _write_json(path / f"{name}.json", run.get(name))
            _write_json(folder / f"made-{seed}.json", run["provenance"])
            records = [json.dumps(record, separators=(",", ":")) for record in _to_records(run["metrics"])]
            (path / "metrics.jsonl").write_text("\n".join(records) + "\n", encoding="utf-8")
        _write_toml(folder / "config.toml", entry["config"])
        _write_json(folder / "trials.json", entry["trials"])


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
    config = upgrade_config(toml.read(folder / "config.toml"))
    config.pop("format_version", None)
    runs = {
        path.name.removeprefix("seed-"): _pack_run(path)
        for path in folder.glob("seed-*")
        if (path / "summary.json").exists() or (path / "diverged.json").exists()
    }
    return {
        "format_version": FORMAT_VERSION,
        "name": folder.name,
        "config": config,
        "trials": _read_json(folder / "trials.json"),
        "runs": runs,
    }


def _pack_run(path: Path) -> Content:
    summary = _read_json(path / "summary.json")
    summary = upgrade_record("summary", summary) if summary else None
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [upgrade_record("metrics", json.loads(line)) for line in lines]
    kept_rounds = {summary["best_round"], summary["selected_round"], records[-1]["round"]} if summary else set()
    for record in records:
        if record["round"] not in kept_rounds:
            record.pop("client_accuracies", None)
    optional = {name: content for name in JSON_FILES if (content := _read_json(path / f"{name}.json"))}
    return {
        "summary": {key: value for key, value in (summary or {}).items() if key != "format_version"},
        "metrics": _to_columns(records),
        "manifest": _pack_manifest(path / MANIFEST),
        "provenance": _read_json(path.parent / f"made-{path.name.removeprefix('seed-')}.json"),
        **optional,
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


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _write_json(path: Path, content: Content | None) -> None:
    if content:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_toml(path: Path, content: Content | None) -> None:
    if content:
        path.write_text(toml.dump({"format_version": FORMAT_VERSION, **content}), encoding="utf-8")
