"""Membership inference from the loss of personal models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from privacy.uneven_clients import uneven_federation

import gpfl
from gpfl.engine import matmul_precision
from gpfl.privacy import label_inference, membership
from gpfl.privacy.label_inference import infer_label_distributions
from gpfl.privacy.membership import confidence_interval, infer_memberships
from gpfl.privacy.uploads import state_at


def test_memorised_samples_are_recognised_and_unseen_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(240, 20)).astype(np.float32), rng.integers(4, size=240)  # random labels can only be memorised
    federation = gpfl.federate([(x[:120], y[:120]), (x[120:], y[120:])])
    result = gpfl.fit("local", federation, net="mlp", rounds=80, lr=0.3, device="cpu")
    trained, untrained = (infer_memberships(result.engine, state_at(result, round_), range(2)) for round_ in ("best", "0"))
    assert np.mean([each.auc for each in trained]) > 0.9
    assert abs(np.mean([each.auc for each in untrained]) - 0.5) < 0.12


def test_the_confidence_interval_is_students() -> None:
    mean, half_width = confidence_interval([0.4, 0.5, 0.6])
    assert mean == pytest.approx(0.5)
    assert half_width == pytest.approx(4.30265 * 0.1 / np.sqrt(3), rel=1e-4)


def test_inference_runs_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    result = gpfl.fit("fedavg", uneven_federation(40, 40), net="mlp", hidden=4, rounds=1, device="cpu")
    precisions: list[str] = []
    for module, name in ((label_inference, "guess_distribution"), (membership, "sample_losses")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, real=real: precisions.append(torch.get_float32_matmul_precision()) or real(*given)
        )
    with matmul_precision("tf32"):
        infer_label_distributions(result.engine, result.outcome.last, [0])
        infer_memberships(result.engine, result.outcome.last, [0])
        assert torch.get_float32_matmul_precision() == "high"
    assert precisions == ["highest"] * 3
