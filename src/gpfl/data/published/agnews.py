"""AG News: short news articles of four topics."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table

URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
MAX_TOKENS = 200
CLASSES = 4
PUNCTUATION = re.compile(r"(['.,()!?])")
SEPARATORS = re.compile(r"<br />|[;:]")


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks, without quotes."""
    spaced = PUNCTUATION.sub(r" \1 ", text.lower().replace('"', ""))
    return SEPARATORS.sub(" ", spaced).split()


def build_vocabulary(texts: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the index of each word, from 1, ordered by frequency and then alphabet; 0 is padding."""
    counts = Counter(word for words in texts for word in words)
    order = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(order, start=1)}


def parse(paths: Mapping[str, Path]) -> Table:
    """Return the training and then the test articles as tokens of title and text."""
    articles = [article for name in ("train.csv", "test.csv") for article in _read_articles(paths[name])]
    texts = [tokenize(text) for _, text in articles]
    vocabulary = build_vocabulary(texts)
    x = np.zeros((len(texts), MAX_TOKENS), dtype=np.int32)
    for row, words in enumerate(texts):
        tokens = [vocabulary[word] for word in words[:MAX_TOKENS]]
        x[row, : len(tokens)] = tokens
    labels = np.array([label for label, _ in articles])
    return Table(x, labels, classes=CLASSES, name="agnews", kind="tokens", vocabulary=len(vocabulary) + 1)


def _read_articles(path: Path) -> Iterator[tuple[int, str]]:
    with archive.report_damage(path), path.open(encoding="utf-8", newline="") as file:
        for number, cells in enumerate(csv.reader(file, strict=True), start=1):
            if len(cells) != 3 or cells[0] not in ("1", "2", "3", "4"):
                raise ValueError(f"record {number} is not a class 1 to {CLASSES}, title and text")
            yield int(cells[0]) - 1, f"{cells[1]} {cells[2]}"


AGNEWS = PublishedDataset(
    name="agnews",
    description="AG News: 127,600 news articles as up to 200 words, 4 classes",
    files=(
        PublishedFile(
            "train.csv",
            URL + "train.csv",
            29_470_338,
            sha256="76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e",
        ),
        PublishedFile(
            "test.csv",
            URL + "test.csv",
            1_857_427,
            sha256="521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699",
        ),
    ),
    licence="non-commercial research",
    n_samples=127_600,
    folder_names=("ag_news", "ag-news", "ag_news_csv", "AG_NEWS", "AGNews"),
    parse=parse,
    partition={"name": "dirichlet", "clients": 20, "beta": 1.0},
    net={"name": "fasttext"},
)
