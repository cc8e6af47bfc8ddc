"""Downloads from a server on this machine."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from publisher import CONTENT, Publisher, numbers_dataset, serve

from gpfl.data import PUBLISHED
from gpfl.data.published.download import PublishedFile, download
from gpfl.errors import GpflError

NAME = "numbers.txt"
LONG = bytes(range(256)) * 40
INSTRUCTIONS = "copy the file here"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with serve(Publisher({NAME: LONG})) as served:
        yield served


def published_file(publisher: Publisher, content: bytes = LONG) -> PublishedFile:
    return PublishedFile(NAME, publisher.url + NAME, len(content), sha256=hashlib.sha256(content).hexdigest())


def error_of(file: PublishedFile, folder: Path) -> str:
    """Return the message of a failed download: one line with the address and what to do."""
    with pytest.raises(GpflError) as problem:
        download(file, folder, instructions=INSTRUCTIONS)
    message = str(problem.value)
    assert "\n" not in message
    assert file.url in message
    assert message.endswith(f"or {INSTRUCTIONS}")
    assert not (folder / file.name).exists()
    return message


def test_download_saves_the_file_and_reports_its_bytes(publisher: Publisher, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = download(published_file(publisher), tmp_path / "new", lambda *call: calls.append(call))
    assert path.read_bytes() == LONG
    assert [entry.name for entry in path.parent.iterdir()] == [NAME]
    assert calls[-1] == (NAME, len(LONG), len(LONG))


def test_an_existing_file_is_not_requested_again(publisher: Publisher, tmp_path: Path) -> None:
    file = published_file(publisher)
    download(file, tmp_path)
    download(file, tmp_path)
    assert publisher.ranges == [None]


def test_an_existing_file_needs_no_pooch(publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = published_file(publisher)
    monkeypatch.setitem(sys.modules, "pooch", None)
    assert "needs pooch: pip install pooch" in error_of(file, tmp_path)
    (tmp_path / NAME).write_bytes(LONG)
    assert download(file, tmp_path) == tmp_path / NAME


def test_a_file_damaged_after_its_download_is_downloaded_again(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"damaged")
    assert download(published_file(publisher), tmp_path).read_bytes() == LONG


def test_an_interrupted_download_resumes(publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpfl.data.published.download.CHUNK", 100)
    file = published_file(publisher)
    publisher.cut_after = 1000
    assert "try again" in error_of(file, tmp_path)
    assert (tmp_path / f"{NAME}.part").read_bytes() == LONG[:1000]
    publisher.cut_after = None
    calls: list[tuple[str, int, int]] = []
    assert download(file, tmp_path, lambda *call: calls.append(call)).read_bytes() == LONG
    assert publisher.ranges == [None, "bytes=1000-"]
    assert publisher.sent == [1000, len(LONG) - 1000], "only the rest is sent"
    assert calls[-1] == (NAME, len(LONG), len(LONG))
    assert [entry.name for entry in tmp_path.iterdir()] == [NAME]


def test_a_server_that_cannot_resume_starts_over(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    publisher.resumes = False
    assert download(published_file(publisher), tmp_path).read_bytes() == LONG
    assert publisher.sent == [len(LONG)]


def test_a_complete_partial_file_is_not_sent_again(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(LONG)
    assert download(published_file(publisher), tmp_path).read_bytes() == LONG
    assert publisher.sent == []


@pytest.mark.parametrize("beginning", [b"x" * 1000, LONG + b"more"], ids=["wrong", "too long"])
def test_a_wrong_partial_file_is_deleted_so_that_the_next_download_succeeds(
    beginning: bytes, publisher: Publisher, tmp_path: Path
) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(beginning)
    assert "is not the published file" in error_of(published_file(publisher), tmp_path)
    assert download(published_file(publisher), tmp_path).read_bytes() == LONG


@pytest.mark.parametrize("content", [LONG[::-1], LONG[:-1]], ids=["other", "shorter"])
def test_a_file_with_another_checksum_is_deleted(content: bytes, publisher: Publisher, tmp_path: Path) -> None:
    assert "is not the published file: its sha256 or size differs" in error_of(published_file(publisher, content), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_reported_with_the_code_of_the_server(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files.clear()
    assert "404" in error_of(published_file(publisher), tmp_path)


def test_an_unreachable_server_is_reported_with_address_size_and_instructions(tmp_path: Path) -> None:
    with socket.socket() as bound:  # nobody listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/{NAME}"
        message = error_of(PublishedFile(NAME, url, 12_345, sha256="0" * 64), tmp_path)
    assert message == f"cannot download {url} (12,345 bytes): Connection refused; try again, or {INSTRUCTIONS}"


def test_an_unknown_host_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    message = error_of(PublishedFile(NAME, f"https://nowhere.invalid/{NAME}", 10, sha256="0" * 64), tmp_path)
    assert "): Name or service not known; " in message


def test_a_server_that_closes_the_connection_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/{NAME}"
        message = error_of(PublishedFile(NAME, url, 10, sha256="0" * 64), tmp_path)
        assert message.startswith(f"cannot download {url} (10 bytes): ")
        thread.join()


def test_instructions_for_a_machine_without_a_network_are_a_command(tmp_path: Path) -> None:
    instructions = {name: published.manual_instructions for name, published in PUBLISHED.items()}
    assert instructions["cifar100"] == "copy the file here and run: gpfl data get cifar100 --from cifar-100-binary.tar.gz"
    assert instructions["amazon"] == "copy its 8 files here and run: gpfl data get amazon --from FOLDER"
    with pytest.raises(GpflError, match=r"cannot download .*, or copy .*: gpfl data get numbers --from numbers.txt$"):
        numbers_dataset("http://127.0.0.1:9/").load()


@pytest.mark.parametrize("sends_length", [True, False])
def test_a_file_without_end_is_stopped_and_deleted(publisher: Publisher, tmp_path: Path, sends_length: bool) -> None:
    publisher.sends_length = sends_length
    publisher.files[NAME] = bytes(40 << 20)
    assert "is not the published file" in error_of(published_file(publisher), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_length_is_reported_as_zero(publisher: Publisher, tmp_path: Path) -> None:
    publisher.sends_length = False
    (tmp_path / f"{NAME}.part").write_bytes(LONG[:1000])
    calls: list[tuple[str, int, int]] = []
    assert download(published_file(publisher), tmp_path, lambda *call: calls.append(call)).read_bytes() == LONG
    assert calls[-1] == (NAME, len(LONG), 0)


def test_md5_is_checked_where_the_publisher_gives_nothing_else(publisher: Publisher, tmp_path: Path) -> None:
    file = PublishedFile(NAME, publisher.url + NAME, len(LONG), md5=hashlib.md5(LONG).hexdigest())
    assert file.checksum[0] == "md5"
    assert download(file, tmp_path).read_bytes() == LONG
    (tmp_path / NAME).unlink()
    assert "its md5 or size differs" in error_of(dataclasses.replace(file, md5="0" * 32), tmp_path)


def test_a_gzip_file_of_another_program_matches_by_its_content(tmp_path: Path) -> None:
    first, second = gzip.compress(LONG, 9, mtime=0), gzip.compress(LONG, 1, mtime=1)
    sums = {"sha256": hashlib.sha256(first).hexdigest(), "content_sha256": hashlib.sha256(LONG).hexdigest()}
    file = PublishedFile("a.gz", "", len(first), **sums)
    path = tmp_path / "a.gz"
    for content, good in [
        (first, True),
        (second, True),
        (gzip.compress(LONG[1:]), False),
        (second[:-20], False),
        (b"no gzip", False),
        (LONG, False),
    ]:
        path.write_bytes(content)
        assert file.matches(path) is good
    path.write_bytes(second)
    assert not dataclasses.replace(file, content_sha256="").matches(path)


def test_a_dataset_is_downloaded_checked_and_parsed_once(publisher: Publisher) -> None:
    publisher.files[NAME] = CONTENT
    table = numbers_dataset(publisher.url).load()
    assert table.x.flatten().tolist() == list(range(20))
    assert table.metadata == {"files": [{"name": NAME, "sha256": hashlib.sha256(CONTENT).hexdigest()}], "verified": True}
    assert numbers_dataset(publisher.url).load().digest == table.digest
    assert publisher.ranges == [None]


def test_a_wrong_download_is_an_error_even_if_unverified_files_are_accepted(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files[NAME] = b"1 2 3"
    with pytest.raises(GpflError, match="is not the published file"):
        numbers_dataset(publisher.url).prepare(unverified=True)
    assert not (tmp_path / "cache" / "tables").exists()
