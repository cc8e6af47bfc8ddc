"""The cache of parsed tables, and where `Published.get` takes its files from."""

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
from publisher import CONTENT, numbers_set, parse_numbers

import gpfl
from gpfl.data.published import cache
from gpfl.data.published import download as fetch
from gpfl.data.published.cache import Held, Origin, Parsed
from gpfl.data.published.dataset import PublishedDataset, caveat
from gpfl.errors import GpflError
from gpfl.io import toml

PARSED = Parsed(np.arange(24, dtype=np.uint8).reshape(6, 1, 2, 2), np.arange(6) % 3, 3, kind="pixels")
GROUPED = Parsed(np.eye(4, dtype=np.float32), np.arange(4) % 2, 2, client_ids=np.array([0, 1, 1, 0]), client_names=["a", "b"])
TOKENS = Parsed(np.array([[1, 2], [3, 0]], dtype=np.int32), np.array([0, 1]), 2, kind="tokens", vocabulary=9)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of parsed tables; nothing is there, nothing can be downloaded."""
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache" / "tables"


def opened(name: str) -> gpfl.Table:
    table = cache.load(name)
    assert table is not None
    return table


def test_the_cache_lies_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("GPFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_folder() == tmp_path / "xdg" / "gpfl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / ".cache" / "gpfl"


@pytest.mark.parametrize("parsed", [PARSED, GROUPED, TOKENS], ids=["pixels", "floats", "tokens"])
def test_what_was_saved_is_opened(parsed: Parsed, folder: Path) -> None:
    assert cache.held("toy") is None
    assert cache.load("toy") is None
    cache.save("toy", parsed, Origin([{"name": "a", "sha256": "b"}], verified=False))
    assert cache.held("toy") == Held(len(parsed.y), verified=False)
    table = opened("toy")
    assert np.array_equal(table.x.numpy(), parsed.x)
    assert table.x.numpy().dtype == parsed.x.dtype
    assert table.y.tolist() == parsed.y.tolist()
    assert (table.name, table.classes, table.input_spec.kind) == ("toy", parsed.classes, parsed.kind)
    assert (table.input_spec.vocabulary, table.client_names) == (parsed.vocabulary, tuple(parsed.client_names))
    assert np.array_equal(table.client_ids, parsed.client_ids) if parsed.client_ids is not None else table.client_ids is None
    assert table.metadata == {"files": [{"name": "a", "sha256": "b"}], "verified": False}
    assert [entry.name for entry in folder.iterdir()] == ["toy"]


@pytest.mark.parametrize("parsed", [PARSED, GROUPED, TOKENS], ids=["pixels", "floats", "tokens"])
def test_rows_are_mapped_from_the_file_and_writing_to_them_does_not_reach_it(parsed: Parsed, folder: Path) -> None:
    cache.save("toy", parsed, Origin())
    before = (folder / "toy" / "x.npy").read_bytes()
    table = opened("toy")
    lines = Path("/proc/self/maps")
    if lines.exists():
        assert str(folder / "toy" / "x.npy") in lines.read_text()
    table.x[0] = 1
    assert table.x[0].eq(1).all()
    assert (folder / "toy" / "x.npy").read_bytes() == before


def test_a_table_is_replaced_by_the_next(folder: Path) -> None:
    cache.save("toy", GROUPED, Origin())
    older = opened("toy")
    cache.save("toy", PARSED, Origin())
    assert opened("toy").shape == (1, 2, 2)
    assert opened("toy").client_ids is None
    assert older.x.tolist() == GROUPED.x.tolist(), "who has it open keeps it"
    assert [entry.name for entry in folder.iterdir()] == ["toy"]


@pytest.mark.parametrize(
    "parsed",
    [
        Parsed(np.eye(3, dtype=np.float32), np.array([0, 1, 2]), 2),
        Parsed(np.array([[np.nan]], dtype=np.float32), np.array([0]), 1),
        Parsed(np.zeros((0, 2), dtype=np.float32), np.zeros(0), 2),
        Parsed(np.array([[9]], dtype=np.int32), np.array([0]), 1, kind="tokens", vocabulary=9),
        Parsed(np.eye(2, dtype=np.float32), np.array([0, 1]), 2, client_ids=np.array([0, 2]), client_names=["a", "b"]),
    ],
    ids=["label", "nan", "empty", "token", "group"],
)
def test_what_could_not_be_opened_is_not_written(parsed: Parsed, folder: Path) -> None:
    with pytest.raises(GpflError, match="'toy'"):
        cache.save("toy", parsed, Origin())
    assert not folder.exists()


def damage_facts(**facts: object) -> object:
    def change(table: Path) -> None:
        path = table / "table.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))

    return change


DAMAGES = {
    "no json": lambda table: (table / "table.json").write_text('{"format": 2'),
    "empty json": lambda table: (table / "table.json").write_text(""),
    "not UTF-8": lambda table: (table / "table.json").write_bytes(b"\xff\xfe"),
    "a list": lambda table: (table / "table.json").write_text("[1]"),
    "facts missing": lambda table: (table / "table.json").write_text(json.dumps({"format": cache.FORMAT})),
    "too few classes": damage_facts(classes=1),
    "classes no number": damage_facts(classes="many"),
    "unknown kind": damage_facts(kind="smells"),
    "origin no mapping": damage_facts(origin=3),
    "empty x": lambda table: (table / "x.npy").write_bytes(b""),
    "truncated x": lambda table: (table / "x.npy").write_bytes((table / "x.npy").read_bytes()[:-1]),
    "x of another format": lambda table: (table / "x.npy").write_bytes(b"PK\x03\x04" + bytes(200)),
    "x missing": lambda table: (table / "x.npy").unlink(),
    "y of another length": lambda table: np.save(table / "y.npy", np.zeros(5, dtype=np.int64)),
    "x of objects": lambda table: np.save(table / "x.npy", np.array([{}] * 6)),
    "groups cut": lambda table: (table / "groups.npy").write_bytes(b"\x93NUMPY"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_table_says_so_in_a_line_with_the_way_out(damage: object, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    published = numbers_set()
    published.get(tmp_path)
    damage(folder / "numbers")  # type: ignore[operator]
    with pytest.raises(GpflError, match=r": gpfl data get numbers$") as problem:
        published.load()
    assert "\n" not in str(problem.value)
    assert str(folder / "numbers") in str(problem.value)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_getting_a_damaged_table_parses_the_files_that_are_here(damage: object, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    published = numbers_set(also_in=(tmp_path,))
    whole = published.get().digest
    damage(folder / "numbers")  # type: ignore[operator]
    assert published.get().digest == whole
    assert published.load().digest == whole


@pytest.mark.parametrize("part", ["x", "y", "groups"])
def test_a_table_that_was_cut_off_is_not_taken_for_a_whole_one(part: str, folder: Path) -> None:
    cache.save("toy", GROUPED, Origin())
    path = folder / "toy" / f"{part}.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GpflError, match=r"is damaged .*: gpfl data get toy$"):
        cache.held("toy")


def test_a_table_of_an_older_format_is_parsed_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    published = numbers_set(also_in=(tmp_path,))
    published.get()
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert cache.load("numbers") is None
    assert cache.held("numbers") is None
    assert len(published.load()) == 20
    assert json.loads((folder / "numbers" / "table.json").read_text())["format"] == cache.FORMAT


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "numbers.txt"))  # a file, where a folder should be
    assert cache.load("numbers") is None
    for act in (lambda: numbers_set().get(tmp_path), lambda: cache.save("toy", PARSED, Origin())):
        with pytest.raises(GpflError, match=r"cannot write to .*GPFL_CACHE"):
            act()


def test_a_full_disk_leaves_the_former_table_and_is_not_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.save("toy", GROUPED, Origin())

    def full(*anything: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "write", full)
    with pytest.raises(GpflError, match="No space left"):
        cache.save("toy", PARSED, Origin())
    assert opened("toy").shape == (4,)
    assert [entry.name for entry in folder.iterdir()] == ["toy"]


def test_many_writers_at_once_end_with_one_whole_table(folder: Path) -> None:
    tables = [Parsed(np.full((50, 3), k, dtype=np.float32), np.zeros(50), 1) for k in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda parsed: cache.save("toy", parsed, Origin()), tables * 5))
    assert len(torch.unique(opened("toy").x)) == 1
    assert [entry.name for entry in folder.iterdir()] == ["toy"]


PROCESS = """
import sys
from pathlib import Path
import publisher
from publisher import numbers_set
def parse(paths):
    with open(sys.argv[2], "a") as log:
        log.write("parsed\\n")
    return parse_numbers(paths)
