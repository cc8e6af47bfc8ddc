"""The user's own files: a file or folder whose clients are files, sub-folders or the values of a column."""

from gpfl.data.files.dataset import FileDataset
from gpfl.data.files.new_rows import NewData, NewRows, read_new_rows

__all__ = ["FileDataset", "NewData", "NewRows", "read_new_rows"]
