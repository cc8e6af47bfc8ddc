"""Files of tensors with metadata: safetensors, with a checksum and a format version."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from gpfl.errors import GpflError
from gpfl.io import files
from gpfl.io.legacy import FORMAT_VERSION, read_version, upgrade_metadata, upgrade_tensors

KEY = "gpfl"  # key of the safetensors header under which the metadata are kept as JSON: several keys would have no fixed order


def checksum(flat: Mapping[str, Tensor], metadata: Mapping[str, object]) -> str:
    """Return the CRC-32 of the metadata and of all tensors with their types and shapes, in the order of their names."""
    total = zlib.crc32(json.dumps(dict(metadata), sort_keys=True).encode())
    for key in sorted(flat):
        total = zlib.crc32(f"{key} {flat[key].dtype} {tuple(flat[key].shape)}".encode(), total)
        total = zlib.crc32(flat[key].contiguous().numpy().data, total)
    return f"{total:08x}"


def pack_tensors(flat: Mapping[str, Tensor], metadata: Mapping[str, object]) -> bytes:
    """Return tensors and metadata as the content of a file or a message. Equal content gives equal bytes."""
    content = {key: t.detach().cpu().contiguous() for key, t in flat.items()}
    metadata = {**metadata, "format_version": FORMAT_VERSION}
    return save(content, {KEY: json.dumps({**metadata, "crc32": checksum(content, metadata)}, sort_keys=True)})


def unpack_tensors(content: bytes, name: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return what `pack_tensors` packed; errors call the message `name`."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata: dict[str, object] = json.loads(header["__metadata__"][KEY])
        flat = {key: tensor.clone() for key, tensor in load(content).items()}  # clones are aligned
        if metadata.pop("crc32", "") != checksum(flat, metadata):
            raise ValueError("its checksum does not match")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise GpflError(f"{name} is damaged ({error}): send it again") from None
    if metadata.pop("format_version", None) != FORMAT_VERSION:
        raise GpflError(f"{name} was packed by another version of gpfl: install the same version everywhere")
    return flat, metadata


def write_tensors(path: Path, flat: Mapping[str, Tensor], metadata: Mapping[str, object]) -> None:
    """Write tensors and metadata atomically. Equal content gives equal bytes."""
    files.write_bytes(path, pack_tensors(flat, metadata))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return the tensors and the metadata of a file. Raise if it is missing, damaged or too new."""
    if not path.is_file():
        raise GpflError(f"{path} is {'a folder' if path.is_dir() else 'missing'}; give the path of a safetensors file")
    fix = "remove it to start over, or replace it with a good copy"
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
