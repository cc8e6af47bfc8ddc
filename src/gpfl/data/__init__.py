"""The named data sets."""

from gpfl.data.agnews import AGNEWS
from gpfl.data.amazon import AMAZON
from gpfl.data.cifar100 import CIFAR100
from gpfl.data.digits import Digits
from gpfl.data.fmnist import FMNIST
from gpfl.data.har import HAR
from gpfl.data.published import Published
from gpfl.data.table import Source, Table
from gpfl.data.tiny import TINY

PUBLISHED: dict[str, Published] = {source.name: source for source in (FMNIST, CIFAR100, TINY, AGNEWS, AMAZON, HAR)}
"""The six of the paper, which lie with their publishers."""

DATA: dict[str, Source] = {"digits": Digits(), **PUBLISHED}

__all__ = ["DATA", "PUBLISHED", "Published", "Source", "Table"]
