"""GPFL's valve as received weights plus a low-rank change, which is what a local round of plain SGD trains.

The contexts g and p_i are constants of a round, so the linear layers of the valve see two inputs. Their gradient is
δ_g gᵀ + δ_p p_iᵀ, with δ the gradients at the layers' outputs, and after any number of steps of rate η with decay μ

    V = d V₀ + A gᵀ + B p_iᵀ,     d ← (1 − ημ) d,     A ← (1 − ημ) A − η δ_g,     B ← (1 − ημ) B − η δ_p.

A step needs only the outputs of V for the contexts, d V₀C + (A, B)·G with the Gram matrix G of the contexts. So it costs
O(K), not O(K²), without approximation. Per-example clipping needs the norms of V's gradients, and noise on them leaves the
span of the contexts: with such a defence the method trains V itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, loss_gradient
from gpfl.core.net import Model
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.methods.gpfl import GPFL, embeddings_of

BRANCHES = ("gamma", "beta")
CONTEXTS = ("g", "p")
VECTORS = ("linear.bias", "norm.weight", "norm.bias")
COEFFICIENTS = "linear.coefficients"  # replaces "linear.weight" in uploads of low rank

# The factored form has two parts, with branches and contexts in the order above:
# "cov" is trained: "vectors" (2 branches, 5, width), which are A and B, the bias, and the gain and shift of the LayerNorm.
# "valve" is not: "start" V₀C (2, 2, width), "gram" G (2, 2), "scale" d () and, if ‖V‖ is needed, "squared_norm" ‖V₀‖² ().


def factor_valve(weights: Tree, contexts: Tree, with_norm: bool) -> tuple[Tree, Tree]:
    """Return the parts "cov" and "valve" of the factored form of a valve before the first step."""
    c = _stack_contexts(contexts)  # (contexts, width)
    matrices = [tree.leaf(weights, f"{name}.linear.weight") for name in BRANCHES]
    start = torch.stack([c @ matrix.T for matrix in matrices])
    vectors = [torch.stack([tree.leaf(weights, f"{name}.{parameter}") for parameter in VECTORS]) for name in BRANCHES]
    cov: Tree = {"vectors": torch.cat([torch.zeros_like(start), torch.stack(vectors)], 1)}
    valve: Tree = {"start": start, "gram": c @ c.T, "scale": torch.ones_like(start[0, 0, 0])}
    if with_norm:
        valve["squared_norm"] = torch.stack([matrix.square().sum() for matrix in matrices]).sum()
    return cov, valve


def encode_valve(cov: Tree, valve: Tree, contexts: Tree, n_contexts: int) -> Tree:
    """Return what the server needs besides V₀ to build V, of the first `n_contexts` contexts: the others' factors are 0."""
    factors, vectors = _split(cov)
    code: Tree = {"factors": factors[:, :n_contexts], "contexts": _stack_contexts(contexts)[:n_contexts]}
    return {**code, "vectors": vectors, "scale": tree.leaf(valve, "scale")}


def encoded_bytes(width: int, n_contexts: int) -> int:
    """Return the bytes of an encoded valve."""
    vectors = 3 * len(BRANCHES) + (len(BRANCHES) + 1) * n_contexts
    return torch.float32.itemsize * (vectors * width + 1)


def build_valve(received: Tree, code: Tree) -> Tree:
    """Return the weights of the valve after a round, from the received ones and the encoded form."""
    factors, c, vectors = (tree.leaf(code, key) for key in ("factors", "contexts", "vectors"))
    return _add_change(received, tree.leaf(code, "scale"), [each.T for each in factors], c, _name_vectors(vectors))


def encode_low_rank(cov: Tree, valve: Tree, context_weights: Tensor) -> Tree:
    """Return the valve with its change as coefficients M of known rows, the sums of which the server can decode.

    The contexts are `context_weights` @ rows, so V = d V₀ + M @ rows with M = [A, B] @ `context_weights`. The rows are equal at
    all clients, so the mean of V follows from those of d and M.
    """
    factors, vectors = _split(cov)
    n_contexts = len(context_weights)
    changes = {f"{name}.{COEFFICIENTS}": factors[i, :n_contexts].T @ context_weights for i, name in enumerate(BRANCHES)}
    return {**changes, **_name_vectors(vectors), "scale": tree.leaf(valve, "scale")}


def decode_low_rank(received: Tree, code: Tree, rows: Tensor) -> Tree:
    """Return the weights of the valve from those that were sent to clients, and an encoded upload or a mean of several."""
    coefficients = [tree.leaf(code, f"{name}.{COEFFICIENTS}") for name in BRANCHES]
    return _add_change(received, tree.leaf(code, "scale"), coefficients, rows, tree.drop(code, ("scale",)))


