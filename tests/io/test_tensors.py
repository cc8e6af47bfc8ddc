"""Files of tensors."""

from pathlib import Path

import pytest
import torch

import gpfl
from gpfl.io.tensors import checksum, pack_tensors, read_tensors, unpack_tensors, write_tensors


def test_missing_tensors_are_called_missing(tmp_path: Path) -> None:
    with pytest.raises(gpfl.GpflError, match=r"nowhere is missing; give the path"):
        read_tensors(tmp_path / "nowhere")
    with pytest.raises(gpfl.GpflError, match=r"is a folder; give the path"):
        read_tensors(tmp_path)


def test_checksum_depends_on_metadata_names_types_shapes_and_values() -> None:
    flat, metadata = {"a": torch.zeros(4)}, {"round": "1"}
    others = [
        checksum(flat, {"round": "2"}),
        checksum({"b": torch.zeros(4)}, metadata),
        checksum({"a": torch.zeros(4, dtype=torch.int32)}, metadata),
        checksum({"a": torch.zeros(2, 2)}, metadata),
        checksum({"a": torch.tensor([0.0, 0.0, 0.0, 1e-45])}, metadata),
    ]
    assert checksum(flat, metadata) not in others
    assert len(set(others)) == len(others)


def test_tensors_of_no_dimension_and_transposed_ones_are_written_as_they_are(tmp_path: Path) -> None:
    flat = {"scalar": torch.tensor(2.5), "turned": torch.arange(6.0).reshape(2, 3).T}
    write_tensors(tmp_path / "t.safetensors", flat, {"fact": "1"})
    again, metadata = read_tensors(tmp_path / "t.safetensors")
    assert metadata == {"fact": "1"}
    assert all(torch.equal(flat[key], again[key]) for key in flat)


def test_a_file_of_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpfl.io.tensors.FORMAT_VERSION", 9)
    write_tensors(tmp_path / "t.safetensors", {"a": torch.zeros(2)}, {})
    with pytest.raises(gpfl.GpflError, match=r"has format_version 9; this gpfl reads versions up to 2: install a newer gpfl"):
        read_tensors(tmp_path / "t.safetensors")


def test_a_message_is_unpacked_as_it_was_packed_or_not_at_all() -> None:
    packed = pack_tensors({"a": torch.arange(5), "none": torch.zeros(0, 3)}, {"round": 2})
    flat, metadata = unpack_tensors(packed, "the reply")
    assert metadata == {"round": 2}
    assert flat["a"].tolist() == [0, 1, 2, 3, 4]
    assert flat["none"].shape == (0, 3)
    for damaged in (b"", packed[:-1], packed[:-1] + b"\x09", b"\x00" * 20, packed[:9]):
        with pytest.raises(gpfl.GpflError, match="the reply is damaged"):
            unpack_tensors(damaged, "the reply")
