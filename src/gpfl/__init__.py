"""gpfl: personalised federated learning, each client with a model of its own."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpfl.data import Table
    from gpfl.errors import GpflError
    from gpfl.federation.federation import Federation, federate
    from gpfl.training.api import fit, load, load_model, resume
    from gpfl.training.result import ClientModel, Result

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

HOMES = {
    **dict.fromkeys(("fit", "load", "load_model", "resume"), "gpfl.training.api"),
    "Table": "gpfl.data",
    "GpflError": "gpfl.errors",
    **dict.fromkeys(("Federation", "federate"), "gpfl.federation.federation"),
    **dict.fromkeys(("ClientModel", "Result"), "gpfl.training.result"),
}
"""The module of each name that is exported."""

if not TYPE_CHECKING:  # a name that is not exported is a mistake to mypy

    def __getattr__(name: str) -> object:
        """Gives an exported name or a module, imported when it is first asked for.

        So the command listens to Ctrl-C before torch is here.
        """
        if name in HOMES:
            value: object = getattr(import_module(HOMES[name]), name)
        elif not name.startswith("_") and find_spec(f"gpfl.{name}"):
            value = import_module(f"gpfl.{name}")
        else:
            raise AttributeError(f"module 'gpfl' has no attribute '{name}'")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Gives the names that are exported."""
        return sorted(__all__)
