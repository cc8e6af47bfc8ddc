"""Membership inference: whether a client's personal model reveals its training samples, by a threshold on the loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.local_round import Indices
from gpfl.core.net import Model
from gpfl.engine import Engine, matmul_precision
from gpfl.engine.base import EVAL_BATCH_SIZE
from gpfl.training.run_dir import RunState


@dataclass(frozen=True)
class MembershipInference:
    """How well losses separate a client's training samples from its test samples."""

    client: str
    auc: float  # 0.5 is chance, 1 is perfect
    train_loss: float
    test_loss: float


def infer_memberships(engine: Engine, state: RunState, clients: Sequence[int]) -> list[MembershipInference]:
    """Attack each client's personal model, in float32."""
    from sklearn.metrics import roc_auc_score

    results = []
    with matmul_precision("float32"):
        shared, private = tree.to(state.shared, engine.device), tree.fetch(state.private, clients, engine.device)
        for client, weights in zip(clients, engine.personal_weights(shared, private, clients, state.round), strict=True):
            shard, model = engine.federation.shards[client], Model(engine.method.net, weights)
            train, test = (sample_losses(engine, model, samples) for samples in (shard.train, shard.test))
            auc = roc_auc_score(np.repeat([1, 0], [len(train), len(test)]), -np.concatenate([train, test]))
            results.append(MembershipInference(shard.name, float(auc), float(train.mean()), float(test.mean())))
    return results


def sample_losses(engine: Engine, model: Model, samples: Indices) -> npt.NDArray[np.float64]:
    """Return the cross-entropy of each sample."""
    table, losses = engine.federation.table, []
    with torch.no_grad():
        for block in torch.split(torch.from_numpy(samples).to(engine.device), EVAL_BATCH_SIZE):
            logits = engine.method.logits(model, table.inputs(block))
            losses.append(F.cross_entropy(logits, table.y[block], reduction="none"))
    return torch.cat(losses).double().cpu().numpy()


def confidence_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % confidence interval (Student's t), infinite for one value."""
    from scipy.stats import sem, t

    mean = float(np.mean(values))
    half_width = float(t.ppf(0.975, len(values) - 1) * sem(values)) if len(values) > 1 else math.inf
    return mean, half_width
