"""gpfl: personalised federated learning, where each client gets its own model.

Data flow: files → table → partition → federation → engine round → run → models → predict.
"""

from typing import TYPE_CHECKING

from gpfl.core.registry import lazy_attributes

if TYPE_CHECKING:
    from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
    from gpfl.core.net import Model
    from gpfl.core.options import option
    from gpfl.core.tree import Tree
    from gpfl.data import Table
    from gpfl.errors import GpflError
    from gpfl.federation import Federation, federate
    from gpfl.inference import ClientModel, load_model
    from gpfl.training.callbacks import Callback
    from gpfl.training.execute import fit, load, resume
    from gpfl.training.result import Result

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Callback",
    "ClientInfo",
    "ClientModel",
    "Federation",
    "GpflError",
    "LossTerms",
    "Method",
    "Model",
    "Phase",
    "Result",
    "Table",
    "Tree",
    "__version__",
    "federate",
    "fit",
    "load",
    "load_model",
    "option",
    "resume",
]

_MODULES = {
    **dict.fromkeys(("fit", "load", "resume"), "gpfl.training.execute"),
    "Callback": "gpfl.training.callbacks",
    "Result": "gpfl.training.result",
    **dict.fromkeys(("ClientModel", "load_model"), "gpfl.inference"),
    **dict.fromkeys(("Federation", "federate"), "gpfl.federation"),
    "Table": "gpfl.data",
    "GpflError": "gpfl.errors",
    **dict.fromkeys(("Batch", "ClientInfo", "LossTerms", "Method", "Phase"), "gpfl.core.method"),
    "Model": "gpfl.core.net",
    "option": "gpfl.core.options",
    "Tree": "gpfl.core.tree",
}

if not TYPE_CHECKING:  # mypy would take every name for an export
    __getattr__ = lazy_attributes("gpfl", _MODULES)

    def __dir__() -> list[str]:
        """Return the exported names."""
        return sorted(__all__)