parse_numbers, publisher.parse_numbers = publisher.parse_numbers, parse
published = numbers_set(also_in=(Path(sys.argv[1]),))
print("ready", flush=True)
sys.stdin.readline()
print(published.load().digest)
"""


def test_two_processes_that_get_the_same_set_at_once_parse_it_once(folder: Path, tmp_path: Path) -> None:
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
    assert answers == [f"{opened('numbers').digest}\n"] * 2
    assert (tmp_path / "log").read_text() == "parsed\n"
    assert [entry.name for entry in folder.iterdir()] == ["numbers"]


def place(folder: Path, first: int) -> Path:
    """Puts a numbers.txt that begins with `first` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers.txt").write_text(f"{first} 2 3 4 5 6 7 8")
    return folder


def test_files_are_taken_from_the_nearest_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, data, given = tmp_path / "system", tmp_path / "data", tmp_path / "given"
    published = numbers_set(also_in=(system,))

    def taken() -> float:
        return float(published.get(unverified=True, again=True).x[0, 0])

    def download(file: fetch.PublishedFile, folder: Path, tell: fetch.Tell, bring: str) -> Path:
        return place(folder, 1) / file.name

    monkeypatch.setattr(fetch, "download", download)
    assert taken() == 1
    place(system, 2)
    assert taken() == 2
    monkeypatch.setenv("GPFL_DATA", str(data))
    assert taken() == 2, "nothing is in GPFL_DATA yet"
    place(data, 3)
    assert taken() == 3
    place(data / "numbers", 4)
    assert taken() == 4
    place(given, 5)
    assert published.get(given, unverified=True).x[0, 0] == 5
    place(given, 6)
    assert published.get(given / "numbers.txt", unverified=True).x[0, 0] == 6, "the one file, by its own name"
    assert published.get().x[0, 0] == 6, "here already"
    assert published.load().x[0, 0] == 6
    assert taken() == 4, "parsed anew"


