"""The six loaders, on small files in the published formats."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpfl.data import PUBLISHED, Table, find_dataset
from gpfl.data.encoders import build_vocabulary, tokenize
from gpfl.data.published import archive, cache, har
from gpfl.data.published import images as image_datasets
from gpfl.errors import GpflError
from gpfl.federation import Federation, Shard
from gpfl.training import config as configs

DRAW = np.random.default_rng(0)
Damage = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GPFL_DATA", raising=False)
    monkeypatch.setattr(image_datasets, "FMNIST_SPLITS", (("train", 5), ("t10k", 3)))
    monkeypatch.setattr(image_datasets, "CIFAR100_MEMBERS", {TRAIN: 4, TEST: 2})
    monkeypatch.setattr(image_datasets, "TINY_CLASSES", 3)


def get(name: str, folder: Path) -> Table:
    return PUBLISHED[name].prepare(folder, unverified=True)


def error_of(name: str, folder: Path, file: str) -> str:
    """Return the message for a bad file: one line that names the file or its data. Nothing is left of the table."""
    before = sorted(folder.rglob("*"))
    with pytest.raises(GpflError) as problem:
        get(name, folder)
    text = str(problem.value)
    assert "\n" not in text
    assert str(folder / file) in text or text.startswith(f"data '{name}' has ")
    assert not (cache.cache_dir() / "tables").exists()
    left = {path for path in folder.rglob("*") if path not in before}
    assert {path.name for path in left} == {"cache", "downloads", name, ".lock"}
    return text


def truncate(path: Path) -> None:
    """Truncates a file to its first two thirds."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


# idx


IMAGES = [DRAW.integers(0, 256, (rows, 28, 28), dtype=np.uint8) for rows in (5, 3)]
CLOTHES = [np.array([9, 0, 3, 3, 1], dtype=np.uint8), np.array([2, 0, 8], dtype=np.uint8)]
T10K_IMAGES, T10K_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


def idx(array: np.ndarray, magic: int | None = None) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", magic or 0x0800 + array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    for part, images, labels in zip(("train", "t10k"), IMAGES, CLOTHES, strict=True):
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path


def pack(content: bytes) -> Damage:
    return lambda path: path.write_bytes(gzip.compress(content))


def test_fashion_mnist_is_read_training_before_test(clothes: Path) -> None:
    table = get("fmnist", clothes)
    assert np.array_equal(table.x.numpy(), np.concatenate(IMAGES)[:, None])
    assert (table.x.dtype, table.input_spec.kind, table.input_spec.pixel_max, table.classes) == (torch.uint8, "pixels", 255, 10)
    assert table.y.tolist() == [9, 0, 3, 3, 1, 2, 0, 8]
    assert table.client_ids is None


BAD_CLOTHES: dict[str, tuple[str, Damage, str]] = {
    "truncated": (T10K_IMAGES, truncate, "damaged"),
    "no gzip": (T10K_IMAGES, lambda path: path.write_bytes(b"<html>not found</html>"), "damaged"),
    "empty": (T10K_IMAGES, lambda path: path.write_bytes(b""), "not enough values"),
    "a bit flipped": (T10K_LABELS, lambda path: path.write_bytes(path.read_bytes()[:-8] + bytes(8)), "damaged"),
    "wrong magic number": (T10K_IMAGES, pack(idx(IMAGES[1], 0x0903)), "0x903"),
    "labels for images": (T10K_IMAGES, pack(idx(CLOTHES[1])), "is damaged"),
    "another shape": (T10K_IMAGES, pack(idx(IMAGES[1].reshape(6, 14, 28))), r"\(6, 14, 28\)"),
    "too few rows": (T10K_LABELS, pack(idx(CLOTHES[1][:2])), r"\(2,\)"),
    "too short": (T10K_LABELS, pack(idx(CLOTHES[1])[:-1]), "size 2 into shape"),
    "too long": (T10K_LABELS, pack(idx(CLOTHES[1]) + b"x"), "more than 11 bytes"),
    "a bomb": (T10K_LABELS, pack(bytes(1 << 22)), "more than 11 bytes"),
    "wrong label": (T10K_LABELS, pack(idx(np.array([1, 10, 0], dtype=np.uint8))), "label 10 in row 6; labels must be 0 to 9"),
}


@pytest.mark.parametrize("bad", BAD_CLOTHES)
def test_bad_idx_files_are_errors(bad: str, clothes: Path) -> None:
    file, damage, pattern = BAD_CLOTHES[bad]
    damage(clothes / file)
    assert_matches(error_of("fmnist", clothes, file), pattern)


