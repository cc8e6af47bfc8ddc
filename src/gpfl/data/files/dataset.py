"""The user's own files as a source of data."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpfl.core.options import option
from gpfl.data.files import roles as role_columns
from gpfl.data.files.layout import find_inputs
from gpfl.data.files.raw_table import join_names
from gpfl.data.files.reader import read_table
from gpfl.data.files.roles import CLIENT_NAMES, LABEL_NAMES, SPLIT_COLUMNS, ColumnOptions
from gpfl.data.files.samples import FileSamples, load_images, load_rows
from gpfl.data.table import SPLITS, DataSource, Table
from gpfl.errors import GpflError, pluralize

ONE_CLIENT = "There is only one client, so nothing is exchanged."
"""Note about files of one client; a site of a deployment has more beside it."""


@dataclass(frozen=True, kw_only=True)
class FileDataset(ColumnOptions, DataSource):
    """Your own files."""

    path: Path
    classes: tuple[str, ...] = ()  # declared classes, in order; () = those in the files

    image_size: int = option(0, "resize images to this many pixels a side; 0: keep their common size", min=0, max=1024)

    @property
    def config_name(self) -> str:
        """Absolute path, so that a run can be resumed from another folder."""
        return str(self.path.resolve())

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """A net for the shape of the samples, and the clients of the files."""
        return {"partition": {"name": "natural"}, "net": {"name": "cnn4" if len(self.load().shape) == 3 else "mlp"}}

    def read(self) -> Table:
        """Return the table, which is cached as long as no file changes."""
        if not self.path.exists():
            raise GpflError(f"there is no file or folder {self.path}")
        schema = str(Path(self.schema).resolve()) if self.schema else ""
        # As in a run's config, so that trials share the table.
        resolved = dataclasses.replace(self, path=self.path.resolve(), schema=schema)
        try:
            layout = find_inputs(resolved.path)
            states = [(path, path.stat()) for path in (*layout.paths(), *([Path(schema)] if schema else ()))]
            files = tuple((str(path), state.st_mtime_ns, state.st_size) for path, state in states)
            return read_once(resolved, hash((layout, files)))
        except OSError as problem:
            raise GpflError(f"cannot read {problem.filename or self.path}: {problem.strerror}") from None

    def parse(self) -> Table:
        """Read the files now."""
        layout = find_inputs(self.path)
        found, other = ("images", "columns") if layout.images else ("rows", "images")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "option" in field.metadata and value != field.default and (field.name == "image_size") != layout.images:
                text = ",".join(value) if isinstance(value, tuple) else value
                raise GpflError(f"data.{field.name} is {text!r}, but {self.name} holds {found}, not {other}: leave it out")
        if layout.images:
            samples = load_images(layout.inputs, self.image_size)
        else:
            self.check_roles()
            roles = {name.lower() for name in (*self.chosen_names.values(), *LABEL_NAMES, *CLIENT_NAMES, *SPLIT_COLUMNS)}
            samples = load_rows((read_table(entry, self.ignore, roles) for entry in layout.inputs), self)
        if layout.unread:
            samples.notes.append(f"Not read: {join_names([str(path.relative_to(self.path)) for path in layout.unread])}.")
        return self._build_table(samples)

    def _build_table(self, samples: FileSamples) -> Table:
        rows, roles = samples.table, samples.roles
        clients, hint = role_columns.read_clients(rows, roles)
        splits = role_columns.read_splits(rows, roles)
        groups = role_columns.read_names(rows, roles.group) if roles.group else None
        if self.classes:
            labels, classes = role_columns.read_labels(rows, roles.label, self.classes, "the data card")
        elif samples.encoder is None:
            labels, classes = role_columns.read_labels(rows, roles.label, samples.classes)
        else:  # folders of classes
            labels, classes = role_columns.encode_classes(roles.label, rows.columns[roles.label])
            hint = "" if clients is not None else "put the class folders of each client into a folder of its own"
        client_ids, client_names = role_columns.encode_names(clients) if clients is not None else (None, [])
        table = Table(
            samples.x,
            labels,
            classes=len(classes),
            name=self.name,
            client_ids=client_ids,
            client_names=client_names,
            splits=None if splits is None else np.array([SPLITS.index(split) for split in splits.tolist()]),
            group_ids=groups,
            metadata={"classes": classes, **samples.metadata},
            preprocessing=self,
        )
        table.client_hint = hint
        table.encoder = samples.encoder
        names = {"classes": classes, "clients": client_names}
        if groups is not None:
            names[f"values of '{self.group}'"] = np.unique(groups).tolist()
        table.description = self._describe(samples, table, names)
        return table

    def _describe(self, samples: FileSamples, table: Table, names: Mapping[str, Sequence[str]]) -> str:
        clients = "no client column"
        if table.client_ids is not None:
            sizes = np.bincount(table.client_ids)
            low, high = sizes.min(), sizes.max()
            rows = pluralize(low, "row") if low == high else f"{low:,} to {pluralize(high, 'row')}"
            by_column = f" by '{samples.roles.client}'" if samples.roles.client else ""
            clients = f"{pluralize(len(sizes), 'client')}{by_column} with {rows}"
        splits = "train and test from the files" if table.splits is not None else "random train and test split"
        splits += f", grouped by '{self.group}'" if table.group_ids is not None else ""
        classes = f"{pluralize(table.classes, 'class')} of '{samples.roles.label}': {join_names(names['classes'])}"
        notes = [*samples.notes, *_case_warnings(names)]
        if table.group_ids is not None and table.client_ids is not None:
            pairs = np.unique(np.stack([table.group_ids, table.client_ids]), axis=1)
            if shared := int((np.bincount(pairs[0]) > 1).sum()):
                values = f"{pluralize(shared, 'value')} of '{self.group}'"
                notes.append(f"{values} at several clients: the rows of each client are a group.")
        if len(table.client_names) == 1:
            notes.append(ONE_CLIENT)
        summary = f"{self.name}: {pluralize(len(table), 'row')}; {clients}; {splits}."
        return "\n".join([summary, f"{classes}. Inputs: {samples.description}.", *notes])


def _case_warnings(names: Mapping[str, Sequence[str]]) -> list[str]:
    warnings = []
    for kind, entries in names.items():
        first: dict[str, str] = {}
        if other := next((entry for entry in entries if first.setdefault(entry.casefold(), entry) != entry), ""):
            warnings.append(f"The {kind} '{first[other.casefold()]}' and '{other}' differ only in case: are they the same?")
    return warnings


@lru_cache(maxsize=2)
def read_once(source: FileDataset, fingerprint: int) -> Table:
    """Return the table of files that had this fingerprint; trials on the same table share it."""
    return source.parse()
