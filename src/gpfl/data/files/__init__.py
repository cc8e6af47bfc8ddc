"""A person's own data: a file or folder, whose clients are files, sub-folders or the values of a column."""

from gpfl.data.files.dataset import Own

__all__ = ["Own"]
