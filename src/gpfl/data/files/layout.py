"""Which files of a folder belong to which client and split: a file or folder per client, train and test, images by class."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpfl.errors import GpflError

SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".npz")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
SPLIT_NAMES = {"train": "train", "training": "train", "test": "test", "testing": "test"} | dict.fromkeys(
    ("val", "valid", "validation"), "validation"
)
PFLLIB_DOWNLOADS = "rawdata"  # a folder that PFLlib leaves next to train and test
EXPECTED = (
    "give a file or sub-folder per client, or class folders of images; "
    f"files may be {', '.join(SUFFIXES)}, images {', '.join(IMAGE_SUFFIXES)}"
)


@dataclass(frozen=True)
class InputFile:
    """A file of rows or a folder of class folders."""

    path: Path  # path of the file or folder
    client: str = ""  # client that the path names, or ""
    split: str = ""  # split that the path names, or ""
    images: bool = False  # whether it is a folder of class folders
    line_of: Callable[[int], int] | None = None  # returns the line of a row, once a file of text is read


@dataclass(frozen=True)
class Layout:
    """The inputs in a file or folder, ordered by client name, and the files next to them that are not read."""

    inputs: tuple[InputFile, ...]
    unread: tuple[Path, ...] = ()

    @property
    def images(self) -> bool:
        """Whether the inputs are images; raise if only some are."""
        table = next((entry for entry in self.inputs if not entry.images), None)
        if table is not None and any(entry.images for entry in self.inputs):
            raise GpflError(f"{table.path} holds no class folders of images, but others do: give all clients the same layout")
        return table is None

    def paths(self) -> list[Path]:
        """Return every file that is read."""
        return [
            path
            for entry in self.inputs
            for path in ([file for k in class_folders(entry) for file in image_files(k)] if entry.images else [entry.path])
        ]


def find_inputs(path: Path) -> Layout:
    """Return the inputs in a file or folder."""
    if not path.is_dir():
        if file_suffix(path) not in SUFFIXES:
            raise GpflError(f"cannot read {path}: give a {', '.join(SUFFIXES)} file or a folder")
        return Layout((InputFile(path),))
    unread: list[Path] = []
    inputs = _search(path, InputFile(path), unread)
    for entry in inputs:
        if entry.images:
            for folder in class_folders(entry):
                images = set(image_files(folder))
                unread += [file for file in _list(folder) if file not in images]
    return Layout(tuple(inputs), tuple(unread))


def file_suffix(path: Path) -> str:
    """Return the lower-case suffix of a file, with the one before it if the file is compressed."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() + suffix if suffix == ".gz" else suffix


def _stem(path: Path) -> str:
    return path.name[: len(path.name) - len(file_suffix(path))]


def class_folders(entry: InputFile) -> list[Path]:
    """Return the class folders of an image folder."""
    return [folder for folder in _list(entry.path) if folder.is_dir() and not folder.name.startswith("_")]


def image_files(folder: Path) -> list[Path]:
    """Return the images of a class, by name."""
    return [file for file in _list(folder) if file.suffix.lower() in IMAGE_SUFFIXES]


def _list(folder: Path) -> list[Path]:
    def natural_order(path: Path) -> tuple[int, str]:  # 2 before 10
        return (int(path.stem), path.name) if path.stem.isdecimal() else (1 << 62, path.name)

    return sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=natural_order)


def _search(folder: Path, known: InputFile, unread: list[Path]) -> list[InputFile]:
    """Return the inputs in a folder; `known` has the client and split of the path so far. Append to `unread`."""
    entries = [entry for entry in _list(folder) if not entry.name.startswith("_")]
    files = [entry for entry in entries if entry.is_file() and file_suffix(entry) in SUFFIXES]
    folders = [entry for entry in entries if entry.is_dir()]
    read = {*files, *(entry for entry in folders if entry.name != PFLLIB_DOWNLOADS)}
    unread += [entry for entry in _list(folder) if entry not in read]
    if files and folders:
        raise GpflError(f"{folder} holds both files ({files[0].name}) and folders ({folders[0].name}): {EXPECTED}")
    if not files and not folders:
        raise GpflError(f"{folder} holds no file that can be read: {EXPECTED}")
    splits = [entry for entry in files or folders if _stem(entry).lower() in SPLIT_NAMES]
    others = [entry for entry in files or folders if entry not in splits and entry.name != PFLLIB_DOWNLOADS]
    if splits and not others:
        if known.split:
            raise GpflError(f"{folder} is a {known.split} split, but contains splits ({splits[0].name}): {EXPECTED}")
        found = [InputFile(path, known.client, SPLIT_NAMES[_stem(path).lower()]) for path in splits]
        return [entry for split in found for entry in ([split] if split.path.is_file() else _search(split.path, split, unread))]
    if {"train", "test"} <= {SPLIT_NAMES[_stem(entry).lower()] for entry in splits}:
        raise GpflError(f"{folder} holds {others[0].name} next to {splits[0].name} and {splits[-1].name}: {EXPECTED}")
    if files:
        return [InputFile(file, known.client or _stem(file), known.split) for file in files]
    if any(_has_images(sub) for sub in folders):
        nested = next((sub for sub in folders if not _has_images(sub) and any(entry.is_dir() for entry in sub.iterdir())), None)
        if nested is not None:
            raise GpflError(f"{folder} holds folders of images, and {nested.name}, which holds folders: {EXPECTED}")
        return [InputFile(folder, known.client, known.split, images=True)]
    if known.client:
        raise GpflError(
            f"{folder}, of client {known.client}, holds folders without images, such as {folders[0].name}: {EXPECTED}"
        )
    return [entry for sub in folders for entry in _search(sub, InputFile(sub, sub.name, known.split), unread)]


def _has_images(folder: Path) -> bool:
    return any(entry.suffix.lower() in IMAGE_SUFFIXES for entry in folder.iterdir())