def apply_factored(cov: Tree, valve: Tree, f: Tensor) -> dict[str, Tensor]:
    """Return the output of the valve (batch, width) for features `f` and each context."""
    factors, bias, gain, shift = torch.split(tree.leaf(cov, "vectors"), [len(CONTEXTS), 1, 1, 1], 1)  # (branches, n, width)
    start, gram, scale = (tree.leaf(valve, key) for key in ("start", "gram", "scale"))
    constant = factors.detach()
    # The outputs of the linear layers. The last term is 0 and makes δ the gradient of A and B instead of G·δ.
    out = torch.addcmul(gram @ constant, scale, start) + (factors - constant)
    normed = F.layer_norm(F.relu(out + bias), out.shape[-1:])
    gamma, beta = torch.addcmul(shift, normed, gain).unsqueeze(2)  # (contexts, 1, width)
    features = F.relu(torch.addcmul(beta, gamma + 1, f))  # (contexts, batch, width)
    return dict(zip(CONTEXTS, features.unbind(), strict=True))


def factored_norm(cov: Tree, valve: Tree) -> Tensor:
    """Return ‖V‖. Its gradient with respect to each trained weight w is w/‖V‖, for A and B too: a weight decay of 1/‖V‖."""
    squares = tree.leaf(cov, "vectors").square().sum()
    factors, start, scale = _split(cov)[0], tree.leaf(valve, "start"), tree.leaf(valve, "scale")
    others = squares - factors.square().sum()
    moved = (factors * (2 * scale * start + tree.leaf(valve, "gram") @ factors)).sum()
    length = (scale**2 * tree.leaf(valve, "squared_norm") + moved + others).clamp_min(0).sqrt().detach()
    return length + (squares - squares.detach()) / (2 * length)


def decay_scale(valve: Tree, decay: Tensor | float, lr: float) -> Tree:
    """Return part "valve" after a step with weight decay, which shrinks the received weights."""
    scale = tree.leaf(valve, "scale")
    return {**valve, "scale": scale - lr * (decay * scale)}


def _split(cov: Tree) -> tuple[Tensor, Tensor]:
    """Return A and B (branches, contexts, width), and the other vectors (branches, 3, width)."""
    factors, vectors = torch.split(tree.leaf(cov, "vectors"), [len(CONTEXTS), len(VECTORS)], 1)
    return factors, vectors


def _name_vectors(vectors: Tensor) -> Tree:
    """Return the biases and the weights of the LayerNorms under their names in the full form."""
    return {f"{name}.{parameter}": vectors[i, k] for i, name in enumerate(BRANCHES) for k, parameter in enumerate(VECTORS)}


def _add_change(received: Tree, scale: Tensor, left: Sequence[Tensor], right: Tensor, vectors: Tree) -> Tree:
    """Return the weights scale × received + left @ right of both branches, with the vectors, in the order of `received`."""
    matrices: Tree = {}
    for name, matrix in zip(BRANCHES, left, strict=True):
        weight = f"{name}.linear.weight"
        matrices[weight] = torch.addcmul(matrix @ right, scale, tree.leaf(received, weight))
    return tree.pick({**matrices, **vectors}, tuple(received))


def _stack_contexts(contexts: Tree) -> Tensor:
    return torch.stack([tree.leaf(contexts, name) for name in CONTEXTS])


@dataclass(frozen=True, kw_only=True)
class FactoredGPFL(GPFL):
    """GPFL whose rounds train the valve in its factored form, unless the option `valve` is 'full'."""

    @property
    def uses_factored_valve(self) -> bool:
        """Whether a local round trains the valve in its factored form."""
        return self.valve != "full" and "cov" not in self.without

    def sends_valve_as(self, form: str) -> bool:
        """Return whether V is sent or counted in this form of `valve_upload`: never if it is private or trained in full."""
        return self.valve_upload == form and self.uses_factored_valve and "cov" in self.shared_parts

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
        """Return GPFL's upload and private state, with V after the round in full or, if `valve_upload` says so, of low rank."""
        if "valve" in local_state:
            cov, valve, context = (tree.branch(local_state, part) for part in ("cov", "valve", "context"))
            if self.sends_valve_as("low_rank"):
                cov = encode_low_rank(cov, valve, self.context_weights(private, client))
            else:
                code = encode_valve(cov, valve, context, self.n_trained_contexts)
                cov = build_valve(tree.branch({**private, **shared}, "cov"), code)
            local_state = {**tree.drop(local_state, ("valve",)), "cov": cov}
        return super().upload(shared, local_state, private, client)

    def decode_upload(self, shared: Tree, upload: Tree) -> Tree:
        """Return an upload, or a mean of uploads, with V in full."""
        if not self.sends_valve_as("low_rank"):
            return upload
        cov = decode_low_rank(tree.branch(shared, "cov"), tree.branch(upload, "cov"), self.context_rows(shared))
        return {**upload, "cov": cov}

    def context_rows(self, shared: Tree) -> Tensor:
        """Return the vectors that span g and p_i of all clients, (rows, width)."""
        return embeddings_of(shared)

    def context_weights(self, private: Tree, client: ClientInfo) -> Tensor:
        """Return the weights of the `context_rows` in the contexts along which V moves, (contexts, rows)."""
        alpha = self.class_weights(private, client)
        equal = torch.full_like(alpha, 1 / len(alpha))
        return torch.stack([equal, alpha / len(alpha) if self.p_scale == "mean" else alpha])
