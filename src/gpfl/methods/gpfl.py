"""GPFL, with equation numbers of the paper.

Runs train V in a cheaper form, `FactoredGPFL`, with equal results up to rounding. Ablations and variants are in `GPFLVariant`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.method import NET_PARTS, Batch, ClientInfo, LossTerms
from gpfl.core.net import Model
from gpfl.core.randomness import fork_rng, torch_generator
from gpfl.core.tree import Tree
from gpfl.methods.gpfl_options import GPFLOptions

GUIDANCE = ("cov", "gce")
"""V and C, the parts of the global guidance, to which μ applies."""

VALVE_PARAMETERS = ("linear.weight", "linear.bias", "norm.weight", "norm.bias")


@dataclass(frozen=True, kw_only=True)
class GPFL(GPFLOptions):
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

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return φ and ψ from the net, V as torch initialises it, and C from N(0, 1)."""
        state, width = self.net.init(seed), self.net.width
        state["cov"] = init_valve(width, seed)
        state["gce"] = {"weight": torch.randn(self.net.classes, width, generator=torch_generator(seed, "embeddings"))}
        return self.split_state(state)

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return φ, V and C as received, the client's ψ, and the contexts of the round."""
        return {**shared, **private, "context": self.contexts(shared, private, client)}

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
        return state, terms

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

    def routes(self, model: Model, f: Tensor) -> dict[str, Tensor]:
        """Return the valve's output for each context: "g" and "p" in training, "p" alone in a personal model."""
        return {name: valve(model["cov"], f, context) for name, context in tree.flatten(model["context"]).items()}

    def guidance_loss(self, model: Model, f_global: Tensor, shared: Tree, batch: Batch) -> LossTerms:
        """Return the angle-level term L^alg (eq. 8) and the magnitude-level term λL^mlg (eq. 9)."""
        angles = cosine_logits(f_global, embeddings_of(model.weights))  # (batch, classes)
        received = F.embedding(batch.y, embeddings_of(shared))  # Ĉ_y, (batch, width)
        distance = batch_distance if self.mlg_norm == "batch" else mean_distance
        return {
            "angle": batch.cross_entropy(angles),
            "magnitude": self.lam * distance(f_global, received, batch),
        }

    def norm(self, model: Model, part: str) -> Tensor:
        """Return ‖V‖ or ‖C‖."""
        return tree.norm(model[part])

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return φ, V and C for the server, and ψ."""
        return self.split_state(tree.drop(local_state, ("context",)))

    def personal_weights(self, shared: Tree, private: Tree, batch: Batch, client: ClientInfo) -> Tree:
        """Return the weights of the personal route: φ, V, ψ, and p_i as a constant."""
        weights = tree.pick({**shared, **private}, ("base", "cov", "head", "batch_norm_stats"))
        return {**weights, "context": tree.pick(self.contexts(shared, private, client), ("p",))}

    def features(self, model: Model, x: Tensor) -> Tensor:
        """Return f^P, (batch, width)."""
        return self.routes(model, model("base", x))["p"]


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
    lengths = torch.outer(*(torch.linalg.vector_norm(each, dim=-1) for each in (features, embeddings)))
    return features @ embeddings.T / lengths.clamp_min(1e-12)


def batch_distance(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """Return the Frobenius norm of `a - b` (batch, width); its gradient at 0 is 0, not NaN."""
    distance: Tensor = torch.linalg.vector_norm((a - b) * batch.mask.unsqueeze(-1))
    return distance


def mean_distance(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """Return the mean L2 distance between the rows of `a` and `b` (batch, width)."""
    return batch.mean(torch.linalg.vector_norm(a - b, dim=-1))
