"""The methods, one file each. A new one is a file here, a line in METHODS and a page in docs/methods."""

from gpfl.method import Method
from gpfl.methods.fedavg import FedAvg
from gpfl.methods.gpfl import GPFL
from gpfl.methods.local import Local

METHODS: dict[str, type[Method]] = {method.name: method for method in (GPFL, FedAvg, Local)}
