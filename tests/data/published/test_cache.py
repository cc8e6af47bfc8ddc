"""The cache of parsed tables, and where `PublishedDataset.prepare` finds files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from publisher import CONTENT, numbers_dataset, parse_numbers

import gpfl
from gpfl.data import Table
from gpfl.data.published import cache
from gpfl.data.published.dataset import PublishedDataset, provenance_warning
from gpfl.data.published.download import Progress, PublishedFile, file_hash
from gpfl.errors import GpflError
from gpfl.io import toml

METADATA = {"files": [{"name": "a", "sha256": "b"}], "verified": False}
PIXELS = Table(
    np.arange(24, dtype=np.uint8).reshape(6, 1, 2, 2), np.arange(6) % 3, pixel_max=200, metadata=METADATA, name="toy"
)
CLIENTS = Table(np.eye(4), np.arange(4) % 2, client_ids=[0, 1, 1, 0], client_names=["a", "b"], metadata=METADATA, name="toy")
TOKENS = Table(np.array([[1, 2], [3, 0]]), [0, 1], classes=5, kind="tokens", vocabulary=9, metadata=METADATA, name="toy")
TABLES = {"pixels": PIXELS, "floats": CLIENTS, "tokens": TOKENS}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of parsed tables; nothing is there, nothing can be downloaded."""
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "tables"


def load(name: str = "toy") -> Table:
    table = cache.load(name)
    assert table is not None
    return table


def test_the_cache_folder_is_chosen_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("GPFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "xdg" / "gpfl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / ".cache" / "gpfl"


@pytest.mark.parametrize("saved", TABLES.values(), ids=TABLES)
def test_a_saved_table_is_loaded_equal(saved: Table, folder: Path) -> None:
    assert cache.load("toy") is None
    cache.save(saved)
    table = load()
    assert table.digest == saved.digest
    assert table.x.dtype == saved.x.dtype
    assert (table.name, table.classes, table.input_spec) == ("toy", saved.classes, saved.input_spec)
    assert (table.client_names, table.metadata) == (saved.client_names, METADATA)
    assert [entry.name for entry in folder.iterdir()] == ["toy"]


def test_a_table_of_the_first_release_is_loaded(folder: Path) -> None:
    (folder / "toy").mkdir(parents=True)
    np.save(folder / "toy" / "x.npy", CLIENTS.x.numpy())
    np.save(folder / "toy" / "y.npy", CLIENTS.y.numpy())
    np.save(folder / "toy" / "groups.npy", CLIENTS.client_ids)
    content = {"format": 2, "classes": 2, "kind": "floats", "white": 255, "vocabulary": 0, "group_names": ["a", "b"]}
    (folder / "toy" / "table.json").write_text(json.dumps({**content, "origin": METADATA}))
    assert load().digest == CLIENTS.digest
    assert (load().client_names, load().metadata) == (("a", "b"), METADATA)


@pytest.mark.parametrize("saved", TABLES.values(), ids=TABLES)
def test_samples_are_memory_mapped_and_writing_to_them_does_not_reach_the_file(saved: Table, folder: Path) -> None:
    cache.save(saved)
    before = (folder / "toy" / "x.npy").read_bytes()
    table = load()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder / "toy" / "x.npy") in maps.read_text()
    table.x[0] = 1
    assert table.x[0].eq(1).all()
    assert (folder / "toy" / "x.npy").read_bytes() == before


def test_saving_replaces_a_table(folder: Path) -> None:
    cache.save(CLIENTS)
    older = load()
    cache.save(PIXELS)
    assert load().shape == (1, 2, 2)
    assert load().client_ids is None
    assert torch.equal(older.x, CLIENTS.x), "a table that is in use stays"
    assert [entry.name for entry in folder.iterdir()] == ["toy"]


def change_json(**values: object) -> object:
    def change(table: Path) -> None:
        path = table / "table.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