# the tar.gz of CIFAR's records


TRAIN, TEST = "cifar-100-binary/train.bin", "cifar-100-binary/test.bin"
PHOTOS = [DRAW.integers(0, 256, (rows, 3074), dtype=np.uint8) for rows in (4, 2)]
for records in PHOTOS:
    records[:, 1] %= 100
PHOTOS[0][0, :2] = 255, 99  # the coarse label is nobody's business


def plain(name: str, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info, content


def link(name: str, to: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info, b""


def write_tar(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(folder / image_datasets.CIFAR100_FILE, "w:gz", compresslevel=1) as file:
        for info, content in members:
            file.addfile(info, io.BytesIO(content))
    return folder


GOOD_TAR = (plain(TRAIN, PHOTOS[0].tobytes()), plain(TEST, PHOTOS[1].tobytes()))


def test_cifar_is_read_training_before_test_with_fine_labels(tmp_path: Path) -> None:
    table = get("cifar100", write_tar(tmp_path, GOOD_TAR[1], plain("cifar-100-binary/fine_label_names.txt", b"a"), GOOD_TAR[0]))
    records = np.concatenate(PHOTOS)
    assert np.array_equal(table.x.numpy(), records[:, 2:].reshape(6, 3, 32, 32))
    assert (table.x.dtype, table.input_spec.kind, table.input_spec.pixel_max, table.classes) == (
        torch.uint8,
        "pixels",
        255,
        100,
    )
    assert table.y.tolist() == records[:, 1].tolist()


def test_other_members_of_an_archive_are_neither_written_nor_read(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    hostile = [
        plain("../escaped", b"x"),
        plain("/tmp/gpfl-escaped", b"x"),
        plain(f"../../{TRAIN}", bytes(4 * 3074)),
        link("cifar-100-binary", str(tmp_path)),
        link("link", "/etc/passwd"),
        plain("link/below", b"x"),
        link("device", "", tarfile.CHRTYPE),
    ]
    before = sorted(tmp_path.rglob("*"))
    table = get("cifar100", write_tar(folder, *hostile, *GOOD_TAR))
    assert np.array_equal(table.x.numpy()[:4], PHOTOS[0][:, 2:].reshape(4, 3, 32, 32))
    new = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path not in before}
    assert new == {"a", "cache"}
    assert [path.name for path in folder.iterdir()] == [image_datasets.CIFAR100_FILE]
    assert not Path("/tmp/gpfl-escaped").exists()


def long_header() -> tuple[tarfile.TarInfo, bytes]:
    """Return a header that tarfile reads completely, longer than the archive may be."""
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 1 << 22
    return info, bytes(1 << 22)


def relabelled(label: int) -> bytes:
    records = PHOTOS[1].copy()
    records[1, 1] = label
    return records.tobytes()


BAD_TARS: dict[str, tuple[Sequence[tuple[tarfile.TarInfo, bytes]], str]] = {
    "member missing": ([GOOD_TAR[0]], f"does not hold {TEST}"),
    "other members": (
        [plain("cifar-100-python/meta", b"1"), plain("a\nb", b"2"), plain("c" * 99, b"3"), plain("d", b"4"), plain("e", b"5")],
        f"does not hold {TRAIN}",
    ),
    "no members": ([], f"does not hold {TRAIN}"),
    "a symbolic link": ([GOOD_TAR[0], link(TEST, "/etc/passwd")], f"does not hold {TEST}"),
    "a hard link": ([GOOD_TAR[0], link(TEST, TRAIN, tarfile.LNKTYPE)], f"does not hold {TEST}"),
    "a folder": ([GOOD_TAR[0], link(TEST, "", tarfile.DIRTYPE)], f"does not hold {TEST}"),
    "escaped": ([GOOD_TAR[0], plain(f"../{TEST}", PHOTOS[1].tobytes())], f"does not hold {TEST}"),
    "too short": ([GOOD_TAR[0], plain(TEST, PHOTOS[1].tobytes()[:-1])], "size 6147 into shape"),
    "another byte": ([GOOD_TAR[0], plain(TEST, PHOTOS[1].tobytes() + b"x")], "size 6149 into shape"),
    "too long": ([plain(TRAIN, bytes(1 << 20)), GOOD_TAR[1]], "size 1048576 into shape"),
    "wrong label": ([GOOD_TAR[0], plain(TEST, relabelled(100))], "label 100 is not 0 to 99"),
    "a bomb": ([plain("zeros", bytes(1 << 22)), *GOOD_TAR], "more than [0-9,]+ bytes"),
    "a bomb in a header": ([long_header(), *GOOD_TAR], "more than [0-9,]+ bytes"),
}


@pytest.mark.parametrize("bad", BAD_TARS)
def test_bad_tar_archives_are_errors(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_OTHER_BYTES", 1 << 20)
    members, pattern = BAD_TARS[bad]
    assert_matches(error_of("cifar100", write_tar(tmp_path, *members), image_datasets.CIFAR100_FILE), pattern)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        lambda path: path.write_bytes(b"PK\x03\x04 no tar"),
        lambda path: path.write_bytes(gzip.compress(b"no tar at all" * 100)),
        lambda path: path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:5000])),
    ],
    ids=["truncated", "no gzip", "no tar", "truncated inside"],
)
def test_damaged_tar_archives_are_errors(damage: Damage, tmp_path: Path) -> None:
    damage(write_tar(tmp_path, *GOOD_TAR) / image_datasets.CIFAR100_FILE)
    assert_matches(error_of("cifar100", tmp_path, image_datasets.CIFAR100_FILE), "is damaged or has another format")


