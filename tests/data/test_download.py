"""Downloads, from a server on this machine."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from publisher import CONTENT, Publisher, numbers_set, serving

from gpfl.data import PUBLISHED
from gpfl.data.published import download as fetch
from gpfl.data.published.download import PublishedFile
from gpfl.errors import GpflError

NAME = "numbers.txt"
LONG = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with serving(Publisher({NAME: LONG})) as served:
        yield served


def published(publisher: Publisher, content: bytes = LONG) -> PublishedFile:
    return PublishedFile(NAME, publisher.url + NAME, len(content), sha256=hashlib.sha256(content).hexdigest())


def refusal(file: PublishedFile, folder: Path) -> str:
    with pytest.raises(GpflError) as problem:
        fetch.download(file, folder)
    assert "\n" not in str(problem.value)
    assert file.url in str(problem.value)
    assert not (folder / file.name).exists()
    return str(problem.value)


def test_a_file_arrives_whole_and_its_bytes_are_counted(publisher: Publisher, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    path = fetch.download(published(publisher), tmp_path / "new", lambda *news: told.append(news))
    assert path.read_bytes() == LONG
    assert [entry.name for entry in path.parent.iterdir()] == [NAME]
    assert told[-1] == (NAME, len(LONG), len(LONG))


def test_a_file_that_is_here_is_not_asked_for_again(publisher: Publisher, tmp_path: Path) -> None:
    file = published(publisher)
    fetch.download(file, tmp_path)
    fetch.download(file, tmp_path)
    assert publisher.asked == [None]


def test_a_download_that_was_damaged_later_is_fetched_anew(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"damaged")
    assert fetch.download(published(publisher), tmp_path).read_bytes() == LONG


def test_a_broken_download_goes_on_where_it_stopped(publisher: Publisher, tmp_path: Path) -> None:
    file = published(publisher)
    publisher.breaks_after = 1000
    text = refusal(file, tmp_path)
    assert "broke off" in text
    assert text.endswith(": try again to go on, or bring the file: gpfl data get NAME --from FILE")
    assert (tmp_path / f"{NAME}.part").read_bytes() == LONG[:1000]
    publisher.breaks_after = None
    told: list[tuple[str, int, int]] = []
    assert fetch.download(file, tmp_path, lambda *news: told.append(news)).read_bytes() == LONG
    assert publisher.asked == [None, "bytes=1000-"]
    assert publisher.sent == [1000, len(LONG) - 1000], "only the rest is sent"
    assert told[-1] == (NAME, len(LONG), len(LONG))
    assert not (tmp_path / f"{NAME}.part").exists()


def test_a_server_that_cannot_go_on_starts_over(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    publisher.resumes = False
    assert fetch.download(published(publisher), tmp_path).read_bytes() == LONG
    assert publisher.sent == [len(LONG)]


def test_a_download_with_nothing_missing_needs_no_body(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(LONG)
    assert fetch.download(published(publisher), tmp_path).read_bytes() == LONG
    assert publisher.sent == []


def test_a_wrong_beginning_is_thrown_away_so_that_the_next_try_succeeds(publisher: Publisher, tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * 1000)
    assert "does not hold the published file" in refusal(published(publisher), tmp_path)
    assert fetch.download(published(publisher), tmp_path).read_bytes() == LONG


def test_a_file_with_another_checksum_is_thrown_away(publisher: Publisher, tmp_path: Path) -> None:
    text = refusal(published(publisher, LONG[::-1]), tmp_path)
    assert f"sha256 {hashlib.sha256(LONG).hexdigest()[:12]}" in text
    assert "--from" in text
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_said_with_the_servers_code(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files.clear()
    assert "404" in refusal(published(publisher), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        file = PublishedFile(NAME, f"http://127.0.0.1:{taken.getsockname()[1]}/{NAME}", 10, sha256="0" * 64)
        text = refusal(file, tmp_path)
    assert "refused" in text
    assert text.startswith("cannot reach 127.0.0.1 (")
    assert text.endswith("; bring the file: gpfl data get NAME --from FILE")
    assert "try again" not in text


def test_a_host_that_nobody_knows_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*anything: object, **more: object) -> None:
        raise urllib.error.URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(urllib.request, "urlopen", unknown)
    text = refusal(PublishedFile(NAME, f"https://nowhere.invalid/{NAME}", 10, sha256="0" * 64), tmp_path)
    assert text.startswith("cannot reach nowhere.invalid (Name or service not known) for https://nowhere.invalid/numbers.txt; ")


def test_a_server_that_hangs_up_without_a_word_was_not_reached(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        file = PublishedFile(NAME, f"http://127.0.0.1:{server.getsockname()[1]}/{NAME}", 10, sha256="0" * 64)
        text = refusal(file, tmp_path)
        thread.join()
    assert text.startswith("cannot reach 127.0.0.1 (")


def test_the_way_without_a_network_is_a_command_that_can_be_given(tmp_path: Path) -> None:
    ways = {name: published.bring for name, published in PUBLISHED.items()}
    assert ways["cifar100"] == "bring the file: gpfl data get cifar100 --from cifar-100-binary.tar.gz"
    assert ways["amazon"] == "bring its 8 files: gpfl data get amazon --from FOLDER"
    with pytest.raises(GpflError, match=r"cannot reach .*; bring the file: gpfl data get numbers --from numbers.txt$"):
        numbers_set("http://127.0.0.1:9/").load()


@pytest.mark.parametrize("tells_length", [True, False])
def test_a_server_that_sends_without_end_is_stopped_and_leaves_nothing(
    publisher: Publisher, tmp_path: Path, tells_length: bool
) -> None:
    publisher.tells_length = tells_length
    publisher.files[NAME] = bytes(40 << 20)
    assert "sends more than" in refusal(published(publisher), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_more_bytes_than_published_are_no_published_file(publisher: Publisher, tmp_path: Path) -> None:
    file = published(publisher)
    publisher.files[NAME] = LONG + b"more"
    assert "does not hold the published file" in refusal(file, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_length_that_nobody_tells_is_zero(publisher: Publisher, tmp_path: Path) -> None:
    publisher.tells_length = False
    (tmp_path / f"{NAME}.part").write_bytes(LONG[:1000])
    told: list[tuple[str, int, int]] = []
    assert fetch.download(published(publisher), tmp_path, lambda *news: told.append(news)).read_bytes() == LONG
    assert told[-1] == (NAME, len(LONG), 0)


def test_where_the_publisher_gives_md5_alone_it_is_checked(publisher: Publisher, tmp_path: Path) -> None:
    file = PublishedFile(NAME, publisher.url + NAME, len(LONG), md5=hashlib.md5(LONG).hexdigest())
    assert file.checksum[0] == "md5"
    assert fetch.download(file, tmp_path).read_bytes() == LONG
    (tmp_path / NAME).unlink()
    assert "(md5 " in refusal(dataclasses.replace(file, md5="0" * 32), tmp_path)


def test_a_gzip_file_packed_by_another_program_counts_by_what_it_holds(tmp_path: Path) -> None:
    first, again = gzip.compress(LONG, 9, mtime=0), gzip.compress(LONG, 1, mtime=1)
    sums = {"sha256": hashlib.sha256(first).hexdigest(), "inner_sha256": hashlib.sha256(LONG).hexdigest()}
    file = PublishedFile("a.gz", "", len(first), **sums)
    path = tmp_path / "a.gz"
    for content, good in [
        (first, True),
        (again, True),
        (gzip.compress(LONG[1:]), False),
        (again[:-20], False),
        (b"no gzip", False),
        (LONG, False),
    ]:
        path.write_bytes(content)
        assert fetch.is_published(path, file) is good
    path.write_bytes(again)
    assert not fetch.is_published(path, dataclasses.replace(file, inner_sha256=""))


def test_a_data_set_is_downloaded_checked_parsed_and_then_here(publisher: Publisher) -> None:
    publisher.files[NAME] = CONTENT
    table = numbers_set(publisher.url).load()
    assert table.x.flatten().tolist() == list(range(20))
    assert table.metadata == {"files": [{"name": NAME, "sha256": hashlib.sha256(CONTENT).hexdigest()}], "verified": True}
    assert numbers_set(publisher.url).load().digest == table.digest
    assert publisher.asked == [None]


def test_a_wrong_download_is_refused_even_where_unverified_files_are_welcome(publisher: Publisher, tmp_path: Path) -> None:
    publisher.files[NAME] = b"1 2 3"
    with pytest.raises(GpflError, match="does not hold the published file"):
        numbers_set(publisher.url).get(unverified=True)
    assert not (tmp_path / "cache" / "tables").exists()
