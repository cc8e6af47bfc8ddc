"""gpfl: personalised federated learning, each client with a model of its own."""

from gpfl.api import fit, load, load_model, resume
from gpfl.data import Table
from gpfl.errors import GpflError
from gpfl.federation import Federation, federate
from gpfl.result import ClientModel, Result

__version__ = "0.1.0"

__all__ = [
    "ClientModel",
    "Federation",
    "GpflError",
    "Result",
    "Table",
    "__version__",
    "federate",
    "fit",
    "load",
    "load_model",
    "resume",
]
