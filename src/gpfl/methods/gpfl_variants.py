"""Variants of GPFL: the ablations, contexts of the authors' code, guidance of embeddings alone, valves that reveal less."""

import dataclasses
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms
from gpfl.core.net import Model
from gpfl.core.randomness import make_salt, normal, random_key, torch_generator
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.methods.factored_valve import FactoredGPFL
from gpfl.methods.gpfl import GPFL, embeddings_of
from gpfl.methods.gpfl_options import GPFLOptions

_ROUNDING = 1e-4  # tolerance for rounding of class weights, and the smallest noisy one

CONTEXT_SEED = 0
"""Constant contexts are the same in every run and for every client."""

VARIANT_OPTIONS = ("cond_source", "without", "valve_gradient", "guidance", "share_valve", "alpha_levels", "alpha_noise")
"""Options whose default is the paper's method."""

G = TypeVar("G", bound=GPFLOptions)


def select_class(method: G) -> G:
    """Return a bound method as the class that implements its options; a class derived from one of them stays as it is."""
    if method.guidance == "embeddings" and method.valve_gradient == "global":
        raise GpflError(
            "method.guidance 'embeddings' with method.valve_gradient 'global' leaves the valve untrained: "
            "set method.guidance to 'features'"
        )
    _check_valve_upload(method)
    changed = [name for name in VARIANT_OPTIONS if getattr(method, name) != getattr(GPFLOptions, name)]
    if type(method) not in (GPFL, FactoredGPFL, GPFLVariant):
        ignored = [] if isinstance(method, GPFLVariant) else changed
        ignored += ["valve_upload"] * (method.valve_upload != "full" and not isinstance(method, FactoredGPFL))
        if ignored:
            raise GpflError(
                f"method.{ignored[0]} is {getattr(method, ignored[0])!r}, which {type(method).__name__} does not implement: "
                "derive it from gpfl.methods.gpfl_variants.GPFLVariant"
            )
        return method
    selected = GPFLVariant if changed else GPFL if method.valve == "full" else FactoredGPFL
    return cast(G, selected(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)}))


def _check_valve_upload(method: GPFLOptions) -> None:
    """Raise if the option asks for a form that V cannot be sent in, or that is not smaller."""
    if method.valve_upload != "low_rank" or not method.share_valve or "cov" in method.without:
        return
    reason, has_constants = "", bool({"pci", "gce"} & set(method.without))
    n_contexts = 2 if method.valve_gradient == "both" else 1
    rows = n_contexts if has_constants or n_contexts == 1 else method.net.classes
    if method.cond_source == "stale_local" and not has_constants:
        reason = "method.cond_source 'stale_local' forms contexts from embeddings that the server does not have"
    if method.valve == "full":
        reason = "method.valve 'full' trains V entry by entry"
    if rows >= method.net.width:
        reason = f"it would be no smaller with {rows} classes and features of width {method.net.width}"
    if reason:
        raise GpflError(f"method.valve_upload is 'low_rank', but {reason}: set method.valve_upload to 'full'")


def constant_contexts(width: int) -> Tree:
    """Return the contexts of the ablations without personal contexts."""
    rng = torch_generator(CONTEXT_SEED, "contexts")
    return {name: torch.randn(width, generator=rng) for name in ("g", "p")}