def test_the_pickled_cifar_is_an_error_that_names_the_binary_version(tmp_path: Path) -> None:
    pickled = tmp_path / "cifar-100-python.tar.gz"
    write_tar(tmp_path, *GOOD_TAR).joinpath(image_datasets.CIFAR100_FILE).rename(pickled)
    words = f"{pickled} holds pickles, which gpfl does not read: get the binary version, {image_datasets.CIFAR100_FILE}"
    for source in (pickled, tmp_path):
        with pytest.raises(GpflError) as problem:
            PUBLISHED["cifar100"].prepare(source)
        assert str(problem.value) == words
    write_tar(tmp_path, *GOOD_TAR)
    assert len(get("cifar100", tmp_path)) == 6, "the right file next to it is read"
    with pytest.raises(GpflError, match="get the binary version"):
        PUBLISHED["cifar100"].prepare(pickled)


# the zip of Tiny-ImageNet's JPEG images


WNIDS = ("n00000003", "n00000001", "n00000002")


def jpeg(value: int | tuple[int, int, int], side: tuple[int, int] = (64, 64), format: str = "JPEG") -> bytes:
    content = io.BytesIO()
    Image.new("L" if isinstance(value, int) else "RGB", side, value).save(content, format, quality=100)
    return content.getvalue()


def image_name(wnid: str, number: int) -> str:
    return f"tiny-imagenet-200/train/{wnid}/images/{wnid}_{number}.JPEG"


GOOD_TINY: dict[str, bytes] = {
    "tiny-imagenet-200/wnids.txt": "\n".join(WNIDS).encode(),
    image_name(WNIDS[0], 0): jpeg((0, 0, 255)),
    image_name(WNIDS[1], 10): jpeg((255, 0, 0)),
    image_name(WNIDS[1], 9): jpeg(77),
    image_name(WNIDS[2], 1): jpeg((255, 255, 255)),
}