@pytest.mark.parametrize("name", gpfl.data.PUBLISHED)
def test_folders_of_common_layouts_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = dataclasses.replace(gpfl.data.PUBLISHED[name], also_in=())
    monkeypatch.setenv("GPFL_DATA", str(tmp_path))
    assert published.find(None) is None
    for folder in reversed((name, *published.folders)):  # the nearest last: it wins
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for file in published.files:
            (tmp_path / folder / file.name).touch()
        assert published.find(None) == {file.name: tmp_path / folder / file.name for file in published.files}


def test_a_set_of_several_files_needs_them_all_in_one_place(tmp_path: Path) -> None:
    amazon = gpfl.data.PUBLISHED["amazon"]
    for file in amazon.files[1:]:
        (tmp_path / file.name).touch()
    assert amazon.files_in(tmp_path) is None
    with pytest.raises(GpflError, match=f"{tmp_path} does not hold the files of 'amazon': books_train.svmlight, "):
        amazon.get(tmp_path)
    (tmp_path / amazon.files[0].name).touch()
    assert amazon.files_in(tmp_path) == {file.name: tmp_path / file.name for file in amazon.files}
    assert amazon.files_in(tmp_path / "dvd_train.svmlight") is None


def test_a_file_under_any_name_is_taken_when_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(CONTENT)
    assert numbers_set().get(tmp_path / "mine.txt").metadata["verified"] is True


def test_other_content_is_taken_only_when_the_user_says_so_and_remembered(folder: Path, tmp_path: Path) -> None:
    place(tmp_path, 1)
    published = numbers_set()
    path = tmp_path / "numbers.txt"
    with pytest.raises(GpflError, match=rf"{path} is not .* --from {path} --unverified") as problem:
        published.get(tmp_path)
    assert "\n" not in str(problem.value)
    assert not folder.exists()
    (tmp_path / "of mine").mkdir()
    with pytest.raises(GpflError, match=rf"--from '{tmp_path}/of mine/numbers.txt' --unverified"):
        published.get(place(tmp_path / "of mine", 1))
    for table in (published.get(tmp_path, unverified=True), published.load()):
        assert table.metadata == {"files": [{"name": path.name, "sha256": fetch.digest(path)}], "verified": False}


def test_the_published_content_is_verified_with_and_without_leave(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_bytes(CONTENT)
    for unverified in (False, True):
        assert numbers_set().get(tmp_path, unverified=unverified).metadata["verified"] is True


@pytest.mark.parametrize(
    ("published", "content", "words"),
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
def test_what_nobody_vouches_for_is_said_in_a_line(published: int, content: bytes, words: str, tmp_path: Path) -> None:
    numbers = dataclasses.replace(numbers_set(), rows=published)
    (tmp_path / "numbers.txt").write_bytes(content)
    table = numbers.get(tmp_path, unverified=True)
    assert caveat(table) == caveat(numbers.load()) == words
    assert caveat(table.with_tensors(table.x.clone(), table.y.clone())) == words, "in other memory it is the same table"


def test_tables_that_nobody_published_have_no_caveat() -> None:
    assert caveat(gpfl.Table(np.eye(2), [0, 1], name="fmnist")) == ""
    assert caveat(gpfl.federate("digits").table) == ""


@pytest.mark.parametrize("name", ["numbers.txt", *(known.files[0].name for known in gpfl.data.PUBLISHED.values())])
def test_the_manifest_of_a_federation_records_the_files_and_can_be_read_again(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(CONTENT)
    file = fetch.PublishedFile(name, "", 1, sha256="0" * 64)
    table = PublishedDataset(name="numbers", description="", files=(file,), licence="", parse=parse_numbers, settings={}).get(
        tmp_path, unverified=True
    )
    federation = gpfl.federate(table, partition="natural")
    source = {"files": [{"name": name, "sha256": hashlib.sha256(CONTENT).hexdigest()}], "verified": False}
    assert federation.manifest()["source"] == source
    federation.save(tmp_path / "split.toml")
    assert toml.read(tmp_path / "split.toml")["source"] == source
    again = gpfl.Federation.load(tmp_path / "split.toml", table)
    assert [shard.name for shard in again.shards] == ["site 0", "site 1", "site 2", "site 3"]
