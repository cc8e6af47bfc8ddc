"""FedPer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpfl.core.method import Method


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """A shared feature extractor, and a head for each client.

    Arivazhagan et al., Federated Learning with Personalization Layers, 2019. Base and head are trained together; the base
    is averaged, the head stays. No deviation. It is also GPFL without valve and embeddings.
    """

    name: ClassVar[str] = "fedper"
    shares: ClassVar[tuple[str, ...]] = ("base",)
