"""Find a dataset by its name or path, with the user's options."""

import os
from collections.abc import Mapping
from pathlib import Path

from gpfl.core import options
from gpfl.data import DATASETS
from gpfl.data.files import FileDataset
from gpfl.data.table import DataSource
from gpfl.errors import GpflError, did_you_mean


def find_dataset(name: str, settings: Mapping[str, object]) -> DataSource:
    """Return the dataset of that name, or the file or folder at that path, with `settings` for its options."""
    if name in DATASETS:
        return _configure(DATASETS[name], settings)
    path = Path(name).expanduser()
    if not name or not (path.exists() or os.sep in name or path.suffix):
        raise GpflError(f"unknown data '{name}'; {did_you_mean(name, DATASETS)} (or give the path of a file or folder)")
    if not path.exists():
        raise GpflError(f"there is no file or folder {name}")
    if schema := settings.get("schema"):  # a run may be resumed from another folder
        settings = {**settings, "schema": str(Path(str(schema)).expanduser().resolve())}
    return _configure(FileDataset(name=path.resolve().name, description="your own files", path=path), settings)


def _configure(source: DataSource, settings: Mapping[str, object]) -> DataSource:
    known = options.options_of(type(source))
    others: dict[str, type] = {
        "your own files": FileDataset,
        **{f"data '{name}'": type(other) for name, other in DATASETS.items()},
    }
    for key in settings:
        owners = [name for name, kind in others.items() if key in options.options_of(kind)]
        if key not in known and owners:
            raise GpflError(f"data.{key} belongs to {' and '.join(owners)}, not to '{source.name}': leave it out")
        if key not in known:
            raise GpflError(f"unknown key 'data.{key}'; {did_you_mean(key, (*known, 'name'))}")
    return options.replace(source, settings, "data")
