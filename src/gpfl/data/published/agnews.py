"""AG News: short news articles of four topics."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table
from gpfl.data.text import Tokenizer, build_vocabulary, tokenize

URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
MAX_TOKENS = 200
CLASSES = ("World", "Sports", "Business", "Sci/Tech")
COLUMNS = ("title", "description")


def parse(paths: Mapping[str, Path]) -> Table:
    """Return the training and then the test articles as tokens of title and text."""
    articles = [article for name in ("train.csv", "test.csv") for article in _read_articles(paths[name])]
    texts = [tokenize(text) for _, text in articles]
    tokenizer = Tokenizer(tuple(build_vocabulary(texts)), MAX_TOKENS, COLUMNS)
    labels = np.array([label for label, _ in articles])
    x, vocabulary = tokenizer.encode_words(texts), len(tokenizer.words) + 1
    table = Table(x, labels, classes=len(CLASSES), name="agnews", kind="tokens", vocabulary=vocabulary)
    table.encoder = tokenizer
    return table


def _read_articles(path: Path) -> Iterator[tuple[int, str]]:
    with archive.report_damage(path), path.open(encoding="utf-8", newline="") as file:
        for number, cells in enumerate(csv.reader(file, strict=True), start=1):
            if len(cells) != 3 or cells[0] not in ("1", "2", "3", "4"):
                raise ValueError(f"record {number} is not a class 1 to {len(CLASSES)}, title and text")
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
    class_names=CLASSES,
    folder_names=("ag_news", "ag-news", "ag_news_csv", "AG_NEWS", "AGNews"),
    parse=parse,
    partition={"name": "dirichlet", "clients": 20, "beta": 1.0},
    net={"name": "fasttext"},
)
