"""Which files of a folder are whose: a file or sub-folder for each client, a train and a test part, images by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpfl.errors import GpflError

FILES = (".csv", ".tsv", ".parquet", ".npz")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
PART_NAMES = {"train": "train", "training": "train", "val": "validation", "valid": "validation", "validation": "validation"} | {
    "test": "test",
    "testing": "test",
}
DOWNLOADS = "rawdata"
"""A folder that PFLlib leaves beside train and test."""
EXPECTED = (
    "give a file or sub-folder for each client, or class folders of images; "
    f"files may be {', '.join(FILES)}, images {', '.join(IMAGES)}"
)


@dataclass(frozen=True)
class Piece:
    """A file, or a folder with a sub-folder of images for each class; whose it is and of which part, where its place tells."""

    path: Path
    client: str = ""
    part: str = ""
    images: bool = False


@dataclass(frozen=True)
class Found:
    """The pieces of a file or folder, clients in the order of their names, and what beside them is not read."""

    pieces: tuple[Piece, ...]
    unread: tuple[Path, ...] = ()

    @property
    def images(self) -> bool:
        """Tells whether these are images; refuses files of rows among them."""
        odd = next((piece for piece in self.pieces if not piece.images), None)
        if odd is not None and any(piece.images for piece in self.pieces):
            raise GpflError(f"{odd.path} holds no class folders of images, but others do: give all clients one form")
        return odd is None

    def files(self) -> list[Path]:
        """Gives every file that is read."""
        return [
            file
            for piece in self.pieces
            for file in ([piece.path] if not piece.images else [f for k in class_folders(piece) for f in image_files(k)])
        ]


def find_pieces(path: Path) -> Found:
    """Gives the pieces of a file or folder."""
    if not path.is_dir():
        if path.suffix.lower() not in FILES:
            raise GpflError(f"{path} is no file that can be read: it must be {', '.join(FILES)}, or a folder")
        return Found((Piece(path),))
    unread: list[Path] = []
    pieces = search(path, Piece(path), unread)
    for piece in pieces:
        if piece.images:
            for folder in class_folders(piece):
                pictures = set(image_files(folder))
                unread += [entry for entry in shown(folder) if entry not in pictures]
    return Found(tuple(pieces), tuple(unread))


def shown(folder: Path) -> list[Path]:
    """Gives what lies in a folder, less what is hidden."""
    return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=by_name)


def search(folder: Path, here: Piece, unread: list[Path]) -> list[Piece]:
    """Gives the pieces in a folder, of which `here` tells what its place has told so far; adds to what is not read."""
    entries = [entry for entry in shown(folder) if not entry.name.startswith("_")]
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in FILES]
    folders = [entry for entry in entries if entry.is_dir()]
    read = {*files, *(entry for entry in folders if entry.name != DOWNLOADS)}
    unread += [entry for entry in shown(folder) if entry not in read]
    if files and folders:
        raise GpflError(f"{folder} holds both files ({files[0].name}) and folders ({folders[0].name}): {EXPECTED}")
    if not files and not folders:
        raise GpflError(f"{folder} holds nothing that can be read: {EXPECTED}")
    parts = [entry for entry in files or folders if entry.stem.lower() in PART_NAMES]
    others = [entry for entry in files or folders if entry not in parts and entry.name != DOWNLOADS]
    if parts and not others:
        return of_parts(folder, parts, here, unread)
    if {"train", "test"} <= {PART_NAMES[entry.stem.lower()] for entry in parts}:
        raise GpflError(f"{folder} holds {others[0].name} beside {parts[0].name} and {parts[-1].name}: {EXPECTED}")
    if files:
        return [Piece(file, here.client or file.stem, here.part) for file in files]
    if any(holds_images(sub) for sub in folders):
        odd = next((sub for sub in folders if not holds_images(sub) and any(entry.is_dir() for entry in sub.iterdir())), None)
        if odd is not None:
            raise GpflError(f"{folder} holds folders of images, and {odd.name}, which holds folders: {EXPECTED}")
        return [Piece(folder, here.client, here.part, images=True)]
    if here.client:
        raise GpflError(
            f"{folder}, of client {here.client}, holds folders without images, such as {folders[0].name}: {EXPECTED}"
        )
    return [piece for sub in folders for piece in search(sub, Piece(sub, sub.name, here.part), unread)]


def of_parts(folder: Path, entries: Sequence[Path], here: Piece, unread: list[Path]) -> list[Piece]:
    """Gives the pieces of train, validation and test files or folders."""
    if here.part:
        raise GpflError(f"{folder} is a {here.part} part, and holds parts again ({entries[0].name}): {EXPECTED}")
    pieces = []
    for entry in entries:
        piece = Piece(entry, here.client, PART_NAMES[entry.stem.lower()])
        pieces += [piece] if entry.is_file() else search(entry, piece, unread)
    return pieces


def holds_images(folder: Path) -> bool:
    """Tells whether there is an image in a folder."""
    return any(entry.suffix.lower() in IMAGES for entry in folder.iterdir())


def class_folders(piece: Piece) -> list[Path]:
    """Gives a piece's folders of classes."""
    return [entry for entry in shown(piece.path) if entry.is_dir() and not entry.name.startswith("_")]


def image_files(folder: Path) -> list[Path]:
    """Gives the images of a class, by name."""
    return [entry for entry in shown(folder) if entry.suffix.lower() in IMAGES]


def by_name(path: Path) -> tuple[int, str]:
    """Orders names as people do: 2 before 10."""
    return (int(path.stem), path.name) if path.stem.isdecimal() else (1 << 62, path.name)