@dataclass(frozen=True, kw_only=True)
class GPFLVariant(FactoredGPFL):
    """GPFL with parts left out, with other contexts or guidance, or with a valve that reveals less.

    - `without`: the paper's ablations.
    - `cond_source="stale_local"`: the authors' code forms a round's contexts from the embeddings that the client trained in
      the round before. They are zero in round 0; a client that did not train in the last round uses the embeddings that the
      server sent the round before.
    - `guidance="embeddings"`: the guidance losses train C, hence the contexts, and leave φ and V to the personal task.
    - Uploads of V reveal α_i. `valve_gradient="global"` stops the gradient of L^P at V, which then moves along g alone;
      `share_valve=False` keeps V private; `alpha_levels` and `alpha_noise` put coarser or noisy weights in place of α_i.
    """

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """The parts of GPFL that are left; stale contexts also need the embeddings of the round before."""
        left_out = self.without if self.share_valve else (*self.without, "cov")
        parts = tuple(part for part in super().shared_parts if part not in left_out)
        return (*parts, "previous_gce") if self.has_stale_contexts else parts

    @property
    def has_constant_contexts(self) -> bool:
        """Whether contexts are constants: without embeddings p_i cannot be formed."""
        return "pci" in self.without or "gce" in self.without

    @property
    def has_stale_contexts(self) -> bool:
        """Whether contexts come from the client's own embeddings."""
        return self.cond_source == "stale_local" and "cov" not in self.without and not self.has_constant_contexts

    @property
    def has_noisy_weights(self) -> bool:
        """Whether the class weights have noise."""
        return isinstance(self.alpha_noise, Tensor) or self.alpha_noise > 0  # a tensor in concurrent trials

    def init(self, seed: int) -> tuple[Tree, Tree]:
        """Return GPFL's state with the variant's additions and without the parts it leaves out."""
        shared, private = super().init(seed)
        state = {**shared, **private}
        if self.has_stale_contexts:
            embeddings = embeddings_of(state)
            state["previous_gce"] = {"weight": embeddings.clone()}
            state["local_gce"] = {"weight": torch.zeros_like(embeddings), "round": torch.zeros(())}
        if self.has_constant_contexts and "cov" not in self.without:
            state["constants"] = constant_contexts(self.net.width)
        if self.has_noisy_weights:
            state["alpha"] = {"salt": torch.tensor(make_salt(seed))}
        return self.split_state(tree.drop(state, self.without))

    def contexts(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return the contexts of a round: none without a valve, or constants, or those of GPFL from local embeddings."""
        if "cov" in self.without:
            return {}
        if self.has_constant_contexts:
            return tree.branch(private, "constants")
        if not self.has_stale_contexts:
            return super().contexts(shared, private, client)
        return super().contexts({"gce": {"weight": self.stale_embeddings(shared, private, client)}}, private, client)

    def stale_embeddings(self, shared: Tree, private: Tree, client: ClientInfo) -> Tensor:
        """Return the embeddings that the client trained in the round before, or those that the server sent before."""
        local, previous = tree.branch(private, "local_gce"), tree.leaf(tree.branch(shared, "previous_gce"), "weight")
        return torch.where(tree.leaf(local, "round") == client.round, tree.leaf(local, "weight"), previous)

    def class_weights(self, private: Tree, client: ClientInfo) -> Tensor:
        """Return α, rounded up or with noise that is the same in every round."""
        alpha = super().class_weights(private, client)
        if self.alpha_levels:
            alpha = (alpha * self.alpha_levels - _ROUNDING).ceil()
        if self.has_noisy_weights:
            key = random_key(tree.leaf(tree.branch(private, "alpha"), "salt"), "alpha", client.index)
            alpha = (alpha / alpha.sum() + self.alpha_noise * normal(key, "alpha", alpha.shape)).clamp_min(_ROUNDING)
        return alpha / alpha.sum()

    def context_rows(self, shared: Tree) -> Tensor:
        """Return Ĉ, or the contexts along which V moves if they are the same at all clients."""
        if self.has_constant_contexts:
            constants = torch.stack(list(tree.leaves(constant_contexts(self.net.width))))
            return constants[: self.n_trained_contexts].to(next(tree.leaves(tree.branch(shared, "cov"))))
        rows = super().context_rows(shared)
        return rows.mean(0, keepdim=True) if self.n_trained_contexts == 1 else rows

    def context_weights(self, private: Tree, client: ClientInfo) -> Tensor:
        """Return the weights of the `context_rows` in the contexts along which V moves."""
        if self.has_constant_contexts or self.n_trained_contexts == 1:
            return torch.eye(self.n_trained_contexts).to(client.label_counts)
        return super().context_weights(private, client)

    def guidance_loss(self, model: Model, f_global: Tensor, shared: Tree, batch: Batch) -> LossTerms:
        """Return the guidance terms that are left."""
        if "gce" in self.without:
            return {}
        f_global = f_global.detach() if self.guidance == "embeddings" else f_global
        terms = super().guidance_loss(model, f_global, shared, batch)
        return {"angle": terms["angle"]} if "mlg" in self.without else terms

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return GPFL's upload, and its private state with the embeddings for the next round's contexts."""
        upload, new_private = super().upload(shared, local_state, private, client)
        if self.has_stale_contexts:
            new_private["local_gce"] = {"weight": embeddings_of(local_state), "round": client.round + 1}
            upload = tree.drop(upload, ("previous_gce",))
        return upload, new_private

    def aggregate(self, shared: Tree, mean: Tree) -> Tree:
        """Return the shared state after aggregation, with the previous embeddings."""
        state = super().aggregate(shared, mean)
        return {**state, "previous_gce": {"weight": embeddings_of(shared)}} if self.has_stale_contexts else state

    def routes(self, model: Model, f: Tensor) -> dict[str, Tensor]:
        """Return the valve's output for each context; without a valve, the features themselves."""
        if "cov" in self.without:
            return {"g": f, "p": f}
        routes = super().routes(model, f)
        if self.valve_gradient == "global" and "g" in routes:  # a personal model has the other route alone
            constant = {**model.weights, "cov": tree.map_leaves(torch.detach, model["cov"])}
            routes["p"] = super().routes(Model(model.net, constant), f)["p"]
        return routes
