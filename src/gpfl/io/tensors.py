"""Files of tensors with metadata: safetensors, with a checksum and a format version."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from gpfl.errors import GpflError
from gpfl.io import files
from gpfl.io.legacy import FORMAT_VERSION, read_version, upgrade_metadata, upgrade_tensors

KEY = "gpfl"
"""Key of the safetensors header under which the metadata are kept as JSON: several keys would have no fixed order."""


def checksum(flat: Mapping[str, Tensor], metadata: Mapping[str, object]) -> str:
    """Return the CRC-32 of the metadata and of all tensors with their types and shapes, in the order of their names."""
    total = zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())
    for key in sorted(flat):
        total = zlib.crc32(f"{key} {flat[key].dtype} {tuple(flat[key].shape)}".encode(), total)
        total = zlib.crc32(flat[key].contiguous().numpy().data, total)
    return f"{total:08x}"


def write_tensors(path: Path, flat: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Write tensors and metadata atomically. Equal content gives equal bytes."""
    content = {key: t.detach().cpu().contiguous() for key, t in flat.items()}
    metadata = {**metadata, "format_version": FORMAT_VERSION}
    header = json.dumps({**metadata, "crc32": checksum(content, metadata)}, sort_keys=True)
    files.write_bytes(path, save(content, {KEY: header}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors and the metadata of a file. Raise if it is missing, damaged or too new."""
    if not path.is_file():
        raise GpflError(f"{path} is {'a folder' if path.is_dir() else 'missing'}; give the path of a safetensors file")
    fix = "remove it to start over, or replace it by a good copy"
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, object] = json.loads((file.metadata() or {}).get(KEY, "{}"))
            # Sums over unaligned memory differ in their last bits; clones are aligned.
            flat: dict[str, Tensor] = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, UnicodeDecodeError) as error:
        raise GpflError(f"{path} is damaged ({error}): {fix}") from None
    if metadata.pop("crc32", "") != checksum(flat, metadata):
        raise GpflError(f"{path} is damaged (its checksum does not match): {fix}")
    version = read_version(metadata, path)
    metadata.pop("format_version", None)
    return (upgrade_tensors(flat), upgrade_metadata(metadata)) if version == 1 else (flat, metadata)
