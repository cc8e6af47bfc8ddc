"""Add the run folders of `gpfl reproduce` and `gpfl privacy` to the archive of recorded results."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpfl.experiments.features import read_projection_record
from gpfl.experiments.stored_runs import Content, read_archive, read_provenance
from gpfl.federation import MANIFEST
from gpfl.io import files, toml
from gpfl.io.legacy import FORMAT_VERSION, list_client_accuracies, upgrade_manifest
from gpfl.training import config as configs
from gpfl.training.run_dir import DIVERGED, RunDir

DIGITS = 6
"""Digits of the archive's numbers."""


def pack(runs: Path, archive: Path) -> int:
    """Add the folders of trials in `runs` to an archive and return how many it holds; a folder of the same name is merged."""
    entries = {entry["name"]: entry for entry in read_archive(archive)} if archive.exists() else {}
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
        "provenance": read_provenance(run.path) or None,
        **({} if run.diverged_round is None else {"diverged": {"round": run.diverged_round}}),
        **({"features": projection} if (projection := read_projection_record(run.path)) else {}),
    }


def _pack_manifest(path: Path) -> Content | None:
    """Return a manifest with the hash of its clients' samples in their place."""
    if not path.exists():
        return None
    manifest = upgrade_manifest(toml.read(path))
    if isinstance(manifest["client"], list):  # hashed as text, as in all recorded runs
        text = path.read_text(encoding="utf-8").partition("[[client]]")[2].partition("[source]")[0]
        manifest["client"] = {"sha256": hashlib.sha256(text.encode()).hexdigest()}
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


def _rounded(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value