def write_zip(path: Path, members: Mapping[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path.parent


def test_tiny_imagenet_is_read_class_by_class_and_grey_images_get_three_equal_channels(tmp_path: Path) -> None:
    others = {
        "tiny-imagenet-200/val/images/val_0.JPEG": b"no image",
        "tiny-imagenet-200/train/n00000009/images/n00000009_0.JPEG": b"of no known class",
        f"tiny-imagenet-200/train/{WNIDS[0]}/images/{WNIDS[1]}_1.JPEG": b"in the wrong folder",
        f"tiny-imagenet-200/train/{WNIDS[0]}/{WNIDS[0]}_boxes.txt": b"boxes",
        f"../{image_name(WNIDS[0], 7)}": b"escaped",
        f"/tmp/{image_name(WNIDS[0], 8)}": b"escaped",
    }
    table = get("tiny", write_zip(tmp_path / image_datasets.TINY_FILE, {**others, **GOOD_TINY}))
    assert (table.x.dtype, table.shape, table.input_spec.kind, table.classes) == (torch.uint8, (3, 64, 64), "pixels", 3)
    assert table.y.tolist() == [0, 0, 1, 2]
    colours = table.x.double().mean((2, 3))
    assert colours.numpy() == pytest.approx(np.array([[77] * 3, [255, 0, 0], [255] * 3, [0, 0, 255]]), abs=3)
    assert (table.x[0] == table.x[0, :1]).all()
    assert {path.name for path in tmp_path.iterdir()} == {image_datasets.TINY_FILE, "cache"}


def huge(image: bytes) -> bytes:
    """The same JPEG, which says that it is 65,500 × 65,500."""
    at = image.index(b"\xff\xc0") + 5
    return image[:at] + struct.pack(">HH", 65_500, 65_500) + image[at + 4 :]


BLUE = image_name(WNIDS[0], 0)
BAD_TINY: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no list of classes": ({"tiny-imagenet-200/wnids.txt": None}, "no item named .*wnids.txt"),
    "a class missing": ({"tiny-imagenet-200/wnids.txt": b"n00000001\nn00000002"}, "training images of 3 classes"),
    "a class twice": ({"tiny-imagenet-200/wnids.txt": b"n00000001 n00000001 n00000002"}, "training images of 3 classes"),
    "classes not UTF-8": ({"tiny-imagenet-200/wnids.txt": b"n00000001 n00000002 \xff\xfe"}, "ascii"),
    "a class without images": ({BLUE: None}, "training images of 3 classes"),
    "wrong size": ({BLUE: jpeg((1, 2, 3), (64, 32))}, "64×32 pixels instead of 64×64"),
    "huge": ({BLUE: huge(jpeg((1, 2, 3)))}, "n00000003_0.JPEG"),
    "truncated image": ({BLUE: jpeg((1, 2, 3))[:-100]}, "n00000003_0.JPEG in .* is damaged"),
    "no image": ({BLUE: b"GIF89a"}, "n00000003_0.JPEG in .* is damaged"),
    "another format": ({BLUE: jpeg((1, 2, 3), format="PNG")}, "n00000003_0.JPEG in .* is damaged"),
    "too long": ({BLUE: bytes((1 << 20) + 1)}, "n00000003_0.JPEG holds more than 1,048,576 bytes"),
}


@pytest.mark.parametrize("bad", BAD_TINY)
def test_bad_members_of_tiny_imagenet_are_errors(bad: str, tmp_path: Path) -> None:
    changes, pattern = BAD_TINY[bad]
    members = {name: content for name, content in {**GOOD_TINY, **changes}.items() if content is not None}
    assert_matches(error_of("tiny", write_zip(tmp_path / image_datasets.TINY_FILE, members), image_datasets.TINY_FILE), pattern)


def encrypt(path: Path) -> None:
    """Marks every member as encrypted."""
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02")
    while at >= 0:
        content[at + 8] |= 1
        at = content.find(b"PK\x01\x02", at + 1)
    path.write_bytes(content)


def spoil(path: Path) -> None:
    """Changes a byte of the first member's content."""
    content = bytearray(path.read_bytes())
    content[60] ^= 0xFF
    path.write_bytes(content)


def compress_otherwise(path: Path) -> None:
    """Says that every member is compressed in a way nobody knows."""
    content = bytearray(path.read_bytes())
    at = content.find(b"PK\x01\x02")
    while at >= 0:
        content[at + 10] = 77
        at = content.find(b"PK\x01\x02", at + 1)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        encrypt,
        spoil,
        compress_otherwise,
        lambda path: path.write_bytes(gzip.compress(b"x")),
        lambda path: path.write_bytes(b""),
    ],
    ids=["truncated", "encrypted", "spoilt", "unknown compression", "no zip", "empty"],
)
def test_damaged_zip_archives_are_errors(damage: Damage, tmp_path: Path) -> None:
    damage(write_zip(tmp_path / image_datasets.TINY_FILE, GOOD_TINY) / image_datasets.TINY_FILE)
    assert_matches(error_of("tiny", tmp_path, image_datasets.TINY_FILE), "is damaged or has another format")


# quoted CSV


ROWS = {
    "train.csv": '"3","A ""quoted"" title","Text, with a comma."\n"1","Two\nlines","world; world: WORLD<br />end"\n',
    "test.csv": '"4","Sci","can\'t!"\r\n"2","",""\n',
}


@pytest.fixture
def news(tmp_path: Path) -> Path:
    for name, text in ROWS.items():
        (tmp_path / name).write_bytes(text.encode())
    return tmp_path


