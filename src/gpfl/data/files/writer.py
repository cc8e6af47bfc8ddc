"""Write columns as CSV, Parquet or JSON lines."""

import io
from collections.abc import Mapping
from pathlib import Path

from gpfl.data.files.raw_table import Array
from gpfl.errors import GpflError

OUTPUT_SUFFIXES = (".csv", ".parquet", ".jsonl")


def format_table(columns: Mapping[str, Array], suffix: str = ".csv") -> bytes:
    """Return columns as the content of a file with one of `OUTPUT_SUFFIXES`; empty strings become missing values."""
    import polars as pl

    frame = pl.DataFrame({name: values.tolist() if values.dtype == object else values for name, values in columns.items()})
    frame = frame.with_columns(pl.col(pl.String).replace("", None))
    content = io.BytesIO()
    if suffix == ".parquet":
        frame.write_parquet(content)
    elif suffix == ".jsonl":
        frame.write_ndjson(content)
    else:
        frame.write_csv(content)
    return content.getvalue()


def check_output(path: Path, suffixes: tuple[str, ...], *, overwrite: bool) -> None:
    """Raise if a file cannot be written: it exists, is a folder, or has another suffix."""
    if path.suffix.lower() not in suffixes:
        raise GpflError(f"cannot write {path}: its name must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise GpflError(f"cannot write {path}: it is a folder; name a file")
    if path.exists() and not overwrite:
        raise GpflError(f"{path} exists and is not overwritten: choose another file, or add --force")
