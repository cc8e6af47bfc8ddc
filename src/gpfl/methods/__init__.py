"""The methods, one file each. A new one is a file here, a line in METHODS and a page in docs/methods."""

from gpfl.core.method import Method
from gpfl.methods.ditto import Ditto
from gpfl.methods.fedavg import FedAvg
from gpfl.methods.fedavg_ft import FedAvgFT
from gpfl.methods.fedper import FedPer
from gpfl.methods.fedphp import FedPHP
from gpfl.methods.fedproto import FedProto
from gpfl.methods.fedprox import FedProx
from gpfl.methods.fedrep import FedRep
from gpfl.methods.fedrod import FedRoD
from gpfl.methods.gpfl import GPFL
from gpfl.methods.local import Local
from gpfl.methods.perfedavg import PerFedAvg
from gpfl.methods.pfedme import PFedMe

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (GPFL, FedAvg, FedProx, PerFedAvg, PFedMe, Ditto, FedPer, FedRep, FedRoD, FedPHP, FedProto, Local, FedAvgFT)
}
"""GPFL, its ten baselines in the order of the paper, local training, and FedAvg with fine-tuning."""