def test_ag_news_may_contain_quotes_and_line_breaks(news: Path) -> None:
    table = get("agnews", news)
    assert (table.shape, table.input_spec.kind, table.classes) == ((200,), "tokens", 4)
    assert table.y.tolist() == [2, 0, 3, 1]
    words = [
        ["a", "quoted", "title", "text", ",", "with", "a", "comma", "."],
        ["two", "lines", "world", "world", "world", "end"],
        ["sci", "can", "'", "t", "!"],
        [],
    ]
    numbers = build_vocabulary(words)
    assert table.input_spec.vocabulary == len(numbers) + 1
    for row, text in zip(table.x, words, strict=True):
        assert row.tolist() == [numbers[word] for word in text] + [0] * (200 - len(text))


def test_articles_are_truncated_to_200_words_but_the_vocabulary_has_all(news: Path) -> None:
    (news / "test.csv").write_text('"1","' + "w " * 150 + '","' + "v " * 100 + 'last"\n')
    table = get("agnews", news)
    row = table.x[-1]
    assert (row != 0).all()
    assert torch.unique_consecutive(row, return_counts=True)[1].tolist() == [150, 50]
    assert table.input_spec.vocabulary == 1 + len(
        set(tokenize("a quoted title text, with comma. two lines world end w v last"))
    )


BAD_NEWS: dict[str, tuple[bytes, str]] = {
    "extra column": (b'"1","a","b"\n"1","a","b","c"\n', "record 2"),
    "missing column": (b'"1","a"\n', "record 1"),
    "a blank line": (b'"1","a","b"\n\n"1","a","b"\n', "record 2"),
    "a head line": (b'"class","title","text"\n', "record 1"),
    "wrong label": (b'"5","a","b"\n', "class 1 to 4"),
    "label 0": (b'"0","a","b"\n', "class 1 to 4"),
    "not UTF-8": (b'"1","caf\xe9","b"\n', "utf-8"),
    "truncated": (b'"1","a","b"\n"1","a', "unexpected end of data"),
    "a quote inside": (b'"1","a"b","c"\n', "',' expected"),
    "no text": (gzip.compress(b'"1","a","b"\n'), "utf-8"),
    "a field without end": (b'"1","' + b"a" * 200_000, "unexpected end of data|field larger than field limit"),
}


@pytest.mark.parametrize("bad", BAD_NEWS)
def test_bad_csv_files_are_errors(bad: str, news: Path) -> None:
    content, pattern = BAD_NEWS[bad]
    (news / "test.csv").write_bytes(content)
    assert_matches(error_of("agnews", news, "test.csv"), pattern)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("can't!", ["can", "'", "t", "!"]),
        ("Reuters - UPPER Case", ["reuters", "-", "upper", "case"]),
        ('say "yes"', ["say", "yes"]),
        ('5"disk', ["5disk"]),
        ("one<br />two", ["one", "two"]),
        ("a;b:c", ["a", "b", "c"]),
        ("(Who? me), U.S.", ["(", "who", "?", "me", ")", ",", "u", ".", "s", "."]),
        ("#39;s \\tab\u00a0end\n", ["#39", "s", "\\tab", "end"]),
        ("", []),
    ],
)
def test_tokens_are_lower_case_words_and_punctuation_marks(text: str, words: list[str]) -> None:
    assert tokenize(text) == words


def test_the_vocabulary_is_ordered_by_frequency_then_alphabet() -> None:
    texts = [["b", "c", "a"], ["c", "d"], ["d", "é", "A"]]
    numbers = build_vocabulary(texts)
    assert list(numbers.items()) == [("c", 1), ("d", 2), ("A", 3), ("a", 4), ("b", 5), ("é", 6)]
    assert build_vocabulary([text[::-1] for text in texts[::-1]]) == numbers
    assert build_vocabulary([]) == {}


# svmlight


REVIEWS = {
    f"{domain}_{part}.svmlight": f"1 {k}:1 4999:255\n-1 {k}:{k + 2}\n" if part == "train" else "+1 0:9\n"
    for k, domain in enumerate(("books", "dvd", "electronics", "kitchen"))
    for part in ("train", "test")
}


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    for name, text in REVIEWS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_amazon_is_read_domain_by_domain_and_a_review_may_be_empty(reviews: Path) -> None:
    (reviews / "kitchen_test.svmlight").write_text("-1\n1 7:1 8:2")
    table = get("amazon", reviews)
    assert (table.shape, table.x.dtype, table.input_spec.kind, table.classes) == ((5000,), torch.uint8, "counts", 2)
    assert table.y.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 1]
    assert table.client_names == ("books", "dvd", "electronics", "kitchen")
    assert table.client_ids is not None
    assert table.client_ids.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 4
    entries = [(int(row), int(word), int(table.x[row, word])) for row, word in table.x.nonzero()]
    expected = []
    for k in range(4):
        expected += [(3 * k, k, 1), (3 * k, 4999, 255), (3 * k + 1, k, k + 2)] + ([(3 * k + 2, 0, 9)] if k < 3 else [])
    assert entries == [*expected, (12, 7, 1), (12, 8, 2)]
    assert table.inputs(torch.tensor([0]))[0, 4999] == 255.0, "counts are taken as they are"


