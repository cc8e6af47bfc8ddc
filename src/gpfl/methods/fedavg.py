"""FedAvg."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpfl.core.method import Method


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """One model for all: clients train it on their rows, the server averages what they send.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017. No deviation.
    Every client is evaluated with the global model.
    """

    name: ClassVar[str] = "fedavg"
