from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpfl.errors import GpflError
from gpfl.io import files


def test_a_written_file_replaces_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "note.txt"
    files.write_text(path, "old")
    files.write_text(path, "é")
    assert path.read_bytes() == "é".encode()
    assert [entry.name for entry in path.parent.iterdir()] == ["note.txt"]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "note.txt"
    files.write_text(path, "old")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(GpflError, match=r"cannot write .*note\.txt: No space left on device"):
        files.write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["note.txt"]


def test_a_folder_in_the_place_of_the_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(GpflError, match="cannot write"):
        files.write_bytes(tmp_path / "taken", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(GpflError, match="choose a folder you can write to"):
        files.write_text(tmp_path / "file" / "note.txt", "x")


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    files.write_text(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode
