"""GPFL's valve in a local round of plain SGD, trained without its matrices.

The contexts g and p_i are constants of a round, so the linear layers of the valve see two inputs. Their gradient is
δ_g gᵀ + δ_p p_iᵀ, with δ the gradients at the layers' outputs, and after any number of steps of rate η with decay μ

    V = d V₀ + A gᵀ + B p_iᵀ,     d ← (1 − ημ) d,     A ← (1 − ημ) A − η δ_g,     B ← (1 − ημ) B − η δ_p.

A step reads nothing of V but its outputs at the contexts, d V₀C + (A, B)·G with the Gram matrix G of the contexts. So it costs
O(K), not O(K²), and nothing is approximated. Per-example gradients under a bound need the norms of V's gradients, and noise on
them leaves the span of the contexts: there the method trains V itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.tree import Tree

BRANCHES = ("gamma", "beta")
CONTEXTS = ("g", "p")

# Tensors of the factored form, in the order of BRANCHES and CONTEXTS:
# "cov", which steps train: "factors" (2 branches, 2 contexts, width), "bias", "gain", "shift" (2 branches, width).
# "valve", constants and the scale: "start" (2, 2, width), "gram" (2, 2), "scale" () and, for a norm, "square" ().


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
        valve["square"] = torch.stack([matrix.square().sum() for matrix in matrices]).sum()
    return cov, valve


def build_valve(received: Tree, cov: Tree, valve: Tree, contexts: Tree) -> Tree:
    """Return the weights of the valve, from those received and the factored form after a round."""
    factors, scale, c = tree.leaf(cov, "factors"), tree.leaf(valve, "scale"), _stack_contexts(contexts)
    weights: Tree = {}
    for i, name in enumerate(BRANCHES):
        weights[f"{name}.linear.weight"] = scale * tree.leaf(received, f"{name}.linear.weight") + factors[i].T @ c
        for key, parameter in (("bias", "linear.bias"), ("gain", "norm.weight"), ("shift", "norm.bias")):
            weights[f"{name}.{parameter}"] = tree.leaf(cov, key)[i]
    return {name: weights[name] for name in received}


def apply_factored(cov: Tree, valve: Tree, f: Tensor) -> dict[str, Tensor]:
    """Return features (batch, width) through the valve under each context."""
    out, factors = _outputs(cov, valve), tree.leaf(cov, "factors")
    out = out + (factors - factors.detach())  # zero, with the gradient δ for A and B; G would enter it otherwise
    bias, gain, shift = (tree.leaf(cov, key).unsqueeze(1) for key in ("bias", "gain", "shift"))  # (branches, 1, width)
    gamma, beta = (F.layer_norm(F.relu(out + bias), out.shape[-1:]) * gain + shift).unsqueeze(2)  # (contexts, 1, width)
    features = F.relu((gamma + 1) * f + beta)  # (contexts, batch, width)
    return {name: features[i] for i, name in enumerate(CONTEXTS)}


def factored_norm(cov: Tree, valve: Tree) -> Tensor:
    """Return ‖V‖. Its gradient by A and B is theirs as a decay by 1/‖V‖ prescribes, like that of the other weights."""
    squares = torch.stack([t.square().sum() for t in tree.leaves(cov)]).sum()
    factors, start, scale = tree.leaf(cov, "factors"), tree.leaf(valve, "start"), tree.leaf(valve, "scale")
    others = squares - factors.square().sum()
    moved = (factors * (2 * scale * start + tree.leaf(valve, "gram") @ factors)).sum()
    length = (scale**2 * tree.leaf(valve, "square") + moved + others).clamp_min(0).sqrt().detach()
    return length + (squares - squares.detach()) / (2 * length)


def decay_scale(valve: Tree, decay: Tensor | float, lr: float) -> Tree:
    """Return the constants of the factored form after a step with weight decay."""
    scale = tree.leaf(valve, "scale")
    return {**valve, "scale": scale - lr * (decay * scale)}


def _outputs(cov: Tree, valve: Tree) -> Tensor:
    """Return what the linear layers make of the contexts, without their biases, (branches, contexts, width)."""
    moved = tree.leaf(valve, "gram") @ tree.leaf(cov, "factors").detach()
    return tree.leaf(valve, "scale") * tree.leaf(valve, "start") + moved


def _stack_contexts(contexts: Tree) -> Tensor:
    return torch.stack([tree.leaf(contexts, name) for name in CONTEXTS])
