"""AG News: short news articles of four kinds."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gpfl.data.published.cache import Parsed
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.errors import GpflError

HOST = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
LENGTH = 200
CLASSES = 4
SPACED = re.compile(r"(['.,()!?])")
TO_SPACE = re.compile(r"<br />|[;:]")


def tokenize(text: str) -> list[str]:
    """Gives the words of a text: lower case, quotes dropped, common marks as words of their own."""
    spaced = SPACED.sub(r" \1 ", text.lower().replace('"', ""))
    return TO_SPACE.sub(" ", spaced).split()


def number_words(texts: Sequence[Sequence[str]]) -> dict[str, int]:
    """Gives every word a number from 1: the most frequent first, equals in the order of the alphabet."""
    counts = Counter(word for words in texts for word in words)
    order = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(order, start=1)}


def parse(paths: Mapping[str, Path]) -> Parsed:
    """Gives training and test articles, in this order, as numbers of words: title and text, cut or padded to 200."""
    articles = [article for name in ("train.csv", "test.csv") for article in read_articles(paths[name])]
    texts = [tokenize(text) for _, text in articles]
    numbers = number_words(texts)
    x = np.zeros((len(texts), LENGTH), dtype=np.int32)
    for row, words in enumerate(texts):
        known = [numbers[word] for word in words[:LENGTH]]
        x[row, : len(known)] = known
    labels = np.array([label for label, _ in articles])
    return Parsed(x, labels, CLASSES, kind="tokens", vocabulary=len(numbers) + 1)


def read_articles(path: Path) -> Iterator[tuple[int, str]]:
    """Gives the class and the text of every line: quoted class (1 to 4), title and description."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, cells in enumerate(csv.reader(file, strict=True), start=1):
                if len(cells) != 3 or cells[0] not in ("1", "2", "3", "4"):
                    raise GpflError(f"{path} has no class 1 to {CLASSES}, title and text in record {number}: get it again")
                yield int(cells[0]) - 1, f"{cells[1]} {cells[2]}"
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise GpflError(f"{path} is not the CSV file it should be ({problem}): get it again") from None


AGNEWS = PublishedDataset(
    name="agnews",
    description="AG News: 127,600 news articles as up to 200 words, 4 classes",
    files=(
        PublishedFile(
            "train.csv",
            HOST + "train.csv",
            29_470_338,
            sha256="76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
        ),
        PublishedFile(
            "test.csv",
            HOST + "test.csv",
            1_857_427,
            sha256="521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
        ),
    ),
    licence="non-commercial research",
    rows=127_600,
    folders=("ag_news", "ag-news", "ag_news_csv", "AG_NEWS", "AGNews"),
    parse=parse,
    settings={
        "partition": {"name": "dirichlet", "clients": 20, "beta": 1.0},
        "net": {"name": "fasttext"},
        "train": {"rounds": 2000, "patience": 100},
    },
)
