"""The user's own files: a file or folder whose clients are files, sub-folders or the values of a column."""

from gpfl.data.files.dataset import FileDataset

__all__ = ["FileDataset"]
