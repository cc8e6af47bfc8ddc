"""The cache of parsed tables: plain arrays that are memory-mapped when a table is loaded."""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from gpfl.data.columns import RawColumns, Schema
from gpfl.data.encoders import Tokenizer
from gpfl.data.table import Table
from gpfl.errors import GpflError
from gpfl.io import files

FORMAT = 2
TOKENIZER = "tokenizer.json"


def cache_dir() -> Path:
    """Return the folder of downloads and parsed tables: GPFL_CACHE, or the user's cache folder."""
    chosen = os.environ.get("GPFL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpfl"


def table_dir(name: str) -> Path:
    """Return the folder of a parsed table."""
    return cache_dir() / "tables" / name


def downloads_dir(name: str) -> Path:
    """Return the folder of a dataset's downloaded files."""
    return cache_dir() / "downloads" / name


def save(table: Table) -> None:
    """Save a table completely or not at all; of several processes that save the same table, any one wins."""
    target = table_dir(table.name)
    old = target.with_name(f".{table.name}.{uuid.uuid4().hex}.old")
    try:
        with files.draft_folder(target) as draft:
            _write(draft, table)
            with suppress(FileNotFoundError):
                target.rename(old)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # these: another process was faster
            raise _not_writable(target.parent, error) from None
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _write(folder: Path, table: Table) -> None:
    spec = table.input_spec
    np.save(folder / "x.npy", table.x.numpy(), allow_pickle=False)  # raw columns if the table has any
    np.save(folder / "y.npy", table.y.numpy(), allow_pickle=False)
    if table.client_ids is not None:
        np.save(folder / "groups.npy", table.client_ids, allow_pickle=False)
    content = {  # the names of format 2, so that tables of earlier versions load
        "format": FORMAT,
        "classes": table.classes,
        "kind": spec.kind,
        "white": spec.pixel_max,
        "vocabulary": spec.vocabulary,
        "group_names": list(table.client_names),
        "origin": table.metadata,
    }
    if table.raw is not None:
        content["schema"] = table.raw.schema.to_dict()
    if isinstance(table.encoder, Tokenizer):
        (folder / TOKENIZER).write_text(json.dumps(table.encoder.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "table.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load(name: str) -> Table | None:
    """Return a parsed table, memory-mapped; None if there is none in the current format."""
    folder = table_dir(name)
    if not (folder / "table.json").exists():
        return None
    try:
        content = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        clients = folder / "groups.npy"
        x = _map(folder / "x.npy")
        table = Table(
            RawColumns(Schema.from_dict(content["schema"]), np.asarray(x, np.float64)) if "schema" in content else x,
            _map(folder / "y.npy"),
            classes=int(content["classes"]),
            name=name,
            kind=content["kind"],
            pixel_max=int(content["white"]),
            vocabulary=int(content["vocabulary"]),
            client_ids=_map(clients) if clients.exists() else None,
            client_names=content["group_names"],
            metadata=dict(content["origin"]),
        )
        if (folder / TOKENIZER).exists():  # tables that earlier versions parsed have none
            table.encoder = Tokenizer.from_dict(json.loads((folder / TOKENIZER).read_text(encoding="utf-8")))
        return table
    except (OSError, ValueError, KeyError, TypeError, GpflError) as error:
        raise GpflError(f"the parsed table in {folder} is damaged ({error}): run gpfl data get {name}") from None


def _map(path: Path) -> np.memmap[tuple[int, ...], np.dtype[np.generic]]:
    # Copy-on-write, because torch wants writable arrays; nothing is ever written to the file.
    return np.lib.format.open_memmap(path, mode="c")


@contextmanager
def lock(name: str) -> Iterator[None]:
    """Let one process at a time prepare a dataset while the others wait."""
    folder = downloads_dir(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise _not_writable(folder, error) from None
    try:
        with suppress(ImportError):  # Windows: two processes both download, and the last complete file stays
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _not_writable(folder: Path, error: OSError) -> GpflError:
    return GpflError(f"cannot write to {folder}: {error.strerror}; set GPFL_CACHE to another folder")