BAD_REVIEWS: dict[str, tuple[bytes, str]] = {
    "wrong label": (b"1 1:1\n2 1:1\n", "a label is not ±1"),
    "no label": (b"1:1 2:1\n", "is damaged or has another format"),
    "single numbers": (b"1 1 2\n", "is damaged or has another format"),
    "truncated": (b"1 1:1 2:", "is damaged or has another format"),
    "a fraction": (b"1 1:0.5\n", "not an integer from 0 to 255"),
    "a word": (b"1 good:1\n", "is damaged or has another format"),
    "word 5000": (b"1 5000:1\n", "is damaged or has another format"),
    "word -1": (b"1 -1:1\n", "is damaged or has another format"),
    "count 256": (b"1 1:256\n", "not an integer from 0 to 255"),
    "count -1": (b"1 1:-1\n", "not an integer from 0 to 255"),
    "without measure": (b"1 1:99999999999999999999\n", "not an integer from 0 to 255"),
    "not text": (b"1 1:1\n\xff\xfe\n", "is damaged or has another format"),
}


@pytest.mark.parametrize("bad", BAD_REVIEWS)
def test_bad_svmlight_files_are_errors(bad: str, reviews: Path) -> None:
    content, pattern = BAD_REVIEWS[bad]
    (reviews / "dvd_test.svmlight").write_bytes(content)
    assert_matches(error_of("amazon", reviews, "dvd_test.svmlight"), pattern)


# the zip in a zip of HAR's signals


SIGNALS = {part: DRAW.normal(size=(rows, 9, 128)).round(4) for part, rows in (("train", 4), ("test", 2))}
ACTIVITIES = {"train": [5, 1, 6, 2], "test": [3, 4]}
SUBJECTS = {"train": [3, 1, 30, 1], "test": [3, 2]}
KINDS = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]


def lines(rows: Sequence[Sequence[object]]) -> bytes:
    return "".join("".join(f"  {value}" for value in row) + "\n" for row in rows).encode()


def har_members() -> dict[str, bytes]:
    members = {"UCI HAR Dataset/README.txt": b"\xff\xfe"}
    for part in ("test", "train"):
        root = f"UCI HAR Dataset/{part}"
        members[f"{root}/y_{part}.txt"] = lines([[value] for value in ACTIVITIES[part]])
        members[f"{root}/subject_{part}.txt"] = lines([[value] for value in SUBJECTS[part]])
        members[f"{root}/X_{part}.txt"] = b"561 features that nobody reads"
        for k, kind in enumerate(KINDS):
            members[f"{root}/Inertial Signals/{kind}_{part}.txt"] = lines(SIGNALS[part][:, k])
    return members


GOOD_HAR = har_members()


def write_har(folder: Path, members: Mapping[str, bytes], inner: str | zipfile.ZipInfo = har.INNER) -> Path:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, text in members.items():
            file.writestr(name, text)
    return write_zip(folder / har.NAME, {inner: content.getvalue()})


def test_har_has_windows_of_nine_channels_and_subjects_as_clients(tmp_path: Path) -> None:
    table = get("har", write_har(tmp_path, GOOD_HAR))
    assert (table.shape, table.x.dtype, table.input_spec.kind, table.classes) == ((9, 1, 128), torch.float32, "floats", 6)
    signals = np.concatenate([SIGNALS["train"], SIGNALS["test"]]).astype(np.float32)
    assert np.array_equal(table.x.numpy(), signals[:, :, None])
    assert table.y.tolist() == [4, 0, 5, 1, 2, 3]
    assert table.client_names == ("subject 1", "subject 2", "subject 3", "subject 30")
    assert table.client_ids is not None
    assert table.client_ids.tolist() == [2, 0, 3, 0, 2, 1]


