"""GPFL, with equation numbers of the paper."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method, loss_gradient
from gpfl.core.net import Model, Net
from gpfl.core.options import BY_NET, SearchRange, option
from gpfl.core.randomness import fork_rng, torch_generator
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.methods.factored_valve import apply_factored, build_valve, decay_scale, encode_valve, factor_valve, factored_norm

GUIDANCE = ("cov", "gce")
"""V and C, the parts of the global guidance, to which μ applies."""

VALVE_PARAMETERS = ("linear.weight", "linear.bias", "norm.weight", "norm.bias")


@dataclass(frozen=True, kw_only=True)
class GPFL(Method):
    """Category embeddings guide the features globally while each client learns its own task.

    Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized Federated
    Learning, ICCV 2023. Shared: the feature extractor φ ("base"), the conditional valve with weights V ("cov") and the
    category embeddings C ("gce"). Private: the head ψ. With features f = φ(x), the global and personal features
    f^G = CoV(f, g) and f^P = CoV(f, p_i), and Ĉ, the embeddings as received:

        L = CE(ψ(f^P), y) + CE(cos(f^G, C), y) + λ‖f^G − Ĉ_y‖ + μ(‖V‖ + ‖C‖)

    Deviations from the paper, each an option: p_i is not divided by the number of classes again (`p_scale`), the magnitude
    term is one norm over the batch (`mlg_norm`) and μ is weight decay (`reg`). The published λ and μ belong to these forms.
    """

    name = "gpfl"
    shares = ("base", "cov", "gce")

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
        "form in which bytes of V are counted: 'full', or 'factors', smaller and lossless, which contain p_i",
        choices=("full", "factors"),
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
        """Return the method bound to a net; all that differs from the paper's method is in `gpfl_variants`."""
        from gpfl.methods.gpfl_variants import select_variant  # imports this module

        return select_variant(super().bind(net, lr=lr, epochs=epochs, batch_norm=batch_norm))

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return φ and ψ from the net, V as torch initialises it, and C from N(0, 1)."""
        state, width = self.net.init(seed), self.net.width
        state["cov"] = init_valve(width, seed)
        state["gce"] = {"weight": torch.randn(self.net.classes, width, generator=torch_generator(seed, "embeddings"))}
        return self.split_state(state)

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return φ, V and C as received, the client's ψ, and the contexts of the round."""
        state: Tree = {**shared, **private, "context": self.contexts(shared, private, client)}
        if not self.uses_factored_valve:
            return state
        cov, valve = factor_valve(tree.branch(state, "cov"), tree.branch(state, "context"), with_norm=self.reg == "norm")
        return {**state, "cov": cov, "valve": valve}

    @property
    def uses_factored_valve(self) -> bool:
        """Whether a local round trains the valve in its factored form."""
        return self.valve != "full" and "cov" not in self.without

    @property
    def sends_factors(self) -> bool:
        """Whether uploads of V are counted as factors."""
        return self.valve_upload == "factors" and self.uses_factored_valve and "cov" in self.shared_parts

    @property
    def n_trained_contexts(self) -> int:
        """Number of the contexts, g first, along which V moves."""
        return 2 if self.valve_gradient == "both" else 1

    def contexts(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return g (eq. 5) and p_i (eq. 7), constants of a round."""
        embeddings = embeddings_of(shared)  # Ĉ, (classes, width)
        p = self.class_weights(private, client) @ embeddings
        return {"g": embeddings.mean(0), "p": p / len(embeddings) if self.p_scale == "mean" else p}

    def class_weights(self, private: Tree, client: ClientInfo) -> Tensor:
        """Return α (eq. 6), (classes,)."""
        return client.label_counts / client.label_counts.sum()

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train all parts together, with weight decay on V and C alone."""
        decay = dict.fromkeys(GUIDANCE, self.mu) if self.reg == "wd" else None
        parts = (*NET_PARTS, *GUIDANCE)
        state, terms, _ = self.optimizer_step(shared, local_state, batch, client, parts=parts, weight_decay=decay)
        if "valve" not in local_state:
            return state, terms
        if self._setup.gradient is not loss_gradient:
            raise GpflError("method.valve is 'factored', but clipping per example needs gradients of V: use 'auto' or 'full'")
        cov, valve = tree.branch(local_state, "cov"), tree.branch(local_state, "valve")
        rate = self.mu if self.reg == "wd" else self.mu / factored_norm(cov, valve)
        return {**state, "valve": decay_scale(valve, rate, self.lr)}, terms

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Return L^P (eq. 10), L^alg (eq. 8), λL^mlg (eq. 9) and, if it is a norm, the μ term (eq. 11)."""
        f = model("base", batch.x)  # (batch, width)
        routes = self.routes(model, f)
        terms = {
            "ce": batch.cross_entropy(model("head", routes["p"])),
            **self.guidance_loss(model, routes["g"], shared, batch),
        }
        if self.reg == "norm":
            terms |= {f"norm_{part}": self.mu * self.norm(model, part) for part in GUIDANCE if part in model.weights}
        return terms

    def norm(self, model: Model, part: str) -> Tensor:
        """Return the L2 norm of V or C."""
        if part == "cov" and "valve" in model.weights:
            return factored_norm(model["cov"], model["valve"])
        return tree.norm(model[part])

    def guidance_loss(self, model: Model, f_global: Tensor, shared: Tree, batch: Batch) -> LossTerms:
        """Return the angle-level term L^alg (eq. 8) and the magnitude-level term λL^mlg (eq. 9)."""
        angles = cosine_logits(f_global, embeddings_of(model.weights))  # (batch, classes)
        received = embeddings_of(shared)[batch.y]  # Ĉ_y, (batch, width)
        distance = batch_distance if self.mlg_norm == "batch" else mean_distance
        return {
            "angle": batch.cross_entropy(angles),
            "magnitude": self.lam * distance(f_global, received, batch),
        }

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return φ, V and C for the server, and ψ."""
        state = tree.drop(local_state, ("context", "valve"))
        if "valve" in local_state:
            cov, valve, context = (tree.branch(local_state, part) for part in ("cov", "valve", "context"))
            code = encode_valve(cov, valve, context, self.n_trained_contexts)
            state["cov"] = build_valve(tree.branch({**private, **shared}, "cov"), code)
        return self.split_state(state)

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Return the weights of the personal route: φ, V, ψ, and p_i as a constant."""
        weights = tree.pick({**shared, **private}, ("base", "cov", "head", "batch_norm_stats"))
        return {**weights, "context": tree.pick(self.contexts(shared, private, client), ("p",))}

    def features(self, model: Model, x: Tensor) -> Tensor:
        """Return f^P, (batch, width)."""
        return self.routes(model, model("base", x))["p"]

    def routes(self, model: Model, f: Tensor) -> dict[str, Tensor]:
        """Return the valve's output for each context: "g" and "p" in training, "p" alone in a personal model."""
        if "valve" in model.weights:
            return apply_factored(model["cov"], model["valve"], f)
        return {name: valve(model["cov"], f, context) for name, context in tree.flatten(model["context"]).items()}


def valve(weights: Tree, f: Tensor, context: Tensor) -> Tensor:
    """Return CoV(f, c) = ReLU((γ(c) + 1) ⊙ f + β(c)) (eqs. 3 and 4)."""

    def branch(name: str) -> Tensor:
        w, b, gain, shift = (tree.leaf(weights, f"{name}.{parameter}") for parameter in VALVE_PARAMETERS)
        hidden = F.relu(F.linear(context, w, b))
        return F.layer_norm(hidden, hidden.shape[-1:], gain, shift)  # (width,)

    return F.relu((branch("gamma") + 1) * f + branch("beta"))  # (batch, width)


def init_valve(width: int, seed: int) -> Tree:
    """Return the weights of γ and β, each Linear → ReLU → LayerNorm, as torch initialises them."""
    with fork_rng(seed, "valve"):
        branches = {name: {"linear": nn.Linear(width, width), "norm": nn.LayerNorm(width)} for name in ("gamma", "beta")}
    layers = nn.ModuleDict({name: nn.ModuleDict(branch) for name, branch in branches.items()})
    return {name: value.detach() for name, value in layers.named_parameters()}


def embeddings_of(state: Tree) -> Tensor:
    """Return the category embeddings C of a state, (classes, width)."""
    return tree.leaf(tree.branch(state, "gce"), "weight")


def cosine_logits(features: Tensor, embeddings: Tensor) -> Tensor:
    """Return the cosine similarity of features and embeddings, (batch, classes); 0 for an all-zero feature."""
    f = F.normalize(features, dim=-1, eps=1e-12)  # (batch, width)
    c = F.normalize(embeddings, dim=-1, eps=1e-12)  # (classes, width)
    return f @ c.T


def batch_distance(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """Return the Frobenius norm of `a - b` (batch, width); its gradient at 0 is 0, not NaN."""
    distance: Tensor = torch.linalg.vector_norm((a - b) * batch.mask.unsqueeze(-1))
    return distance


def mean_distance(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """Return the mean L2 distance between the rows of `a` and `b` (batch, width)."""
    return batch.mean(torch.linalg.vector_norm(a - b, dim=-1))
