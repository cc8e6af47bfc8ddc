"""The named data sets."""

from gpfl.data.digits import Digits
from gpfl.data.table import Source, Table

DATA: dict[str, Source] = {"digits": Digits()}

__all__ = ["DATA", "Source", "Table"]
