"""The options of GPFL and its variants."""

from dataclasses import dataclass
from typing import Self

from gpfl.core.method import Method
from gpfl.core.net import Net
from gpfl.core.options import BY_NET, SearchRange, option


@dataclass(frozen=True, kw_only=True)
class GPFLOptions(Method):
    """The options of GPFL; `bind` returns the class that implements those chosen."""

    lam: float = option(
        BY_NET,
        "weight of the magnitude-level guidance",
        symbol="λ",
        min=0.0,
        search=SearchRange(1e-4, 0.1),
        by_net={"resnet18": 1e-4, "fasttext": 1e-4, "*": 0.01},
    )
    mu: float = option(
        BY_NET,
        "decay of the valve and the embeddings",
        symbol="μ",
        typical="0 to 1",
        min=0.0,
        search=SearchRange(1e-4, 1),
        by_net={"resnet18": 0.0, "fasttext": 0.0, "harcnn": 1.0, "*": 0.1},
    )
    p_scale: str = option(
        "sum",
        "personal context p_i: 'sum' = Σ_u α_u Ĉ_u (authors' code), 'mean' = the same divided by U (paper)",
        choices=("sum", "mean"),
    )
    cond_source: str = option(
        "global",
        "embeddings of the contexts: 'global' = as received (paper), 'stale_local' = as last trained here (authors' code)",
        choices=("global", "stale_local"),
    )
    mlg_norm: str = option(
        "batch",
        "magnitude term: 'batch' = one norm over the batch (authors' code), 'sample_mean' = sample mean (paper; use λ·√B)",
        choices=("batch", "sample_mean"),
    )
    reg: str = option(
        "wd", "μ term: 'wd' = weight decay (authors' code), 'norm' = μ(‖V‖₂ + ‖C‖₂) (paper)", choices=("wd", "norm")
    )
    without: tuple[str, ...] = option(
        (),
        "ablations: 'pci' = constant contexts, 'cov' = no valve, 'mlg' = no magnitude term, 'gce' = no embeddings; "
        "'cov,gce' is FedPer",
        choices=("pci", "cov", "mlg", "gce"),
    )
    valve: str = option(
        "auto",
        "how a round trains V: 'factored' = as a low-rank change, 'full' = entry by entry, 'auto' = factored unless a "
        "defence needs the gradients of V; results are equal up to rounding",
        choices=("auto", "factored", "full"),
        omit_default=True,
    )
    valve_upload: str = option(
        "full",
        "form of V in uploads: 'full', 'low_rank' = its change in U columns per layer, which can be averaged, or 'factors' = "
        "sent as 'full', with the bytes of A, B, g and p_i counted",
        choices=("full", "low_rank", "factors"),
        omit_default=True,
    )
    valve_gradient: str = option(
        "both",
        "routes that train V: 'both' (paper), or 'global' alone, so that uploads of V do not reveal label counts",
        choices=("both", "global"),
        omit_default=True,
    )
    guidance: str = option(
        "features",
        "what the guidance losses train: 'features' = φ, V and C (paper), or 'embeddings' = C alone",
        choices=("features", "embeddings"),
        omit_default=True,
    )
    share_valve: bool = option(True, "whether V is averaged (paper), or stays with the client", omit_default=True)
    alpha_levels: int = option(
        0, "round the class weights α behind p_i up to multiples of 1/levels; 0 = exact (paper)", min=0, omit_default=True
    )
    alpha_noise: float = option(
        0.0, "standard deviation of a client's fixed noise on the class weights α behind p_i", min=0, omit_default=True
    )

    def bind(self, net: Net, *, lr: float, epochs: int, batch_norm: str = "local") -> Self:
        """Return the method bound to a net: a `GPFL`, `FactoredGPFL` or `GPFLVariant`."""
        from gpfl.methods.gpfl_variants import select_class  # imports this module

        return select_class(super().bind(net, lr=lr, epochs=epochs, batch_norm=batch_norm))
