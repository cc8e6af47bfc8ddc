"""gpfl: personalised federated learning, each client with a model of its own."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

HOMES = {
    **dict.fromkeys(("fit", "load", "load_model", "resume"), "gpfl.api"),
    "Table": "gpfl.data",
    "GpflError": "gpfl.errors",
    **dict.fromkeys(("Federation", "federate"), "gpfl.federation"),
    **dict.fromkeys(("ClientModel", "Result"), "gpfl.result"),
}
"""The module of each name that is exported."""

if not TYPE_CHECKING:  # a name that is not exported is a mistake to mypy

    def __getattr__(name: str) -> object:
        """Gives an exported name, imported when it is first asked for: the command listens to Ctrl-C before torch is here."""
        if name not in HOMES:
            raise AttributeError(f"module 'gpfl' has no attribute '{name}'")
        value = getattr(import_module(HOMES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Gives the names that are exported, and those that are there."""
        return sorted({*__all__, *globals()})
