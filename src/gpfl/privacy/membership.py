"""Membership inference: whether a client's own model tells which rows it was trained on, by a threshold on the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.local_round import Indices
from gpfl.core.net import Model
from gpfl.engine import Engine, matmul_precision
from gpfl.training.run_dir import RunState

BLOCK = 1024
"""Rows judged at once."""


@dataclass(frozen=True)
class Membership:
    """How well losses tell a client's training rows from its test rows: 0.5 is chance, 1 is always."""

    client: str
    auc: float
    train_loss: float
    test_loss: float


def memberships(engine: Engine, state: RunState, clients: Sequence[int]) -> list[Membership]:
    """Gives the attack on each client's own model, its training rows against its test rows."""
    with matmul_precision("float32"):  # whatever the run was in
        return [membership_of(engine, state, client) for client in clients]


def membership_of(engine: Engine, state: RunState, client: int) -> Membership:
    """Gives the attack on one client's own model."""
    shard, rows = engine.federation.shards[client], engine.adaptation_indices(client)
    adapt, facts = engine.federation.table.batch(rows[rows >= 0]), engine.client_info([client], state.round).select(0)
    shared = tree.to(state.shared, engine.device)
    own = tree.to(tree.take(state.private, client), engine.device)
    model = Model(engine.method.net, engine.method.personal_weights(shared, own, adapt, facts))
    train, test = (losses_of(engine, model, part) for part in (shard.train, shard.test))
    return Membership(shard.name, auc(-train, -test), float(train.mean()), float(test.mean()))


def losses_of(engine: Engine, model: Model, rows: Indices) -> npt.NDArray[np.float64]:
    """Gives the cross-entropy of each row."""
    table, found = engine.federation.table, []
    with torch.no_grad():
        for block in torch.split(torch.from_numpy(rows).to(engine.device), BLOCK):
            logits = engine.method.logits(model, table.inputs(block))
            found.append(F.cross_entropy(logits, table.y[block], reduction="none"))
    return torch.cat(found).double().cpu().numpy()


def auc(members: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> float:
    """Gives the chance that a member scores above another row, equal scores counting half."""
    from sklearn.metrics import roc_auc_score

    truth = np.concatenate([np.ones(len(members)), np.zeros(len(others))])
    return float(roc_auc_score(truth, np.concatenate([members, others])))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Gives the mean and the half width of its 95 % confidence interval (Student's t); of one value it is endless."""
    from scipy.stats import t

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.inf
    return mean, float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))


def records(found: Sequence[Membership]) -> list[dict[str, object]]:
    """Gives the attacks as plain values."""
    return [asdict(membership) for membership in found]


def told(found: Sequence[Membership], method: str) -> str:
    """Gives the sentence about membership inference."""
    mean, half = interval([membership.auc for membership in found])
    span = f" ± {half:.3f} (95 % over {len(found)} clients)" if math.isfinite(half) else " (one client)"
    train, test = (np.mean([getattr(membership, name) for membership in found]) for name in ("train_loss", "test_loss"))
    return (
        f"Membership: a threshold on the loss of {method}'s personal models tells training from test rows with AUC "
        f"{mean:.3f}{span}; 0.5 is chance. Mean loss {train:.3f} on training rows, {test:.3f} on test rows."
    )
