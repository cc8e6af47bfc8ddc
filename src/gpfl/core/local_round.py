"""The heart: one client's round and one client's judgement, pure functions that engines run for many clients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core.method import Batch, ClientInfo, LossTerms, Method
from gpfl.core.net import Model
from gpfl.core.schedule import Plan
from gpfl.core.tree import Tree
from gpfl.data.table import Table


class ClientUpdate(NamedTuple):
    """What a client's round gives: its upload, its new private state, and the mean terms of its objective."""

    upload: Tree
    private: Tree
    terms: LossTerms


class Score(NamedTuple):
    """Correct decisions and summed cross-entropy over some rows."""

    correct: Tensor
    loss: Tensor


def local_round(method: Method, shared: Tree, private: Tree, table: Table, plan: Plan, client: ClientInfo) -> ClientUpdate:
    """Gives one client's round: download, every step of the plan, upload. Inputs are not changed."""
    local_state = method.download(shared, private, client)
    seen: dict[str, list[Tensor]] = {}
    for phase, steps in zip(method.phases(), plan, strict=True):
        rows = torch.from_numpy(steps).to(table.y.device)  # (steps, width)
        for number, real in enumerate((steps >= 0).sum(1).tolist()):
            if real == 0:  # regularisers would move an empty batch
                continue
            local_state, terms = phase.step(shared, local_state, table.batch(rows[number, :real]), client)
            for name, value in terms.items():
                seen.setdefault(name, []).append(value.detach())
    upload, kept = method.upload(shared, local_state, private, client)
    return ClientUpdate(upload, kept, {name: torch.stack(values).mean() for name, values in seen.items()})


def evaluate_client(method: Method, shared: Tree, private: Tree, adapt: Batch, client: ClientInfo, batch: Batch) -> Score:
    """Gives the score of a client's personal model on a batch; `adapt` is a training batch that the method may adapt to."""
    weights = method.personal_weights(shared, private, adapt, client)
    logits = method.logits(Model(method.net, weights), batch.x)  # (rows, classes)
    correct = (logits.argmax(-1) == batch.y) * batch.mask
    loss = F.cross_entropy(logits, batch.y, reduction="none") * batch.mask
    return Score(correct.sum(), loss.sum())
