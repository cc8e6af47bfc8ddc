"""Manifests: TOML files that name a table and list the samples of each client, so that others get the same federation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gpfl.core import options
from gpfl.data import DATASETS, FileDataset
from gpfl.data.table import DataSource
from gpfl.errors import GpflError
from gpfl.io import toml
from gpfl.io.legacy import read_version, upgrade_manifest

MANIFEST = "federation.toml"  # name of the manifest in a run's folder


def read_manifest(path: Path) -> dict[str, object]:
    """Return the content of a manifest, upgraded to today's names."""
    content = toml.read(path)
    return upgrade_manifest(content) if read_version(content, path) == 1 else content


def manifest_data_name(path: Path) -> str:
    """Return the name of the dataset that a manifest divides. Raise if it is not a named dataset."""
    content = read_manifest(path) if path.is_file() else {}
    table = content.get("table")
    name = str(table.get("name", "digits")) if isinstance(table, dict) else "digits"
    if name not in DATASETS:
        raise unknown_data_error(path, name, content)
    return name


def manifest_data_options(path: Path, name: str) -> dict[str, object]:
    """Return the options with which the data of a manifest were read."""
    source = read_manifest(path).get("source") if path.is_file() else None
    known = options.options_of(type(DATASETS[name]) if name in DATASETS else FileDataset)
    return {key: source[key] for key in known if key in source} if isinstance(source, dict) else {}


def changed_options(source: DataSource | None) -> dict[str, object]:
    """Return the options of a named dataset that differ from its defaults. Files record theirs in the table's metadata."""
    if source is None or isinstance(source, FileDataset):
        return {}
    defaults = options.option_values(DATASETS[source.name]) if source.name in DATASETS else {}
    return {key: value for key, value in options.option_values(source).items() if value != defaults.get(key)}


def check_encoding(path: Path, content: Mapping[str, object]) -> None:
    """Raise if the manifest divides columns that an earlier version encoded before they were divided."""
    source = content.get("source")
    if isinstance(source, dict) and "columns" in source:
        raise GpflError(
            f"{path} was written by an earlier gpfl, which scaled columns by pooled rows; this version scales them by the "
            "training samples of each client, so numbers differ: start a new run (models of the old one still load)"
        )


def unknown_data_error(path: Path, name: str, content: Mapping[str, object]) -> GpflError:
    """Return the error for a manifest whose data are not a named dataset."""
    source = content.get("source")
    if isinstance(source, dict) and "classes" in source:
        return GpflError(f"{path} divides '{name}', files of your own: name the file or folder with --data")
    return GpflError(f"{path} divides the data '{name}', which were given in Python: give them again there")
