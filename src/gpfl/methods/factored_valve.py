"""GPFL's valve as received weights plus a low-rank change, which is what a local round of plain SGD trains.

The contexts g and p_i are constants of a round, so the linear layers of the valve see two inputs. Their gradient is
δ_g gᵀ + δ_p p_iᵀ, with δ the gradients at the layers' outputs, and after any number of steps of rate η with decay μ

    V = d V₀ + A gᵀ + B p_iᵀ,     d ← (1 − ημ) d,     A ← (1 − ημ) A − η δ_g,     B ← (1 − ημ) B − η δ_p.

A step needs only the outputs of V for the contexts, d V₀C + (A, B)·G with the Gram matrix G of the contexts. So it costs
O(K), not O(K²), without approximation. Per-example clipping needs the norms of V's gradients, and noise on them leaves the
span of the contexts: with such a defence the method trains V itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, loss_gradient
from gpfl.core.net import Model
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.methods.gpfl import GPFL

BRANCHES = ("gamma", "beta")
CONTEXTS = ("g", "p")

# The factored form has two parts, with branches and contexts in the order above:
# "cov" is trained: "factors" A and B (2 branches, 2 contexts, width), "bias", "gain", "shift" (2 branches, width).
# "valve" is not: "start" V₀C (2, 2, width), "gram" G (2, 2), "scale" d () and, if ‖V‖ is needed, "squared_norm" ‖V₀‖² ().


def factor_valve(weights: Tree, contexts: Tree, with_norm: bool) -> tuple[Tree, Tree]:
    """Return the parts "cov" and "valve" of the factored form of a valve before the first step."""
    c = _stack_contexts(contexts)  # (contexts, width)
    matrices = [tree.leaf(weights, f"{name}.linear.weight") for name in BRANCHES]
    start = torch.stack([c @ matrix.T for matrix in matrices])
    cov: Tree = {"factors": torch.zeros_like(start)}
    for key, parameter in (("bias", "linear.bias"), ("gain", "norm.weight"), ("shift", "norm.bias")):
        cov[key] = torch.stack([tree.leaf(weights, f"{name}.{parameter}") for name in BRANCHES])
    valve: Tree = {"start": start, "gram": c @ c.T, "scale": torch.ones_like(start[0, 0, 0])}
    if with_norm:
        valve["squared_norm"] = torch.stack([matrix.square().sum() for matrix in matrices]).sum()
    return cov, valve


def encode_valve(cov: Tree, valve: Tree, contexts: Tree, n_contexts: int) -> Tree:
    """Return what the server needs besides V₀ to build V, of the first `n_contexts` contexts: the others' factors are 0."""
    code: Tree = {"factors": tree.leaf(cov, "factors")[:, :n_contexts], "contexts": _stack_contexts(contexts)[:n_contexts]}
    return {**tree.drop(cov, ("factors",)), **code, "scale": tree.leaf(valve, "scale")}


def encoded_bytes(width: int, n_contexts: int) -> int:
    """Return the bytes of an encoded valve."""
    vectors = 3 * len(BRANCHES) + (len(BRANCHES) + 1) * n_contexts
    return torch.float32.itemsize * (vectors * width + 1)


def build_valve(received: Tree, code: Tree) -> Tree:
    """Return the weights of the valve after a round, from the received ones and the encoded form."""
    factors, scale, c = (tree.leaf(code, key) for key in ("factors", "scale", "contexts"))
    weights: Tree = {}
    for i, name in enumerate(BRANCHES):
        weights[f"{name}.linear.weight"] = scale * tree.leaf(received, f"{name}.linear.weight") + factors[i].T @ c
        for key, parameter in (("bias", "linear.bias"), ("gain", "norm.weight"), ("shift", "norm.bias")):
            weights[f"{name}.{parameter}"] = tree.leaf(code, key)[i]
    return {name: weights[name] for name in received}


