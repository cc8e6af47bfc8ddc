"""FedPer."""

from dataclasses import dataclass

from gpfl.core.method import Method


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """A shared feature extractor and a personal head for each client.

    Arivazhagan et al., Federated Learning with Personalization Layers, 2019. Base φ and head ψ_i are trained together; the
    server averages the base:

        L = CE(ψ_i(φ(x)), y)

    No deviation from the paper. It equals GPFL without valve and embeddings.
    """

    name = "fedper"
    shares = ("base",)
