"""Per-example gradients, and defences that are rejected because their guarantee would be false."""

from __future__ import annotations

import itertools

import pytest
import torch
from defences.test_defended import CLIENT, EXAMPLE, SMALL, fit
from torch import nn

import gpfl
from gpfl.core import tree


def test_a_step_with_clipped_examples_is_the_plain_computation() -> None:
    result = fit("fedavg", rounds=1, example_clip=0.7, batch_size=6)
    method, engine = result.engine.method, result.engine
    shared, facts = result.outcome.last.shared, engine.client_info([0], 0).select(0)
    batch = engine.federation.table.batch(torch.tensor([0, 1, 2, 3, -1, -1]))
    local_state = method.download(shared, {}, facts)
    after, _ = method.phases()[0].step(shared, local_state, batch, facts)
    module = nn.Sequential(method.net.make_module("base"), method.net.make_module("head"))
    for part, place in (("base", 0), ("head", 1)):
        module[place].load_state_dict(tree.branch(shared, part))
    total = [torch.zeros_like(p) for p in module.parameters()]
    for row in range(4):
        loss = nn.functional.cross_entropy(module(batch.x[row : row + 1]), batch.y[row : row + 1])
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        total = [t + g * min(1.0, 0.7 / float(norm)) for t, g in zip(total, gradients, strict=True)]
    moved = [leaf for part in ("base", "head") for leaf in tree.leaves(tree.branch(after, part))]
    for new, old, step in zip(moved, module.parameters(), total, strict=True):
        assert torch.allclose(new, old - 0.1 * step / 4, atol=1e-6)


@pytest.mark.parametrize(
    "method", ["gpfl", "fedavg", "fedprox", "perfedavg", "pfedme", "ditto", "fedper", "fedrep", "fedrod", "local"]
)
def test_unclipped_examples_train_as_batches_do(method: str) -> None:
    settings = {"rounds": 2, "engine": "vmap", "drop_last": False}
    plain, rows = fit(method, **settings), fit(method, example_clip=1e9, **settings)
    for key in ("loss", "train"):
        assert rows.history[-1][key] == pytest.approx(plain.history[-1][key], abs=1e-5)


def test_noise_of_examples_is_new_in_every_step_and_has_the_stated_size() -> None:
    result = fit("fedavg", rounds=1, example_clip=1e-6, example_noise=1e6, lr=1.0, batch_size=4)
    method, engine = result.engine.method, result.engine
    shared, facts = result.outcome.last.shared, engine.client_info([2], 0).select(0)
    batch = engine.federation.table.batch(torch.arange(4))
    states = [method.download(shared, {}, facts)]
    for _ in range(3):
        states.append(method.phases()[0].step(shared, states[-1], batch, facts)[0])
    weights = [torch.cat([leaf.flatten() for leaf in tree.leaves(tree.pick(state, ("base", "head")))]) for state in states]
    steps = torch.stack([b - a for a, b in itertools.pairwise(weights)])
    assert float(steps.std()) == pytest.approx(1 / 4, rel=0.05), "noise × bound over the number of examples"
    assert float(torch.corrcoef(steps).fill_diagonal_(0).abs().max()) < 0.15


# Rejected defences.


def normalised() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("fedavg", {"noise": 1.0}, r"defence\.clip is 0: noise needs a bound; set --clip"),
        ("fedavg", {"example_noise": 1.0}, r"set --example-clip too"),
        ("fedavg", {**CLIENT, "bits": 8}, "the noise would be less than ε assumes"),
        ("fedavg", {**CLIENT, "top_k": 0.1}, "the noise would be less than ε assumes"),
        ("fedavg", {"bits": 1}, "must be at least 2"),
        ("fedproto", CLIENT, "fedproto uploads prototypes, which is not an update of weights"),
        ("fedproto", SMALL, "not an update of weights"),
        ("fedproto", EXAMPLE, "fedproto uploads more about its examples than gradients"),
        ("fedphp", EXAMPLE, "the loss term 'mmd' of fedphp is not a mean over examples"),
        (
            "gpfl",
            {**EXAMPLE, "mlg_norm": "batch"},
            "loss term 'magnitude' of gpfl is not a mean over examples.*--mlg-norm sample_mean",
        ),
        ("fedavg", {**EXAMPLE, "net": normalised}, "BatchNorm in net 'custom' mixes examples"),
        ("fedavg", {**CLIENT, "net": normalised, "batch_norm": "average"}, "could make negative: use --batch-norm local"),
    ],
)
def test_a_false_guarantee_is_rejected(method: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(gpfl.GpflError, match=message):
        fit(method, rounds=1, **settings)


def test_clipping_works_with_averaged_batch_norm_statistics() -> None:
    assert fit("fedavg", rounds=1, clip=0.1, net=normalised, batch_norm="average").accuracy > 0
