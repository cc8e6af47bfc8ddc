"""Datasets of texts: AG News, and Amazon reviews as word counts."""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpfl.data.encoders import Tokenizer, build_vocabulary, tokenize
from gpfl.data.published import archive
from gpfl.data.published.dataset import PublishedDataset
from gpfl.data.published.download import PublishedFile
from gpfl.data.table import Table

AGNEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
ARTICLE_TOKENS = 200
TOPICS = ("World", "Sports", "Business", "Sci/Tech")
ARTICLE_COLUMNS = ("title", "description")
AGNEWS_FILES = (
    ("train.csv", 29_470_338, "76a0a2d2f92b286371fe4d4044640910a04a803fdd2538e0f3f29a5c6f6b672e"),
    ("test.csv", 1_857_427, "521465c2428ed7f02f8d6db6ffdd4b5447c1c701962353eb2c40d548c3c85699"),
)


def parse_agnews(paths: Mapping[str, Path]) -> Table:
    """Return the training and then the test articles as tokens of title and text."""
    articles = [article for name in ("train.csv", "test.csv") for article in _read_articles(paths[name])]
    texts = [tokenize(text) for _, text in articles]
    tokenizer = Tokenizer(tuple(build_vocabulary(texts)), ARTICLE_TOKENS, ARTICLE_COLUMNS)
    labels = np.array([label for label, _ in articles])
    x, vocabulary = tokenizer.encode_words(texts), len(tokenizer.words) + 1
    table = Table(x, labels, classes=len(TOPICS), name="agnews", kind="tokens", vocabulary=vocabulary)
    table.encoder = tokenizer
    return table


def _read_articles(path: Path) -> Iterator[tuple[int, str]]:
    with archive.report_damage(path), path.open(encoding="utf-8", newline="") as file:
        for number, cells in enumerate(csv.reader(file, strict=True), start=1):
            if len(cells) != 3 or cells[0] not in ("1", "2", "3", "4"):
                raise ValueError(f"record {number} is not a class 1 to {len(TOPICS)}, title and text")
            yield int(cells[0]) - 1, f"{cells[1]} {cells[2]}"


AGNEWS = PublishedDataset(
    name="agnews",
    description="AG News: 127,600 news articles as up to 200 words, 4 classes",
    files=tuple(PublishedFile(name, AGNEWS_URL + name, size, sha256=sha256) for name, size, sha256 in AGNEWS_FILES),
    licence="non-commercial research",
    n_samples=127_600,
    class_names=TOPICS,
    folder_names=("ag_news", "ag-news", "ag_news_csv", "AG_NEWS", "AGNews"),
    parse=parse_agnews,
    partition={"name": "dirichlet", "clients": 20, "beta": 1.0},
    net={"name": "fasttext"},
)

AMAZON_URL = "https://raw.githubusercontent.com/GRAAL-Research/domain_adversarial_neural_network/master/data/"
PRODUCTS = ("books", "dvd", "electronics", "kitchen")
AMAZON_WORDS = 5000
AMAZON_FILES = (
    ("books_train", 1_134_070, "317f9a2ec34b81de770b63a84d8c5cc2dc16bd0be6e079d2ff5b5bad5213ea19"),
    ("books_test", 2_426_071, "fe4605c7dcf0e0a9410fd2a32f247caaf9abb352cc6e4c3e0f400853163ad9c4"),
    ("dvd_train", 1_133_356, "95f602aa08bf6b55758f7b0b18df3882fe30acb11987ee60b6b4bb3c44cba733"),
    ("dvd_test", 2_039_832, "4fe1b1a15010f78d8d0c49fe362d35fd4677463a45f1ac02a9f410ae1e638060"),
    ("electronics_train", 872_265, "7d0061f03ff3827e4f8036b051b5e5828fddc0cd115aa5b212cd28d624dc14e4"),
    ("electronics_test", 2_461_224, "641783bc941839c3a111d3488a1b7e3bd820a61ec14a129e7429b47703aa961d"),
    ("kitchen_train", 771_076, "a70b5ebfe1413e0e16280360905f5c3b64389c435cd20c0165dc9d7f293b31b5"),
    ("kitchen_test", 2_280_620, "e1502b97a824eb12314be4447394fa736fecb781c0724e6529cd6733ac7ff6d8"),
)


def parse_amazon(paths: Mapping[str, Path]) -> Table:
    """Return all reviews, domain by domain and training before test; label 1 is a positive review."""
    x, y, domains = [], [], []
    for domain, name in enumerate(PRODUCTS):
        for split in ("train", "test"):
            counts, labels = _read_svmlight(paths[f"{name}_{split}.svmlight"])
            x.append(counts)
            y.append(labels)
            domains.append(np.full(len(labels), domain))
    return Table(
        np.concatenate(x),
        np.concatenate(y),
        classes=2,
        name="amazon",
        kind="counts",
        client_ids=np.concatenate(domains),
        client_names=PRODUCTS,
    )


def _read_svmlight(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return counts (reviews, words) and labels, 1 for positive reviews."""
    from sklearn.datasets import load_svmlight_file

    with archive.report_damage(path):
        counts, labels = load_svmlight_file(path, n_features=AMAZON_WORDS, zero_based=True)
        if not np.isin(labels, (-1, 1)).all() or not np.isin(counts.data, range(256)).all():
            raise ValueError("a label is not ±1 or a count is not an integer from 0 to 255")
    return counts.astype(np.uint8).toarray(), (labels > 0).astype(np.int64)


AMAZON = PublishedDataset(
    name="amazon",
    description="Amazon Review: 27,677 reviews as counts of 5,000 words, good or bad, 4 domains",
    files=tuple(
        PublishedFile(f"{name}.svmlight", f"{AMAZON_URL}{name}.svmlight", size, sha256=sha256)
        for name, size, sha256 in AMAZON_FILES
    ),
    licence="none stated; cite Blitzer et al. 2007",
    n_samples=27_677,
    class_names=("negative", "positive"),
    folder_names=("amazon_review", "amazon-review", "amazon_reviews", "AmazonReview"),
    parse=parse_amazon,
    partition={"name": "natural"},
    net={"name": "mlp", "hidden": [1000, 500, 100]},
)
