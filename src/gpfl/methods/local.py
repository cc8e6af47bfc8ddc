"""Training alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpfl.core.method import Method


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Every client trains its own model from the common start; nothing is sent.

    Not a method of the paper: it is the measure of what exchange is worth on a federation.
    """

    name: ClassVar[str] = "local"
    shares: ClassVar[tuple[str, ...]] = ()
