"""Published datasets: their files, address, licence, parser and the settings of the paper."""

import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpfl.data.encoders import ImageFormat
from gpfl.data.published import cache
from gpfl.data.published.download import Progress, PublishedFile, download, file_hash, ignore_progress
from gpfl.data.table import DataSource, Table
from gpfl.errors import GpflError

Parser = Callable[[Mapping[str, Path]], Table]


@dataclass(frozen=True, kw_only=True)
class PublishedDataset(DataSource):
    """A dataset that is downloaded from its publisher, or taken from files on this machine."""

    files: tuple[PublishedFile, ...]
    licence: str
    parse: Parser
    partition: Mapping[str, object]  # of the paper
    net: Mapping[str, object]  # of the paper
    train: Mapping[str, object] = field(default_factory=lambda: {"rounds": 2000, "patience": 100})  # of the authors' code
    methods: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # options of single methods, ours
    n_samples: int = 0  # as published; 0 if unknown
    folder_names: tuple[str, ...] = ()  # common names of the folder with the files
    system_folders: tuple[Path, ...] = ()  # folders of system packages with the same files
    wrong_files: Mapping[str, str] = field(default_factory=dict)  # files that are mistaken for the right ones, and the reason

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """Settings of the paper, with early stopping as in the authors' code, and our options of single methods."""
        return {"partition": self.partition, "net": self.net, "train": self.train, **self.methods}

    @property
    def expected_samples(self) -> int:
        """Number of samples of a complete table; 0 if unknown."""
        return self.n_samples

    @property
    def size(self) -> int:
        """Number of bytes to download."""
        return sum(file.size for file in self.files)

    @property
    def manual_instructions(self) -> str:
        """What to do without a network."""
        if len(self.files) == 1:
            return f"copy the file here and run: gpfl data get {self.name} --from {shlex.quote(self.files[0].name)}"
        return f"copy its {len(self.files)} files here and run: gpfl data get {self.name} --from FOLDER"

    def read(self) -> Table:
        """Return the table, prepared first if it is not in the cache."""
        return cache.load(self.name) or self.prepare()

    def load(self) -> Table:
        """Return the table with its `source` set, and the format of its images."""
        table = super().load()
        spec = table.input_spec
        if spec.kind == "pixels" and len(spec.shape) == 3:
            table.encoder = ImageFormat(*spec.shape)
        return table

    def is_available(self) -> bool:
        """Return whether the dataset is on this machine, parsed or as files."""
        return cache.load(self.name) is not None or self.find_files() is not None

    def prepare(
        self, source: Path | None = None, *, unverified: bool = False, again: bool = False, progress: Progress = ignore_progress
    ) -> Table:
        """Find or download the files, check and parse them, and return the table.

        The files are in `source`, else in GPFL_DATA, a system package, or at the publisher. `unverified` accepts local files
        with another checksum than the published one, which the table records; `again` parses files that were parsed before.
        """
        with cache.lock(self.name):
            table = None
            if not again and source is None:
                with suppress(GpflError):  # a damaged table is parsed again
                    table = cache.load(self.name)
            if table is None:
                folder, instructions = cache.downloads_dir(self.name), self.manual_instructions
                paths = self.find_files(source) or {
                    file.name: download(file, folder, progress, instructions) for file in self.files
                }
                metadata = self._check(paths, unverified)
                parsed = self.parse(paths)
                parsed.metadata = metadata
                cache.save(parsed)
                table = cache.load(self.name)
            assert table is not None
        table.source = self
        return table

    def find_files(self, source: Path | None = None) -> dict[str, Path] | None:
        """Return the files in `source` or on this machine; None if they are not all here."""
        if source is not None:
            found = self._files_in(source)
            for name, reason in self.wrong_files.items():
                if source.name == name or (found is None and (source / name).is_file()):
                    raise GpflError(f"{source if source.name == name else source / name} {reason}")
            if found is None:
                raise GpflError(f"{source} does not hold the files of '{self.name}': {', '.join(f.name for f in self.files)}")
            return found
        folders: list[Path] = []
        if named := os.environ.get("GPFL_DATA"):
            root = Path(named)
            if not root.is_file():
                folders = [*(root / folder for folder in (self.name, *self.folder_names)), root]
            elif root.name in {file.name for file in self.files}:
                folders = [root.parent]
        return next((found for folder in (*folders, *self.system_folders) if (found := self._files_in(folder))), None)

    def _files_in(self, path: Path) -> dict[str, Path] | None:
        if path.is_file() and len(self.files) == 1:
            return {self.files[0].name: path}
        found = {file.name: path / file.name for file in self.files}
        return found if all(file.is_file() for file in found.values()) else None

    def _check(self, paths: Mapping[str, Path], unverified: bool) -> dict[str, object]:
        other = [paths[file.name] for file in self.files if not file.matches(paths[file.name])]
        if other and not unverified:
            path = other[0] if len(self.files) == 1 else other[0].parent
            raise GpflError(
                f"{other[0]} is not the published file (its checksum differs); if you trust it: "
                f"gpfl data get {self.name} --from {shlex.quote(str(path))} --unverified"
            )
        files = [{"name": file.name, "sha256": file_hash(paths[file.name])} for file in self.files]
        return {"files": files, "verified": not other}


def provenance_warning(table: Table) -> str:
    """Return how a table differs from the published dataset (missing rows, other files), or ""."""
    if not isinstance(table.source, PublishedDataset):
        return ""
    warnings = []
    published = table.source.expected_samples
    if published and len(table) != published:
        warnings.append(f"has {len(table):,} of the {published:,} published rows")
    if table.metadata.get("verified") is not True:
        warnings.append("comes from files whose checksum is not the published one")
    return f"{table.name} {' and '.join(warnings)}." if warnings else ""