def test_interleaved_har_has_the_layout_of_the_authors_code(tmp_path: Path) -> None:
    get("har", write_har(tmp_path, GOOD_HAR))
    steps = np.concatenate([SIGNALS["train"], SIGNALS["test"]]).astype(np.float32).transpose(0, 2, 1)  # (windows, 128, 9)
    channels, interleaved = find_dataset("har", {}).load(), find_dataset("har", {"layout": "interleaved"}).load()
    assert np.array_equal(channels.x.numpy(), steps.transpose(0, 2, 1)[:, :, None])
    assert np.array_equal(interleaved.x.numpy(), steps.reshape(len(steps), 9, 1, 128))
    assert (interleaved.shape, interleaved.input_spec, interleaved.y.tolist()) == (
        (9, 1, 128),
        channels.input_spec,
        channels.y.tolist(),
    )
    assert len({channels.digest, interleaved.digest}) == 2, "a run of one layout does not go on with the other"
    assert np.array_equal(find_dataset("har", {"layout": "channels"}).load().x.numpy(), channels.x.numpy()), "none is changed"
    with pytest.raises(GpflError, match=r"data\.layout is 'chanels'; it must be one of channels, interleaved; did you mean"):
        find_dataset("har", {"layout": "chanels"})


def test_overlapping_windows_of_har_are_one_recording() -> None:
    draw = np.random.default_rng(0)
    long, short, other = (draw.normal(size=(9, steps)).astype(np.float32) for steps in (64 * 6, 64 * 3, 64 * 3))
    windows = [signal[:, at : at + 128] for signal in (long, short, other) for at in range(0, signal.shape[1] - 64, 64)]
    true = np.array([0] * 5 + [1] * 2 + [2] * 2)
    people = np.array([0] * 7 + [1] * 2)
    order = draw.permutation(9)
    found = har.find_recordings(np.stack(windows)[order], people[order])
    pairs = set(zip(true[order].tolist(), found.tolist(), strict=True))
    assert len(pairs) == len(set(found.tolist())) == 3
    alike = har.find_recordings(np.stack([long[:, :128], long[:, 64:192]]), np.array([0, 1]))
    assert len(set(alike.tolist())) == 2, "of two people"
    still = har.find_recordings(np.ones((3, 9, 128), dtype=np.float32), np.zeros(3, dtype=np.int64))
    assert len(set(still.tolist())) == 1, "all overlap with all"
    fork = [np.concatenate(pair, axis=1) for pair in ((long[:, :64], long[:, 64:128]), (long[:, 64:128], short[:, :64]))]
    fork.append(np.concatenate([long[:, 64:128], other[:, :64]], axis=1))
    assert len(set(har.find_recordings(np.stack(fork), np.zeros(3, dtype=np.int64)).tolist())) == 1, "two begin alike"


def test_the_manifest_of_har_records_its_options(tmp_path: Path) -> None:
    get("har", write_har(tmp_path, GOOD_HAR))
    table = find_dataset("har", {"layout": "interleaved"}).load()
    shard = Shard("a", np.array([0, 1]), np.array([], dtype=np.int64), np.array([2]))
    Federation(table, [shard]).save(tmp_path / "split.toml")
    again = Federation.load(tmp_path / "split.toml")
    assert torch.equal(again.table.x, table.x)
    resolved = configs.resolve_config({"partition": {"name": "manifest", "file": str(tmp_path / "split.toml")}})
    assert resolved.source == find_dataset("har", {"layout": "interleaved"})
    Federation(find_dataset("har", {}).load(), [shard]).save(tmp_path / "plain.toml")
    assert "layout" not in (tmp_path / "plain.toml").read_text()


def test_har_can_be_grouped_by_recordings(tmp_path: Path) -> None:
    get("har", write_har(tmp_path, GOOD_HAR))
    windows, whole = find_dataset("har", {}).load(), find_dataset("har", {"group": "recordings"}).load()
    both = find_dataset("har", {"group": "recordings", "layout": "interleaved"}).load()
    assert windows.group_ids is None
    assert whole.group_ids is not None
    assert both.group_ids is not None
    assert len(set(whole.group_ids.tolist())) == 6, "windows of noise do not overlap"
    assert both.group_ids.tolist() == whole.group_ids.tolist(), "whatever the layout"
    assert len({windows.digest, whole.digest, both.digest}) == 3
    with pytest.raises(GpflError, match=r"data\.group is 'recording'; it must be one of windows, recordings; did you mean"):
        find_dataset("har", {"group": "recording"})


