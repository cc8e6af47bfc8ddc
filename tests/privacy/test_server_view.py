"""What the server sees: nothing private, and gradients without weight decay."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from privacy.blob_runs import train_on_blobs
from torch import Tensor

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.core.method import Method, total_loss
from gpfl.core.net import Model
from gpfl.methods import METHODS
from gpfl.methods.fedphp import FedPHP
from gpfl.methods.gpfl import GPFL, embeddings_of
from gpfl.models.architectures import MLP, net_from_architecture
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.label_inference import guess_distribution
from gpfl.privacy.server_view import ServerView
from gpfl.privacy.uploads import STEPS, AttackedBatch, observe_uploads, state_at

# What reaches the attacker.


@pytest.mark.parametrize("name", METHODS)
def test_nothing_private_reaches_the_attacker(name: str) -> None:
    result = train_on_blobs(name, batch_size=4)
    engine, state = result.engine, state_at(result, "best")
    batch = AttackedBatch(0, tuple(engine.federation.shards[0].train[:4].tolist()))
    shared = set(engine.method.shared_parts)
    for steps in STEPS:
        for view in observe_uploads(engine, state, [batch], steps):
            assert view.sent.keys() <= shared
            assert view.upload.keys() <= shared
            assert view.weights.keys() <= shared | {"batch_norm_stats"}


def test_private_parts_are_rejected() -> None:
    result = train_on_blobs("fedper")
    (view,) = observe_uploads(result.engine, state_at(result, "0"), [AttackedBatch(0, (0,))], "one")
    with pytest.raises(gpfl.GpflError, match="does not see 'head' of fedper"):
        dataclasses.replace(view, upload={**view.upload, "head": {}})


def test_a_view_moves_to_another_device_in_full() -> None:
    result = train_on_blobs("gpfl", cond_source="stale_local")
    (view,) = observe_uploads(result.engine, state_at(result, "best"), [AttackedBatch(0, (0,))], "epoch")
    moved = view.to(torch.device("meta"))
    assert moved.context_embeddings is not None
    values = [moved.context_embeddings]
    for each in (moved.sent, moved.upload, moved.public):
        values += tree.leaves(each)
    assert {value.device.type for value in values} == {"meta"}
    guesses = [guess_distribution(each) for each in (view, view.to(torch.device("cpu")))]
    torch.testing.assert_close(*guesses, rtol=0, atol=0)


def test_the_view_of_an_epoch_is_the_upload_of_the_runs_own_round() -> None:
    result = train_on_blobs("fedavg")
    engine, state = result.engine, state_at(result, "best")
    (view,) = observe_uploads(engine, state, [AttackedBatch(1, (0,))], "epoch")
    info = engine.client_info([1], state.round).select(0)
    plan = engine.plan(1, state.round)
    private = tree.take(state.private, 1)
    update = local_round(engine.method, state.shared, private, engine.federation.table, plan, info)
    assert view.steps == len(plan[-1]) > 0
    assert all(torch.equal(a, b) for a, b in tree.zip_leaves(view.upload, update.upload))


# Gradients.


def make_gpfl(mu: float, lr: float, reg: str = "wd") -> Method:
    net = net_from_architecture(MLP(hidden=(8,)), "mlp", torch.zeros(2, 6), 5)
    return GPFL(lam=0.01, mu=mu, reg=reg).bind(net, lr=lr, epochs=1)


@pytest.mark.parametrize("steps", [1, 3, 200])
@pytest.mark.parametrize("mu", [0.0, 0.1, 0.7])
def test_weight_decay_is_removed_over_many_steps(steps: int, mu: float) -> None:
    rng = torch.Generator().manual_seed(0)
    sent, gradient = (torch.randn(5, 8, generator=rng, dtype=torch.float64) for _ in range(2))
    weights = sent
    for _ in range(steps):
        weights = weights - 0.1 * (gradient + mu * weights)
    view = ServerView(make_gpfl(mu=mu, lr=0.1), {"gce": {"weight": sent}}, {"gce": {"weight": weights}}, 1, steps)
    torch.testing.assert_close(embeddings_of(view.gradient(("gce",))), gradient)


def test_the_gradient_of_a_norm_is_removed_over_many_steps() -> None:
    rng = torch.Generator().manual_seed(0)
    sent, gradient = torch.randn(5, 8, generator=rng), torch.randn(5, 8, generator=rng) / 20
    weights, errors = sent, {}
    for _ in range(20):
        weights = weights - 0.01 * (gradient + 2 * weights / torch.linalg.vector_norm(weights))
    for reg, mu in (("norm", 2.0), ("wd", 0.0)):
        method = make_gpfl(mu=mu, reg=reg, lr=0.01)
        view = ServerView(method, {"gce": {"weight": sent}}, {"gce": {"weight": weights}}, 1, 20)
        errors[reg] = float((embeddings_of(view.gradient(("gce",))) - gradient).norm() / gradient.norm())
    assert errors["norm"] < 0.01 < 1 < errors["wd"]


def observe_one_step(method: str, rounds: int = 1, **settings: object) -> tuple[ServerView, tree.Tree]:
    """Return the view of a step on one image after some rounds, and the true gradient of the last target's parts."""
    result = train_on_blobs(method, rounds=rounds, **settings)
    engine, state = result.engine, result.outcome.last
    sample = int(engine.federation.shards[0].train[0])
    (view,) = observe_uploads(engine, state, [AttackedBatch(0, (sample,))], "one")
    info = engine.client_info([0], state.round).select(0)
    full = engine.method.replace(valve="full") if isinstance(engine.method, GPFL) else engine.method
    local_state = full.download(state.shared, tree.take(state.private, 0), info)
    batch = engine.federation.table.batch(torch.tensor([sample]))

    def loss(parts: tree.Tree) -> Tensor:
        model = Model(full.net, {**local_state, **parts})
        terms = full.loss(model, state.shared, batch, info)
        return total_loss({name: term for name, term in terms.items() if not name.startswith("norm_")})

    parts = tuple(gradient_targets(engine.method).values())[-1].parts
    weights = {**local_state, **tree.pick(state.shared, parts)}  # those that were sent
    return view, torch.func.grad(loss)(tree.pick(weights, parts))


EXACT = [
    *((name, {}) for name in ("fedavg", "fedprox", "ditto", "fedper", "fedrod", "gpfl")),
    ("gpfl", {"reg": "norm", "mu": 1}),
]


@pytest.mark.parametrize(("method", "settings"), EXACT)
def test_one_step_gives_the_server_the_exact_gradient(method: str, settings: dict[str, object]) -> None:
    view, gradient = observe_one_step(method, rounds=2, **settings)
    for found, true in tree.zip_leaves(view.gradient(tuple(gradient)), gradient):
        torch.testing.assert_close(found, true, atol=2e-5, rtol=1e-3)


def test_fedphp_starts_from_a_mix_and_so_uploads_no_gradient() -> None:
    view, gradient = observe_one_step("fedphp", rounds=5)
    flat = [torch.cat([leaf.flatten() for leaf in tree.leaves(part)]) for part in (view.gradient(tuple(gradient)), gradient)]
    assert float(torch.cosine_similarity(*flat, dim=0)) < 0.9
    assert not gradient_targets(view.method)["model"].knows_loss
    assert gradient_targets(FedPHP(variant="inherit"))["model"].knows_loss
