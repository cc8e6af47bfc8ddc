"""New samples for a model: rows of columns, images, texts or arrays, read as the model's encoder needs them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gpfl.core.net import InputSpec
from gpfl.data.columns import UNKNOWN, RawColumns, Schema
from gpfl.data.encoders import ImageFormat, Tokenizer
from gpfl.data.files import new_rows
from gpfl.data.files.layout import IMAGE_SUFFIXES, InputFile
from gpfl.data.files.raw_table import Array, RawTable, as_text, join_names, number_rows
from gpfl.data.files.samples import as_images, find_input_array
from gpfl.data.preprocessing import UNSEEN, Preprocessor
from gpfl.data.table import ArrayLike, read_samples
from gpfl.errors import GpflError, did_you_mean, pluralize

Encoder: TypeAlias = Preprocessor | Tokenizer | ImageFormat  # makes inputs of raw samples

NewData: TypeAlias = new_rows.NewData | Sequence[Mapping[str, object]] | Sequence[str] | Sequence[Path]
"""Rows as a file, data frame, dict of columns or list of dicts; images as paths; texts as strings."""

Inputs: TypeAlias = ArrayLike | RawColumns | NewData
"""Samples: encoded ones as numbers, raw columns, or new data, which a model's encoder reads."""


@dataclass(frozen=True, eq=False)
class NewInputs:
    """New samples as a model takes them."""

    x: RawColumns | Array  # raw columns, or encoded samples
    table: RawTable  # all columns as they were read; of images `file`, `class` (its folder) and `client` (the first folder)
    notes: tuple[str, ...] = ()  # notes for the user on how the data were read

    def __len__(self) -> int:
        return len(self.x)

    def select(self, rows: npt.NDArray[np.int64]) -> RawColumns | Array:
        """Return the samples at `rows`."""
        return self.x.select(rows) if isinstance(self.x, RawColumns) else self.x[rows]


@dataclass(frozen=True)
class ReadOptions:
    """How new samples are read."""

    unseen: str = ""  # what to do with categories that no client trained on, one of `UNSEEN`; "": as the model was trained to
    unreadable: Literal["error", "missing"] = "error"  # what to do with cells that are no number or date where one is due
    missing: Literal["error", "drop"] = "error"  # what to do with rows that have missing values which the model does not fill
    text_columns: tuple[str, ...] = ()  # columns that make up a text; (): those of the training data, or `text`
    others: tuple[str, ...] = ()  # columns that are not inputs and stay text even if all their cells are numbers


def is_raw(x: object) -> TypeGuard[NewData]:
    """Return whether samples are raw: paths, strings, or columns by name."""
    if isinstance(x, (str, Path, Mapping)):
        return True
    if isinstance(x, (RawColumns, Tensor)):
        return False
    if hasattr(x, "columns"):
        return True
    if not isinstance(x, (list, tuple, np.ndarray)) and not hasattr(x, "__array__"):
        return False
    first = next(iter(cast(Sequence[object], x)), None)
    return isinstance(first, (str, Path, Mapping))


def read_inputs(data: NewData, encoder: Encoder | None, spec: InputSpec, options: ReadOptions | None = None) -> NewInputs:
    """Return new samples as inputs for a model with this encoder."""
    options = options or ReadOptions()
    if isinstance(encoder, Preprocessor):
        return _read_columns(data, encoder, options)
    if isinstance(encoder, Tokenizer):
        return _read_texts(data, encoder, options)
    if isinstance(encoder, ImageFormat):
        return _read_images(data, encoder)
    return _read_arrays(data, spec)


def read_raw(x: Inputs, encoder: Encoder | None, spec: InputSpec) -> RawColumns | ArrayLike:
    """Return raw samples as a model with this encoder takes them, and encoded samples as they are."""
    if isinstance(encoder, Preprocessor) and not is_raw(x) and not isinstance(x, (RawColumns, Tensor)):
        x = _name_columns(cast(npt.ArrayLike, x), encoder.schema)
    return read_inputs(x, encoder, spec).x if is_raw(x) else cast(ArrayLike, x)


