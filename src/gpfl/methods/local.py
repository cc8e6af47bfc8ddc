"""Local training."""

from dataclasses import dataclass

from gpfl.core.method import Method


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Every client trains its own model; nothing is exchanged.

    Not a method of the paper, but the baseline that shows whether federation helps.

        L = CE(w_i)
    """

    name = "local"
    shares = ()
