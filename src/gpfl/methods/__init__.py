"""The methods, one file each. A new one is a file here, a line in METHODS and a page in docs/methods.

`gpfl.py` is the paper's method, with its options in `gpfl_options.py`, the form that runs train in `factored_valve.py`, and
ablations and variants in `gpfl_variants.py`.
"""

from typing import TYPE_CHECKING

from gpfl.core.registry import Registry

if TYPE_CHECKING:
    from gpfl.core.method import Method

METHODS: Registry[type["Method"]] = Registry(
    "gpfl.methods",
    {
        "gpfl": "gpfl:GPFL",
        "fedavg": "fedavg:FedAvg",
        "fedprox": "fedprox:FedProx",
        "perfedavg": "perfedavg:PerFedAvg",
        "pfedme": "pfedme:PFedMe",
        "ditto": "ditto:Ditto",
        "fedper": "fedper:FedPer",
        "fedrep": "fedrep:FedRep",
        "fedrod": "fedrod:FedRoD",
        "fedphp": "fedphp:FedPHP",
        "fedproto": "fedproto:FedProto",
        "local": "local:Local",
        "fedavg-ft": "fedavg_ft:FedAvgFT",
    },
)
"""GPFL, its ten baselines in the order of the paper, local training, and FedAvg with fine-tuning."""