def apply_factored(cov: Tree, valve: Tree, f: Tensor) -> dict[str, Tensor]:
    """Return the output of the valve (batch, width) for features `f` and each context."""
    out, factors = _outputs(cov, valve), tree.leaf(cov, "factors")
    out = out + (factors - factors.detach())  # adds 0, and makes δ the gradient of A and B instead of G·δ
    bias, gain, shift = (tree.leaf(cov, key).unsqueeze(1) for key in ("bias", "gain", "shift"))  # (branches, 1, width)
    gamma, beta = (F.layer_norm(F.relu(out + bias), out.shape[-1:]) * gain + shift).unsqueeze(2)  # (contexts, 1, width)
    features = F.relu((gamma + 1) * f + beta)  # (contexts, batch, width)
    return {name: features[i] for i, name in enumerate(CONTEXTS)}


def factored_norm(cov: Tree, valve: Tree) -> Tensor:
    """Return ‖V‖. Its gradient with respect to each trained weight w is w/‖V‖, for A and B too: a weight decay of 1/‖V‖."""
    squares = torch.stack([t.square().sum() for t in tree.leaves(cov)]).sum()
    factors, start, scale = tree.leaf(cov, "factors"), tree.leaf(valve, "start"), tree.leaf(valve, "scale")
    others = squares - factors.square().sum()
    moved = (factors * (2 * scale * start + tree.leaf(valve, "gram") @ factors)).sum()
    length = (scale**2 * tree.leaf(valve, "squared_norm") + moved + others).clamp_min(0).sqrt().detach()
    return length + (squares - squares.detach()) / (2 * length)


def decay_scale(valve: Tree, decay: Tensor | float, lr: float) -> Tree:
    """Return part "valve" after a step with weight decay, which shrinks the received weights."""
    scale = tree.leaf(valve, "scale")
    return {**valve, "scale": scale - lr * (decay * scale)}


def _outputs(cov: Tree, valve: Tree) -> Tensor:
    """Return the outputs of the linear layers for the contexts, without biases, (branches, contexts, width)."""
    moved = tree.leaf(valve, "gram") @ tree.leaf(cov, "factors").detach()
    return tree.leaf(valve, "scale") * tree.leaf(valve, "start") + moved


def _stack_contexts(contexts: Tree) -> Tensor:
    return torch.stack([tree.leaf(contexts, name) for name in CONTEXTS])


@dataclass(frozen=True, kw_only=True)
class FactoredGPFL(GPFL):
    """GPFL whose rounds train the valve in its factored form, unless the option `valve` is 'full'."""

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

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return GPFL's local state with the valve in its factored form."""
        state = super().download(shared, private, client)
        if not self.uses_factored_valve:
            return state
        cov, valve = factor_valve(tree.branch(state, "cov"), tree.branch(state, "context"), with_norm=self.reg == "norm")
        return {**state, "cov": cov, "valve": valve}

    def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
        """Train all parts together; the decay of V shrinks the received weights too."""
        state, terms = super().step(shared, local_state, batch, client)
        if "valve" not in local_state:
            return state, terms
        if self._setup.gradient is not loss_gradient:
            raise GpflError("method.valve is 'factored', but clipping per example needs gradients of V: use 'auto' or 'full'")
        cov, valve = tree.branch(local_state, "cov"), tree.branch(local_state, "valve")
        rate = self.mu if self.reg == "wd" else self.mu / factored_norm(cov, valve)
        return {**state, "valve": decay_scale(valve, rate, self.lr)}, terms

    def routes(self, model: Model, f: Tensor) -> dict[str, Tensor]:
        """Return the valve's output for each context; a personal model has the weights of V."""
        if "valve" not in model.weights:
            return super().routes(model, f)
        return apply_factored(model["cov"], model["valve"], f)

    def norm(self, model: Model, part: str) -> Tensor:
        """Return ‖V‖ or ‖C‖."""
        if part == "cov" and "valve" in model.weights:
            return factored_norm(model["cov"], model["valve"])
        return super().norm(model, part)

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return GPFL's upload and private state, with the weights of V after the round."""
        if "valve" in local_state:
            cov, valve, context = (tree.branch(local_state, part) for part in ("cov", "valve", "context"))
            code = encode_valve(cov, valve, context, self.n_trained_contexts)
            received = tree.branch({**private, **shared}, "cov")
            local_state = {**tree.drop(local_state, ("valve",)), "cov": build_valve(received, code)}
        return super().upload(shared, local_state, private, client)