DAMAGES = {
    "no json": lambda table: (table / "table.json").write_text('{"format": 2'),
    "empty json": lambda table: (table / "table.json").write_text(""),
    "not UTF-8": lambda table: (table / "table.json").write_bytes(b"\xff\xfe"),
    "a list": lambda table: (table / "table.json").write_text("[1]"),
    "keys missing": lambda table: (table / "table.json").write_text(json.dumps({"format": cache.FORMAT})),
    "too few classes": change_json(classes=1),
    "classes no number": change_json(classes="many"),
    "unknown kind": change_json(kind="smells"),
    "metadata no mapping": change_json(origin=3),
    "empty x": lambda table: (table / "x.npy").write_bytes(b""),
    "truncated x": lambda table: (table / "x.npy").write_bytes((table / "x.npy").read_bytes()[:-1]),
    "x of another format": lambda table: (table / "x.npy").write_bytes(b"PK\x03\x04" + bytes(200)),
    "x missing": lambda table: (table / "x.npy").unlink(),
    "y of another length": lambda table: np.save(table / "y.npy", np.zeros(5, dtype=np.int64)),
    "x of objects": lambda table: np.save(table / "x.npy", np.array([{}] * 6)),
    "clients cut": lambda table: (table / "groups.npy").write_bytes(b"\x93NUMPY"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_loading_a_damaged_table_names_it_and_the_command_that_repairs_it(damage: object, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    published = numbers_dataset()
    published.prepare(tmp_path)
    damage(folder / "numbers")  # type: ignore[operator]
    with pytest.raises(GpflError, match=r": run gpfl data get numbers$") as problem:
        published.load()
    assert "\n" not in str(problem.value)
    assert str(folder / "numbers") in str(problem.value)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_preparing_a_damaged_table_parses_the_files_again(damage: object, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    published = numbers_dataset(system_folders=(tmp_path,))
    whole = published.prepare().digest
    damage(folder / "numbers")  # type: ignore[operator]
    assert published.prepare().digest == whole
    assert published.load().digest == whole


@pytest.mark.parametrize("name", ["x", "y", "groups"])
def test_a_truncated_table_is_damaged(name: str, folder: Path) -> None:
    cache.save(CLIENTS)
    path = folder / "toy" / f"{name}.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GpflError, match=r"is damaged .*: run gpfl data get toy$"):
        cache.load("toy")


def test_a_table_of_another_format_is_parsed_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    published = numbers_dataset(system_folders=(tmp_path,))
    published.prepare()
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert cache.load("numbers") is None
    assert len(published.load()) == 20
    assert json.loads((folder / "numbers" / "table.json").read_text())["format"] == cache.FORMAT


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "numbers.txt"))  # a file, where a folder should be
    assert cache.load("numbers") is None
    for act in (lambda: numbers_dataset().prepare(tmp_path), lambda: cache.save(PIXELS)):
        with pytest.raises(GpflError, match=r"cannot write to .*GPFL_CACHE"):
            act()


def test_a_full_disk_is_an_error_and_leaves_the_former_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.save(CLIENTS)

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", fail)
    with pytest.raises(GpflError, match="No space left"):
        cache.save(PIXELS)
    assert load().shape == (4,)
    assert [entry.name for entry in folder.iterdir()] == ["toy"]


def test_concurrent_writers_leave_one_complete_table(folder: Path) -> None:
    tables = [Table(np.full((50, 3), k), np.zeros(50), name="toy") for k in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cache.save, tables * 5))
    assert len(torch.unique(load().x)) == 1
    assert [entry.name for entry in folder.iterdir()] == ["toy"]


PROCESS = """
import sys
from pathlib import Path
import publisher
from publisher import numbers_dataset
def parse(paths):
    with open(sys.argv[2], "a") as log:
        log.write("parsed\\n")
    return parse_numbers(paths)
parse_numbers, publisher.parse_numbers = publisher.parse_numbers, parse
published = numbers_dataset(system_folders=(Path(sys.argv[1]),))
print("ready", flush=True)
sys.stdin.readline()
print(published.load().digest)
"""


def test_two_processes_that_prepare_the_same_dataset_parse_it_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    program = f"import sys; sys.path[:0] = {sys.path!r}\n{PROCESS}"
    command = [sys.executable, "-c", program, str(tmp_path), str(tmp_path / "log")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers == [f"{load('numbers').digest}\n"] * 2
    assert (tmp_path / "log").read_text() == "parsed\n"
    assert [entry.name for entry in folder.iterdir()] == ["numbers"]


def write_numbers(folder: Path, first: int) -> Path:
    """Write a numbers.txt that begins with `first` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers.txt").write_text(f"{first} 2 3 4 5 6 7 8")
    return folder


def test_files_are_taken_from_the_first_folder_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, data, given = tmp_path / "system", tmp_path / "data", tmp_path / "given"
    published = numbers_dataset(system_folders=(system,))

    def first_number() -> float:
        return float(published.prepare(unverified=True, again=True).x[0, 0])

    def download(file: PublishedFile, folder: Path, progress: Progress, instructions: str) -> Path:
        return write_numbers(folder, 1) / file.name

    monkeypatch.setattr("gpfl.data.published.dataset.download", download)
    assert first_number() == 1
    write_numbers(system, 2)
    assert first_number() == 2
    monkeypatch.setenv("GPFL_DATA", str(data))
    assert first_number() == 2, "nothing is in GPFL_DATA yet"
    write_numbers(data, 3)
    assert first_number() == 3
    write_numbers(data / "numbers", 4)
    assert first_number() == 4
    write_numbers(given, 5)
    assert published.prepare(given, unverified=True).x[0, 0] == 5
    write_numbers(given, 6)
    assert published.prepare(given / "numbers.txt", unverified=True).x[0, 0] == 6, "the one file, by its own name"
    assert published.prepare().x[0, 0] == 6, "here already"
    assert published.load().x[0, 0] == 6
    assert first_number() == 4, "parsed anew"


@pytest.mark.parametrize("name", gpfl.data.PUBLISHED)
def test_folders_of_common_layouts_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = dataclasses.replace(gpfl.data.PUBLISHED[name], system_folders=())
    monkeypatch.setenv("GPFL_DATA", str(tmp_path))
    assert published.find_files() is None
    for folder in reversed((name, *published.folder_names)):  # the nearest last: it wins
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file in published.files:
            (tmp_path / folder / file.name).touch()
        assert published.find_files() == {file.name: tmp_path / folder / file.name for file in published.files}


def test_a_dataset_of_several_files_needs_all_of_them_in_one_folder(tmp_path: Path) -> None:
    amazon = gpfl.data.PUBLISHED["amazon"]
    for file in amazon.files[1:]:
        (tmp_path / file.name).touch()
    with pytest.raises(GpflError, match=f"{tmp_path} does not hold the files of 'amazon': books_train.svmlight, "):
        amazon.prepare(tmp_path)
    (tmp_path / amazon.files[0].name).touch()
    assert amazon.find_files(tmp_path) == {file.name: tmp_path / file.name for file in amazon.files}
    with pytest.raises(GpflError, match="does not hold the files of 'amazon'"):
        amazon.find_files(tmp_path / "dvd_train.svmlight")


def test_a_given_file_may_have_any_name(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(CONTENT)
    assert numbers_dataset().prepare(tmp_path / "mine.txt").metadata["verified"] is True


def test_other_content_is_an_error_unless_unverified_files_are_accepted_and_is_recorded(folder: Path, tmp_path: Path) -> None:
    write_numbers(tmp_path, 1)
    published = numbers_dataset()
    path = tmp_path / "numbers.txt"
    with pytest.raises(GpflError, match=rf"{path} is not .* --from {path} --unverified") as problem:
        published.prepare(tmp_path)
    assert "\n" not in str(problem.value)
    assert not folder.exists()
    (tmp_path / "of mine").mkdir()
    with pytest.raises(GpflError, match=rf"--from '{tmp_path}/of mine/numbers.txt' --unverified"):
        published.prepare(write_numbers(tmp_path / "of mine", 1))
    for table in (published.prepare(tmp_path, unverified=True), published.load()):
        assert table.metadata == {"files": [{"name": path.name, "sha256": file_hash(path)}], "verified": False}


def test_published_content_is_verified_either_way(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    for unverified in (False, True):
        assert numbers_dataset().prepare(tmp_path, unverified=unverified).metadata["verified"] is True


@pytest.mark.parametrize(
    ("published", "content", "warning"),
    [
        (0, CONTENT, ""),
        (20, CONTENT, ""),
        (0, b"1 2 3 4 5 6 7 8", "numbers comes from files whose checksum is not the published one."),
        (30, CONTENT, "numbers has 20 of the 30 published rows."),
        (
            *(30, b"1 2 3 4 5 6 7 8"),
            "numbers has 8 of the 30 published rows and comes from files whose checksum is not the published one.",
        ),
    ],
    ids=["unknown", "whole", "unverified", "partial", "both"],
)
def test_missing_rows_and_unverified_files_are_in_the_warning(
    published: int, content: bytes, warning: str, tmp_path: Path
) -> None:
    numbers = dataclasses.replace(numbers_dataset(), n_samples=published)
    (tmp_path / "numbers.txt").write_bytes(content)
    table = numbers.prepare(tmp_path, unverified=True)
    assert provenance_warning(table) == provenance_warning(numbers.load()) == warning
    assert provenance_warning(table.with_tensors(table.x.clone(), table.y.clone())) == warning, "also on another device"


def test_other_tables_have_no_warning() -> None:
    assert provenance_warning(gpfl.Table(np.eye(2), [0, 1], name="fmnist")) == ""
    assert provenance_warning(gpfl.federate("digits").table) == ""


@pytest.mark.parametrize("name", ["numbers.txt", *(known.files[0].name for known in gpfl.data.PUBLISHED.values())])
def test_the_manifest_of_a_federation_records_the_files_and_can_be_read_again(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(CONTENT)
    file = PublishedFile(name, "", 1, sha256="0" * 64)
    table = PublishedDataset(
        name="numbers", description="", files=(file,), licence="", parse=parse_numbers, partition={}, net={}
    ).prepare(tmp_path, unverified=True)
    federation = gpfl.federate(table, partition="natural")
    source = {"files": [{"name": name, "sha256": hashlib.sha256(CONTENT).hexdigest()}], "verified": False}
    assert federation.manifest()["source"] == source
    federation.save(tmp_path / "split.toml")
    assert toml.read(tmp_path / "split.toml")["source"] == source
    again = gpfl.Federation.load(tmp_path / "split.toml", table)
    assert [shard.name for shard in again.shards] == ["site 0", "site 1", "site 2", "site 3"]