def _read_columns(data: NewData, encoder: Preprocessor, options: ReadOptions) -> NewInputs:
    if options.unseen not in ("", *UNSEEN):
        raise GpflError(f"unseen is '{options.unseen}'; {did_you_mean(options.unseen, UNSEEN)}")
    rows = new_rows.read_new_rows(_as_columns(data), encoder.schema, unreadable=options.unreadable, text=options.others)
    notes = _describe_columns(rows, encoder, options.unseen or encoder.unseen)
    columns, table = rows.columns, rows.table
    masks = {name: np.isnan(columns.column(name)[1]) for name in encoder.schema.index if name not in encoder.fill}
    missing = {name: mask for name, mask in masks.items() if mask.any()}
    if missing and options.missing == "drop":
        complete = ~np.logical_or.reduce(list(missing.values()))
        columns, table = columns.select(np.flatnonzero(complete)), table.filter(complete)
        notes.append(f"{pluralize(int((~complete).sum()), 'row')} with missing values left out.")
    elif missing:
        name = next(iter(missing))
        raise GpflError(
            f"column '{name}' has {table.describe_missing(missing[name])}, and the model does not fill missing values: "
            "fill in the data, or train with --missing mean"
        )
    return NewInputs(columns, table, (*rows.table.notes, *notes))


def _name_columns(rows: npt.ArrayLike, schema: Schema) -> dict[str, npt.ArrayLike]:
    """Return rows, (rows, columns), as columns by name. Raise unless they are the columns of the schema."""
    cells = rows if isinstance(rows, np.ndarray) else np.asarray(rows, dtype=object)  # keeps numbers next to text
    if cells.ndim != 2 or cells.shape[1] != len(schema):
        columns = f"{pluralize(len(schema), 'column')} of the model in this order: {join_names(list(schema.index))}"
        raise GpflError(
            f"x has shape {cells.shape}; give rows of the {columns}; or give a data frame or dict of columns, in any order; "
            "samples that are encoded already are given as a tensor"
        )
    return {name: np.array(cells[:, i].tolist()) for i, name in enumerate(schema.index)}


def _as_columns(data: NewData) -> new_rows.NewData:
    """Return a list of dicts as a dict of columns; other data as they are."""
    if isinstance(data, (str, Path, Mapping)) or hasattr(data, "columns"):
        return cast(new_rows.NewData, data)
    rows = list(cast(Sequence[object], data))
    if not all(isinstance(row, Mapping) for row in rows):
        raise GpflError("x is a list of texts or paths; the model takes rows of columns: give a data frame or a list of dicts")
    named = cast(Sequence[Mapping[str, object]], rows)
    names = dict.fromkeys(name for row in named for name in row)
    return {name: cast(npt.ArrayLike, [row.get(name) for row in named]) for name in names}


def _describe_columns(rows: new_rows.NewRows, encoder: Preprocessor, unseen: str) -> list[str]:
    """Return lines about unknown and unreadable values. Raise if they are neither filled nor ignored."""
    conforming, outside = rows.columns.conform(encoder.schema) if encoder.schema.declared else (rows.columns, {})
    notes = []
    for name, found in rows.unseen.items():
        column, values = rows.columns.column(name)
        if unseen == "error":
            others = f" (and {pluralize(len(found) - 1, 'more text')} like that)" if len(found) > 1 else ""
            raise GpflError(
                f"column '{name}' holds '{next(iter(found))[:40]}'{others}, which the model does not know, first in "
                f"{rows.table.locate_first(values == UNKNOWN)}; it knows {column.limits}: correct the data, or accept unknown "
                "categories with --unseen ignore"
            )
        what = f"{pluralize(sum(found.values()), 'value')} that the model does not know ({join_names(list(found), 5)})"
        notes.append(f"Column '{name}': {what}, {'read as missing' if encoder.schema.declared else 'encoded as zeros'}.")
    for name, count in outside.items():
        column, values = rows.columns.column(name)
        if column.is_categorical:
            continue
        if name not in encoder.fill:
            bad = np.isnan(conforming.column(name)[1]) & ~np.isnan(values)
            raise GpflError(
                f"column '{name}' holds {values[bad][0]:g} in {rows.table.locate_first(bad)}, outside the declared range "
                f"{column.limits}: correct the data"
            )
        notes.append(f"Column '{name}': {pluralize(count, 'value')} outside {column.limits} read as missing.")
    unreadable = rows.unreadable.items()
    return notes + [f"Column '{name}': {pluralize(n, 'unreadable cell')} read as missing." for name, n in unreadable]


def _read_texts(data: NewData, encoder: Tokenizer, options: ReadOptions) -> NewInputs:
    if isinstance(data, (str, Path, Mapping)) or hasattr(data, "columns"):
        candidates = {name.lower() for name in (*options.text_columns, *encoder.columns, *options.others, "text")}
        table = new_rows.read_columns(cast(new_rows.NewData, data), candidates)
        columns = [table.columns[name] for name in _find_text_columns(table, encoder, options.text_columns)]
        texts = [" ".join(map(str, cells)) for cells in zip(*columns, strict=True)]
    else:
        texts = [str(text) for text in cast(Sequence[object], data)]
        table = number_rows(InputFile(Path("list")), {"text": as_text(texts)})
    notes = list(table.notes)
    empty = sum(not text.strip() for text in texts)
    if empty:
        notes.append(f"{pluralize(empty, 'text')} without any word.")
    unknown, total = encoder.count_unknown(texts)
    if unknown:
        notes.append(f"{unknown:,} of {pluralize(total, 'word')} are not in the model's vocabulary and are left out.")
    return NewInputs(encoder.encode(texts), table, tuple(notes))


def _find_text_columns(table: RawTable, encoder: Tokenizer, chosen: Sequence[str]) -> Sequence[str]:
    names = list(table.columns)
    for name in chosen:
        if name not in names:
            raise GpflError(f"--text is '{name}', which is not a column of {table.path}; {did_you_mean(name, names)}")
    for usual in (chosen, encoder.columns, ("text",)):
        if usual and set(usual) <= set(names):
            return usual
    expected = " and ".join(dict.fromkeys((" + ".join(encoder.columns), "text")))
    raise GpflError(
        f"{table.path} has no column of texts by the usual names ({expected}): name it with --text; its columns are "
        f"{join_names(names)}"
    )


def _read_images(data: NewData, encoder: ImageFormat) -> NewInputs:
    if isinstance(data, (str, Path)):
        root = Path(data)
        files, unread = _find_images(root)
        root = root.parent if root.is_file() else root
    elif isinstance(data, Mapping) or hasattr(data, "columns"):
        raise GpflError("x holds columns; the model takes images: give a folder or paths of images")
    else:
        root, unread = Path(), 0
        files = [Path(str(path)) for path in cast(Sequence[object], data)]
    notes = [f"{pluralize(unread, 'file')} in {root} that are not images were not read."] if unread else []
    if colour := encoder.check(files):
        notes.append(f"{pluralize(colour, 'colour image')} read as grey, as the model takes {encoder}.")
    relative = [path.relative_to(root) if path.is_relative_to(root) else path for path in files]
    columns = {
        "file": as_text([str(path) for path in relative]),
        "class": as_text([path.parent.name for path in relative]),
        "client": as_text([path.parts[0] if len(path.parts) > 1 else "" for path in relative]),
    }
    return NewInputs(encoder.read(files), number_rows(InputFile(files[0] if len(files) == 1 else root), columns), tuple(notes))


def _find_images(root: Path) -> tuple[list[Path], int]:
    """Return the images at a path, a file or a folder with sub-folders, and the number of other files."""
    if not root.exists():
        raise GpflError(f"there is no file or folder {root}")
    if root.is_file():
        return [root], 0
    entries = [path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    files = [path for path in entries if path.suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        raise GpflError(f"{root} holds no image: give a folder of {', '.join(IMAGE_SUFFIXES)} files")
    return files, len(entries) - len(files)


def _read_arrays(data: NewData, spec: InputSpec) -> NewInputs:
    expected = f"{spec.kind} of shape {spec.shape}"
    if isinstance(data, (str, Path)) and str(data).lower().endswith(".npz"):
        table = new_rows.read_columns(data)
        name = find_input_array(table, "y")
        x = as_images(table.columns[name])
        if x.ndim == 4 and len(spec.shape) == 3 and x.shape[1] != spec.shape[0]:
            raise GpflError(
                f"{data} has images of {pluralize(x.shape[1], 'channel')} in {name}; the model takes "
                f"{pluralize(spec.shape[0], 'channel')}: convert them"
            )
        read_samples(x, spec, f"{name} of {data}")
        return NewInputs(x, table, table.notes)
    if hasattr(data, "columns"):
        return NewInputs(np.asarray(data), number_rows(InputFile(Path(type(data).__name__)), {}))
    reason = f"arrays ({expected}), and knows no names of columns"
    fix = "give an .npz file with an array x, or an array in Python"
    if spec.kind == "tokens":
        reason = f"numbered words ({expected}) without their vocabulary"
        fix = f"{fix}; if these are AG News, run gpfl data get agnews --again and train again to save the vocabulary"
    elif spec.kind == "pixels":
        reason = f"pixels from 0 to {spec.pixel_max} of shape {spec.shape}, and its file does not say how images are encoded"
    raise GpflError(f"the model was trained on {reason}: {fix}")
