"""Targets of gradient matching: functions of the input whose gradient clients upload, and the known weight decay."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import NET_PARTS, Method
from gpfl.core.net import Model
from gpfl.core.tree import Tree
from gpfl.defences import undefended
from gpfl.errors import GpflError
from gpfl.methods.fedphp import FedPHP
from gpfl.methods.fedrod import FedRoD
from gpfl.methods.gpfl import GPFL, GUIDANCE, cosine_logits, embeddings_of, valve
from gpfl.methods.gpfl_variants import GPFLVariant, constant_contexts


class GradientTarget(NamedTuple):
    """A function of the input whose gradient an attack matches; the server sends its parts and clients upload them."""

    parts: tuple[str, ...]  # the parts whose gradient the attack matches
    output: Callable[[Model, Tensor], Tensor]  # (batch, …), from what the server knows
    knows_loss: bool = False  # the loss of the output is cross-entropy; otherwise the attack guesses the cotangent
    counts_in_loss: bool = False  # the loss of the output contains the client's label counts


def gradient_targets(method: Method) -> dict[str, GradientTarget]:
    """Return the targets of an attack on a method's uploads by name: "fe" the base, "model" base and head.

    GPFL adds φ and the valve under g ("sfe") and their cosines to C ("sm"), as far as the ablation has them.
    """
    method = undefended(method)
    targets = {}
    if "base" in method.shares:
        targets["fe"] = GradientTarget(("base",), lambda model, x: model("base", x))
    if set(NET_PARTS) <= set(method.shares):
        counts_in_loss = isinstance(method, FedRoD)
        # Under "mix" no client starts from the weights it received, so none uploads their gradient.
        knows_loss = not counts_in_loss and not (isinstance(method, FedPHP) and method.variant == "mix")
        targets["model"] = GradientTarget(
            NET_PARTS, lambda model, x: model("head", model("base", x)), knows_loss, counts_in_loss
        )
    if isinstance(method, GPFL) and method.share_valve:  # otherwise the server cannot compute f^G
        targets |= _targets_of_gpfl(method)
    return targets


def _targets_of_gpfl(method: GPFL) -> dict[str, GradientTarget]:
    constant = isinstance(method, GPFLVariant) and method.has_constant_contexts
    fixed = tree.leaf(constant_contexts(method.net.width), "g") if constant else None

    def features(model: Model, x: Tensor) -> Tensor:  # f^G, with what the server knows
        f = model("base", x)
        if "cov" in method.without:
            return f
        return valve(model["cov"], f, embeddings_of(model.weights).detach().mean(0) if fixed is None else fixed.to(f))

    def cosines(model: Model, x: Tensor) -> Tensor:
        return cosine_logits(features(model, x), embeddings_of(model.weights))

    shared = [part for part in ("base", *GUIDANCE) if part in method.shared_parts]
    targets = {}
    if "cov" in shared:
        targets["sfe"] = GradientTarget(("base", "cov"), features)
    if "gce" in shared:
        targets["sm"] = GradientTarget(tuple(shared), cosines)
    return targets


def select_target(method: Method, name: str) -> GradientTarget:
    """Return a target by name. Raise if the method does not offer it."""
    targets = gradient_targets(method)
    if name not in targets:
        offers = f"it offers {', '.join(targets)}" if targets else "nothing it uploads is the gradient of a net"
        raise GpflError(f"{method.name} has no target '{name}': {offers}")
    return targets[name]


def weight_decay(method: Method, part: str, weights: Tree) -> float:
    """Return the weight decay to which the regularisers of the objective amount at these weights of a part."""
    method = undefended(method)
    if not isinstance(method, GPFL) or part not in GUIDANCE:
        return 0.0
    # The gradient of μ‖w‖ is μ·w/‖w‖, which is decay of μ over the length.
    return method.mu if method.reg == "wd" else method.mu / max(float(tree.norm(weights)), 1e-12)
