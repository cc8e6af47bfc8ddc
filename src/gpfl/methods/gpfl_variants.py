"""Variants of GPFL: the paper's ablations, and the contexts of the authors' code."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms
from gpfl.core.net import Model
from gpfl.core.randomness import torch_generator
from gpfl.core.tree import Tree
from gpfl.methods.gpfl import GPFL, embeddings_of

CONTEXT_SEED = 0
"""Constant contexts are the same in every run and for every client."""

G = TypeVar("G", bound=GPFL)


def select_variant(method: G) -> G:
    """Return the method itself, or the variant that its options ask for."""
    if not method.without and method.cond_source == "global":
        return method
    return cast(G, GPFLVariant(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)}))


def constant_contexts(width: int) -> Tree:
    """Return the contexts of the ablations without personal contexts."""
    rng = torch_generator(CONTEXT_SEED, "contexts")
    return {name: torch.randn(width, generator=rng) for name in ("g", "p")}


@dataclass(frozen=True, kw_only=True)
class GPFLVariant(GPFL):
    """GPFL with parts left out (`without`), or with contexts from local embeddings (`cond_source="stale_local"`).

    The authors' code forms a round's contexts from the embeddings that the client trained in the round before. They are
    zero in round 0; a client that did not train in the last round uses the embeddings that the server sent before.
    """

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """The parts of GPFL that are left; stale contexts also need the embeddings of the round before."""
        parts = tuple(part for part in super().shared_parts if part not in self.without)
        return (*parts, "previous_gce") if self.has_stale_contexts else parts

    @property
    def has_constant_contexts(self) -> bool:
        """Whether contexts are constants: without embeddings p_i cannot be formed."""
        return "pci" in self.without or "gce" in self.without

    @property
    def has_stale_contexts(self) -> bool:
        """Whether contexts come from the client's own embeddings."""
        return self.cond_source == "stale_local" and "cov" not in self.without and not self.has_constant_contexts

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

    def guidance_loss(self, model: Model, f_global: Tensor, shared: Tree, batch: Batch) -> LossTerms:
        """Return the guidance terms that are left."""
        if "gce" in self.without:
            return {}
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
        return {"g": f, "p": f} if "cov" in self.without else super().routes(model, f)
