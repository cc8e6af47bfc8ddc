"""A malicious client: its uploads are replaced before they are aggregated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import ClientInfo, Method
from gpfl.core.tree import Tree


def poison(method: Method, client: int, change: Callable[[Tensor], Tensor]) -> Method:
    """Return a bound method under which one client sends `change` of its update, the difference from the shared state."""
    honest = type(method)

    def upload(self: Method, shared: Tree, local_state: Tree, private: Tree, info: ClientInfo) -> tuple[Tree, Tree]:
        sent, new_private = honest.upload(self, shared, local_state, private, info)
        bad = info.index == client
        return tree.map_leaves(lambda s, u: torch.where(bad, s + change(u - s), u), tree.pick(shared, list(sent)), sent), (
            new_private
        )

    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method) if field.init}
    return type(f"Poisoned{honest.__name__}", (honest,), {"upload": upload})(**values)