ACC = "UCI HAR Dataset/test/Inertial Signals/body_acc_y_test.txt"
Y, SUBJECT = "UCI HAR Dataset/test/y_test.txt", "UCI HAR Dataset/test/subject_test.txt"
BAD_HAR: dict[str, tuple[dict[str, bytes | None], str]] = {
    "member missing": ({ACC: None}, f"no item named '{ACC}'"),
    "extra column": ({ACC: lines(np.zeros((2, 129)))}, "size 258 into shape"),
    "missing column": ({ACC: lines(np.zeros((2, 127)))}, "size 254 into shape"),
    "a row less": ({ACC: lines(np.zeros((1, 128)))}, "size 128 into shape"),
    "a subject less": ({SUBJECT: b"1"}, "2 activities for 1 subjects"),
    "no numbers": ({ACC: b"x " * 256}, "could not convert"),
    "not UTF-8": ({ACC: b"\xff\xfe " * 256}, "could not convert"),
    "nan": ({ACC: b"nan " * 256}, "NaN"),
    "infinity": ({ACC: b"1e999 " * 256}, "NaN or infinite"),
    "activity 7": ({Y: b"1 7"}, "activity outside 1 to 6"),
    "activity 0": ({Y: b"0 1"}, "activity outside 1 to 6"),
    "activity 1.5": ({Y: b"1.5 1"}, "invalid literal"),
    "activity nan": ({Y: b"nan 1"}, "invalid literal"),
    "subject 1.5": ({SUBJECT: b"1.5 1"}, "invalid literal"),
    "empty": (dict.fromkeys((name for name in GOOD_HAR if "test" in name), b""), "activities"),
}


@pytest.mark.parametrize("bad", BAD_HAR)
def test_bad_members_of_har_are_errors(bad: str, tmp_path: Path) -> None:
    changes, pattern = BAD_HAR[bad]
    members = {name: content for name, content in {**GOOD_HAR, **changes}.items() if content is not None}
    assert_matches(error_of("har", write_har(tmp_path, members), har.NAME), pattern)


def test_har_from_another_archive_is_an_error(tmp_path: Path) -> None:
    assert_matches(
        error_of("har", write_har(tmp_path, GOOD_HAR, "../" + har.INNER), har.NAME), "no item named 'UCI HAR Dataset.zip'"
    )


def test_har_without_the_inner_zip_is_an_error(tmp_path: Path) -> None:
    write_zip(tmp_path / har.NAME, {har.INNER: b"no zip"})
    assert_matches(error_of("har", tmp_path, har.NAME), "UCI HAR Dataset.zip in .* is damaged")


def test_a_link_in_a_zip_is_not_followed(tmp_path: Path) -> None:
    write_har(tmp_path, GOOD_HAR)
    (tmp_path / har.NAME).rename(tmp_path / "target.zip")
    inner = zipfile.ZipInfo(har.INNER)
    inner.create_system, inner.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    write_zip(tmp_path / har.NAME, {inner: str(tmp_path / "target.zip").encode()})
    assert_matches(error_of("har", tmp_path, har.NAME), "UCI HAR Dataset.zip in .* is damaged")


def test_a_zip_bomb_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(har, "MAX_BYTES", 100_000)
    write_zip(tmp_path / har.NAME, {har.INNER: bytes(1 << 24)})
    assert_matches(error_of("har", tmp_path, har.NAME), "UCI HAR Dataset.zip holds more than 100,000 bytes")
    cached = tmp_path / "cache"
    for path in sorted(cached.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    cached.rmdir()
    write_har(tmp_path, {**GOOD_HAR, ACC: b"0 " * 30_000})
    monkeypatch.setattr(har, "MAX_BYTES", 50_000)
    assert_matches(error_of("har", tmp_path, har.NAME), "holds more than 50,000 bytes")


# all datasets


def test_files_with_the_published_checksums_are_verified(clothes: Path) -> None:
    files = tuple(
        dataclasses.replace(file, sha256=hashlib.sha256((clothes / file.name).read_bytes()).hexdigest())
        for file in PUBLISHED["fmnist"].files
    )
    published = dataclasses.replace(PUBLISHED["fmnist"], files=files)
    assert published.prepare(clothes).metadata["verified"] is True
    with pytest.raises(GpflError, match="is not the published file"):
        PUBLISHED["fmnist"].prepare(clothes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_file_has_an_address_a_size_and_a_checksum(name: str) -> None:
    published = PUBLISHED[name]
    assert published.licence
    assert published.size == sum(file.size for file in published.files) > 0
    for file in published.files:
        assert file.url.startswith("http")
        assert file.url.endswith(file.name)
        kind, value = file.checksum
        assert len(bytes.fromhex(value)) == hashlib.new(kind).digest_size


def assert_matches(text: str, pattern: str) -> None:
    """Checks what an error says."""
    with pytest.raises(GpflError, match=pattern):
        raise GpflError(text)
