"""GPFL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpfl.core import losses, tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model
from gpfl.core.options import BY_NET, SearchRange, option
from gpfl.core.randomness import fork_rng, torch_generator
from gpfl.core.tree import Tree

CONSTANTS_SEED = 0
"""The seed of the constant contexts of the ablations: the same in every run and on every client."""


@dataclass(frozen=True, kw_only=True)
class GPFL(Method):
    """Features guided globally by category embeddings while each client learns its own task.

    Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized Federated
    Learning, ICCV 2023. Shared: the feature extractor φ ("base"), the conditional valve CoV ("cov") and the
    category embeddings GCE ("gce"); private: the head ψ. The valve turns features f into two routes, f^G under the
    global context g and f^P under the personal context p_i:

        L = CE(ψ(f^P), y) + CE(cos(f^G, C), y) + λ‖f^G − Ĉ_y‖ + μ(‖V‖ + ‖C‖),  Ĉ = C as received

    Deviations, each an option: p_i is not divided by U again (`p_scale`), the magnitude term is one norm over the batch
    (`mlg_norm`) and μ is weight decay (`reg`), because the published λ and μ belong to these forms.
    """

    name: ClassVar[str] = "gpfl"
    shares: ClassVar[tuple[str, ...]] = ("base", "cov", "gce")
    lam: float = option(
        BY_NET,
        "weight of the magnitude-level guidance",
        symbol="λ",
        typical="1e-4 to 0.1",
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
        "embeddings behind g and p_i: 'global' = as received (paper), 'stale_local' = the client's own before (authors' code)",
        choices=("global", "stale_local"),
    )
    mlg_norm: str = option(
        "batch",
        "magnitude term: 'batch' = one Frobenius norm (authors' code), 'sample_mean' = mean of row norms (paper; wants λ·√B)",
        choices=("batch", "sample_mean"),
    )
    reg: str = option(
        "wd", "μ term: 'wd' = weight decay (authors' code), 'norm' = μ(‖V‖₂ + ‖C‖₂) (paper)", choices=("wd", "norm")
    )
    without: tuple[str, ...] = option(
        (),
        "ablations: 'pci' = constant contexts, 'cov' = no valve, 'mlg' = no magnitude loss, 'gce' = no embeddings; "
        "'cov,gce' is FedPer",
        choices=("pci", "cov", "mlg", "gce"),
    )

    # What there is of it: the ablations leave parts out.

    @property
    def guidance(self) -> tuple[str, ...]:
        """V and C, as far as they are there."""
        return tuple(part for part in ("cov", "gce") if part not in self.without)

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """φ, V and C; stale contexts also need the embeddings of the round before."""
        parts = tuple(part for part in super().shared_parts if part not in self.without)
        return (*parts, "before") if self.stale else parts

    @property
    def constant(self) -> bool:
        """Tells whether contexts are constants: p_i cannot be formed without embeddings."""
        return "pci" in self.without or "gce" in self.without

    @property
    def stale(self) -> bool:
        """Tells whether contexts come from the client's own embeddings."""
        return self.cond_source == "stale_local" and "cov" not in self.without and not self.constant

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Gives the net's parts, a valve as torch initialises it, and embeddings from N(0, 1)."""
        state = self.net.init(seed)
        embeddings = torch.randn(self.net.classes, self.net.width, generator=torch_generator(seed, "embeddings"))
        state["cov"], state["gce"] = new_valve(self.net.width, seed), {"weight": embeddings}
        if self.stale:
            state["before"] = {"weight": embeddings.clone()}
            state["stale"] = {"weight": torch.zeros_like(embeddings), "round": torch.zeros(())}
        if self.constant and "cov" not in self.without:
            state["constants"] = {**constants(self.net.width)}
        return self.split_state(tree.drop(state, self.without))

    # A client's round.

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Gives received φ, V, C, own ψ, and the contexts of the round."""
        return {**shared, **private, "context": self.contexts(shared, private, client)}

    def loss(self, model: Model, shared: Tree, batch: Batch, client: ClientInfo) -> LossTerms:
        """Gives L^P (eq. 10), L^alg (eq. 8), λL^mlg (eq. 9) and, under `reg="norm"`, the μ term (eq. 11)."""
        f = model("base", batch.x)  # (rows, width)
        personal = model("head", self.route(model, f, "p"))
        terms = {"ce": losses.cross_entropy(personal, batch.y, batch.mask)}
        if "gce" not in self.without:
            f_global = self.route(model, f, "g")
            angles = losses.cosine_logits(f_global, embeddings_of(model.weights))  # (rows, classes)
            terms["angle"] = losses.cross_entropy(angles, batch.y, batch.mask)
            if "mlg" not in self.without:
                distance = losses.batch_distance if self.mlg_norm == "batch" else losses.mean_distance
                frozen = embeddings_of(shared)  # Ĉ, (classes, width)
                terms["magnitude"] = self.lam * distance(f_global, frozen[batch.y], batch.mask)
        if self.reg == "norm":
            terms |= {f"norm_{part}": self.mu * norm(model[part]) for part in self.guidance}
        return terms

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Gives all parts moved together, decay on the valve and the embeddings alone."""
        parts = (*NET_PARTS, *self.guidance)
        decay = dict.fromkeys(self.guidance, self.mu) if self.reg == "wd" else None
        local_state, terms, _ = self.optimizer_step(shared, local_state, batch, client, parts=parts, weight_decay=decay)
        return local_state, terms

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Gives φ, V and C to the server; the head stays."""
        sent, kept = self.split_state(tree.drop(local_state, ("context",)))
        if self.stale:
            kept["stale"] = {"weight": embeddings_of(local_state), "round": client.round + 1}
            sent = tree.drop(sent, ("before",))
        return sent, kept

    def aggregate(self, shared: Tree, mean: Tree) -> Tree:
        """Gives the means of φ, V and C."""
        return {**mean, "before": {"weight": embeddings_of(shared)}} if self.stale else mean

    # The client's model.

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Gives the personal route: received φ and V, own ψ, and p_i as a constant."""
        own = tree.pick({**shared, **private}, ("base", "cov", "head", "batch_norm_stats"))
        context = self.contexts(shared, private, client)
        return {**own, "context": tree.pick(context, ("p",))}

    def features(self, model: Model, x: Tensor) -> Tensor:
        """Gives f^P."""
        return self.route(model, model("base", x), "p")

    def route(self, model: Model, f: Tensor, context: str) -> Tensor:
        """Gives features through the valve under a context; without a valve they pass as they are."""
        return f if "cov" in self.without else valve(model["cov"], f, tree.leaf(model["context"], context))

    def contexts(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Gives g (eq. 5) and p_i (eq. 7), constants of a round.

        Stale contexts are zero in round 0; a client that sat out the last round uses the embeddings delivered before it.
        """
        if "cov" in self.without:
            return {}
        if self.constant:
            return tree.branch(private, "constants")
        source = embeddings_of(shared)
        if self.stale:
            own, before = tree.branch(private, "stale"), tree.leaf(tree.branch(shared, "before"), "weight")
            source = torch.where(tree.leaf(own, "round") == client.round, tree.leaf(own, "weight"), before)
        share = client.label_counts / client.label_counts.sum()  # α_i, (classes,)
        p = share @ source
        return {"g": source.mean(0), "p": p / len(source) if self.p_scale == "mean" else p}


def constants(width: int) -> dict[str, Tensor]:
    """Gives the contexts of the ablations that have no others."""
    draw = torch_generator(CONSTANTS_SEED, "contexts")
    return {name: torch.randn(width, generator=draw) for name in ("g", "p")}


def new_valve(width: int, seed: int) -> Tree:
    """Gives the weights V of a valve: two branches Linear → ReLU → LayerNorm, as torch initialises them."""
    weights: Tree = {}
    with fork_rng(seed, "valve"):
        for name in ("gamma", "beta"):
            for kind, layer in (("linear", nn.Linear(width, width)), ("norm", nn.LayerNorm(width))):
                for parameter, value in layer.named_parameters():
                    weights[f"{name}.{kind}.{parameter}"] = value.detach().clone()
    return weights


def valve(weights: Tree, f: Tensor, context: Tensor) -> Tensor:
    """Gives ReLU((γ(c) + 1) ⊙ f + β(c)): a route through the valve under context c (eqs. 3 and 4)."""

    def branch(name: str) -> Tensor:
        w, b, gain, shift = (
            tree.leaf(weights, f"{name}.{kind}") for kind in ("linear.weight", "linear.bias", "norm.weight", "norm.bias")
        )
        hidden = F.relu(F.linear(context, w, b))
        return F.layer_norm(hidden, hidden.shape[-1:], gain, shift)  # (width,)

    return F.relu((branch("gamma") + 1) * f + branch("beta"))  # (rows, width)


def embeddings_of(state: Tree) -> Tensor:
    """Gives the table C (classes, width) of a state."""
    return tree.leaf(tree.branch(state, "gce"), "weight")


def norm(part: Tree) -> Tensor:
    """Gives the L2 norm of all tensors of a part together."""
    length: Tensor = torch.linalg.vector_norm(torch.cat([t.flatten() for t in tree.leaves(part)]))
    return length
