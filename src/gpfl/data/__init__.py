"""Datasets: tables, the published datasets and the user's own files."""

from typing import TYPE_CHECKING

from gpfl.core.registry import Registry, lazy_attributes

if TYPE_CHECKING:
    from gpfl.data.files import FileDataset as FileDataset
    from gpfl.data.find import find_dataset as find_dataset
    from gpfl.data.published.dataset import PublishedDataset as PublishedDataset
    from gpfl.data.table import DataSource as DataSource
    from gpfl.data.table import Table as Table

_PUBLISHED = {
    "fmnist": "published.images:FMNIST",
    "cifar100": "published.images:CIFAR100",
    "tiny": "published.images:TINY",
    "agnews": "published.texts:AGNEWS",
    "amazon": "published.texts:AMAZON",
    "har": "published.har:HAR",
    "heart": "published.heart:HEART",
}

PUBLISHED: Registry["PublishedDataset"] = Registry("gpfl.data", _PUBLISHED)
"""The paper's six datasets, and heart disease from four hospitals."""

DATASETS: Registry["DataSource"] = Registry("gpfl.data", {"digits": "published.images:DIGITS", **_PUBLISHED})

FILES = "files"  # name under which the options of the user's own files are listed

if not TYPE_CHECKING:
    __getattr__ = lazy_attributes(
        "gpfl.data",
        {
            "FileDataset": "gpfl.data.files",
            "find_dataset": "gpfl.data.find",
            "PublishedDataset": "gpfl.data.published.dataset",
            **dict.fromkeys(("DataSource", "Table"), "gpfl.data.table"),
        },
    )
