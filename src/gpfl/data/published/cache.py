"""The cache: parsed tables as plain arrays that are memory-mapped when they are opened."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpfl.core.local_round import Indices
from gpfl.data.table import Table
from gpfl.errors import GpflError

Array = npt.NDArray[np.generic]
FORMAT = 2


@dataclass(frozen=True)
class Parsed:
    """A data set as its publisher's files give it: all rows in one array, in a fixed order."""

    x: Array
    y: Array
    classes: int
    kind: str = "floats"
    pixel_max: int = 255
    vocabulary: int = 0
    client_ids: Indices | None = None
    client_names: Sequence[str] = ()


@dataclass(frozen=True)
class Held:
    """What a parsed table holds, as far as its headers tell."""

    rows: int
    verified: bool


@dataclass(frozen=True)
class Origin:
    """Where a table came from: name and sha256 of each file it was parsed from, and whether all are the published ones."""

    files: Sequence[Mapping[str, str]] = ()
    verified: bool = True


def cache_folder() -> Path:
    """Gives the folder for downloads and parsed tables: GPFL_CACHE, or the user's cache."""
    chosen = os.environ.get("GPFL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpfl"


def table_folder(name: str) -> Path:
    """Gives the folder of a parsed table."""
    return cache_folder() / "tables" / name


def as_table(name: str, parsed: Parsed, origin: Mapping[str, object]) -> Table:
    """Gives the table of parsed rows."""
    return Table(
        parsed.x,
        parsed.y,
        classes=parsed.classes,
        name=name,
        kind=parsed.kind,
        pixel_max=parsed.pixel_max,
        vocabulary=parsed.vocabulary,
        client_ids=parsed.client_ids,
        client_names=parsed.client_names,
        metadata=origin,
    )


def save(name: str, parsed: Parsed, origin: Origin) -> None:
    """Writes a parsed table, whole or not at all; of two processes that write the same one, either wins."""
    as_table(name, parsed, {})  # what could not be opened is not written
    target = table_folder(name)
    draft = target.parent / f".{name}.{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True)
        write(draft, parsed, origin)
        put_in_place(draft, target)
    except OSError as problem:
        raise GpflError(f"cannot write to {target.parent}: {problem.strerror}; set GPFL_CACHE to another folder") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write(folder: Path, parsed: Parsed, origin: Origin) -> None:
    """Writes a parsed table's arrays and facts into a folder."""
    np.save(folder / "x.npy", np.ascontiguousarray(parsed.x), allow_pickle=False)
    np.save(folder / "y.npy", np.ascontiguousarray(parsed.y).astype(np.int64), allow_pickle=False)
    if parsed.client_ids is not None:
        np.save(folder / "groups.npy", np.ascontiguousarray(parsed.client_ids).astype(np.int64), allow_pickle=False)
    facts = {
        "format": FORMAT,
        "classes": parsed.classes,
        "kind": parsed.kind,
        "white": parsed.pixel_max,
        "vocabulary": parsed.vocabulary,
        "group_names": list(parsed.client_names),
        "origin": asdict(origin),
    }
    (folder / "table.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def put_in_place(draft: Path, target: Path) -> None:
    """Gives a whole folder its name; one that had it goes."""
    old = draft.with_name(f"{draft.name}.old")
    try:
        with suppress(FileNotFoundError):
            target.rename(old)
        draft.rename(target)
    except OSError as problem:
        if problem.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # those: another process was faster, with a whole table
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def load(name: str) -> Table | None:
    """Gives a parsed table, memory-mapped; None where there is none."""
    with naming_damage(name):
        found = opened(table_folder(name))
        return as_table(name, *found) if found else None


def held(name: str) -> Held | None:
    """Gives what a parsed table holds without reading its rows; None where there is none. One that was cut off is refused."""
    with naming_damage(name):
        found = opened(table_folder(name))
        return Held(len(found[0].y), found[1]["verified"] is True) if found else None


def opened(folder: Path) -> tuple[Parsed, dict[str, object]] | None:
    """Gives the mapped arrays of a table and its origin; None where there is none in the format of today."""
    if not (folder / "table.json").exists():
        return None
    facts = json.loads((folder / "table.json").read_text(encoding="utf-8"))
    if facts["format"] != FORMAT:
        return None
    # Copy-on-write: torch wants arrays it could write to; nothing ever reaches the file.
    x, y = (np.lib.format.open_memmap(folder / f"{part}.npy", mode="c") for part in ("x", "y"))
    groups = folder / "groups.npy"
    parsed = Parsed(
        x,
        y,
        classes=int(facts["classes"]),
        kind=facts["kind"],
        pixel_max=int(facts["white"]),
        vocabulary=int(facts["vocabulary"]),
        client_ids=np.lib.format.open_memmap(groups, mode="c") if groups.exists() else None,
        client_names=facts["group_names"],
    )
    return parsed, dict(facts["origin"])


@contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Says of a table that does not open which one it is, and the way out."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, GpflError) as problem:
        raise GpflError(f"the parsed table in {table_folder(name)} is damaged ({problem}): gpfl data get {name}") from None


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Lets one process at a time fetch a data set; others wait."""
    folder = cache_folder() / "downloads" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    except OSError as problem:
        raise GpflError(f"cannot write to {folder}: {problem.strerror}; set GPFL_CACHE to another folder") from None
    try:
        try:
            import fcntl
        except ImportError:  # Windows: two fetches at once download twice, the last whole file stays
            yield
            return
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
