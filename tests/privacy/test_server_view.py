"""What the server makes of an upload before any attack: gradients without decay, and labels from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from privacy.test_attack import trained
from torch import Tensor

import gpfl
from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.engine import matmul_precision
from gpfl.methods.fedphp import FedPHP
from gpfl.methods.gpfl import GPFL, embeddings_of
from gpfl.models.architecture import net_from_architecture
from gpfl.models.mlp import MLP
from gpfl.privacy import label_inference as labels
from gpfl.privacy import membership
from gpfl.privacy import victims as victim
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.server_view import ServerView
from gpfl.privacy.victims import Victim

# Gradients.


def gpfl_method(mu: float, lr: float, reg: str = "wd") -> Method:
    net = net_from_architecture(MLP(hidden=(8,)), "mlp", torch.zeros(2, 6), 5)
    return GPFL(lam=0.01, mu=mu, reg=reg).bind(net, lr=lr, epochs=1)


@pytest.mark.parametrize("steps", [1, 3, 200])
@pytest.mark.parametrize("mu", [0.0, 0.1, 0.7])
def test_decay_is_taken_out_of_many_steps(steps: int, mu: float) -> None:
    draw = torch.Generator().manual_seed(0)
    sent, gradient = (torch.randn(5, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    weights = sent
    for _ in range(steps):
        weights = weights - 0.1 * (gradient + mu * weights)
    seen = ServerView(gpfl_method(mu=mu, lr=0.1), {"gce": {"weight": sent}}, {"gce": {"weight": weights}}, 1, steps)
    torch.testing.assert_close(embeddings_of(seen.gradient(("gce",))), gradient)


def test_the_pull_of_a_norm_is_taken_out_of_many_steps() -> None:
    draw = torch.Generator().manual_seed(0)
    sent, gradient = torch.randn(5, 8, generator=draw), torch.randn(5, 8, generator=draw) / 20
    weights, found = sent, {}
    for _ in range(20):
        weights = weights - 0.01 * (gradient + 2 * weights / torch.linalg.vector_norm(weights))
    for reg, mu in (("norm", 2.0), ("wd", 0.0)):
        method = gpfl_method(mu=mu, reg=reg, lr=0.01)
        seen = ServerView(method, {"gce": {"weight": sent}}, {"gce": {"weight": weights}}, 1, 20)
        found[reg] = float((embeddings_of(seen.gradient(("gce",))) - gradient).norm() / gradient.norm())
    assert found["norm"] < 0.01 < 1 < found["wd"]


def one_step(method: str, rounds: int = 1, **settings: object) -> tuple[ServerView, tree.Tree]:
    """Gives what the server sees of a step on one image after some rounds, and the gradient of the client's data there."""
    result = trained(method, rounds=rounds, **settings)
    engine, state = result.engine, result.outcome.last
    row = int(engine.federation.shards[0].train[0])
    (seen,) = victim.uploads_of(engine, state, [Victim(0, (row,))], "one")
    facts = engine.client_info([0], state.round).select(0)
    local_state = engine.method.download(state.shared, tree.take(state.private, 0), facts)
    batch = engine.federation.table.batch(torch.tensor([row]))

    def total(moving: tree.Tree) -> Tensor:
        model = gpfl.core.net.Model(engine.method.net, {**local_state, **moving})
        terms = engine.method.loss(model, state.shared, batch, facts)
        return gpfl.core.method.total_loss({name: term for name, term in terms.items() if not name.startswith("norm_")})

    parts = tuple(gradient_targets(engine.method).values())[-1].parts
    at = {**local_state, **tree.pick(state.shared, parts)}  # the weights that were sent
    return seen, torch.func.grad(total)(tree.pick(at, parts))


EXACT = [
    *((name, {}) for name in ("fedavg", "fedprox", "ditto", "fedper", "fedrod", "gpfl")),
    ("gpfl", {"reg": "norm", "mu": 1}),
]


@pytest.mark.parametrize(("method", "settings"), EXACT)
def test_after_one_step_the_server_has_the_exact_gradient(method: str, settings: dict[str, object]) -> None:
    seen, wanted = one_step(method, rounds=2, **settings)
    for found, true in tree.zip_leaves(seen.gradient(tuple(wanted)), wanted):
        torch.testing.assert_close(found, true, atol=2e-5, rtol=1e-3)


def test_who_starts_from_a_mix_sends_no_gradient_and_is_not_said_to() -> None:
    seen, wanted = one_step("fedphp", rounds=5)
    flat = [torch.cat([leaf.flatten() for leaf in tree.leaves(part)]) for part in (seen.gradient(tuple(wanted)), wanted)]
    assert float(torch.cosine_similarity(*flat, dim=0)) < 0.9
    assert not gradient_targets(seen.method)["model"].knows_loss
    assert gradient_targets(FedPHP(variant="inherit"))["model"].knows_loss


# Labels.


def digits(method: str, clients: int = 4, beta: float = 0.1, **settings: object) -> gpfl.Result:
    federation = gpfl.federate("digits", partition="dirichlet", clients=clients, beta=beta, min_samples=10, seed=0)
    return gpfl.fit(method, federation, **{"net": "mlp", "hidden": 32, "lr": 0.05, "device": "cpu", **settings})


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_embeddings_that_decay_has_shortened_still_tell_the_labels(beta: float) -> None:
    result = digits("gpfl", beta=beta, rounds=20)
    lengths = [float(embeddings_of(victim.state_at(result, which).shared).norm()) for which in victim.ROUNDS]
    assert lengths[1] < 0.05 * lengths[0]
    leaks = labels.label_leaks(result.engine, result.outcome.last, range(2))
    assert np.mean([leak.guess for leak in leaks]) < 0.5 * np.mean([min(leak.uniform, leak.overall) for leak in leaks])


@pytest.mark.parametrize("settings", [{"clip": 1.0, "noise": 0.003, "mu": 0.0}, {"reg": "norm", "mu": 1.0}])
def test_neither_a_little_noise_nor_a_norm_hides_the_labels(settings: dict[str, object]) -> None:
    result = digits("gpfl", rounds=1, **settings)
    leaks = labels.label_leaks(result.engine, result.outcome.last, range(2))
    assert np.mean([leak.guess for leak in leaks]) < 0.3 * np.mean([leak.uniform for leak in leaks])


def test_features_are_found_that_turn_embeddings_as_they_did() -> None:
    draw = torch.Generator().manual_seed(0)
    start = torch.nn.functional.normalize(torch.randn(6, 24, generator=draw), dim=1).double()
    sums = torch.rand(6, 24, generator=draw).double() * torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0, 0.0])[:, None] / 24**0.5
    strengths = torch.full((8, 6), 0.4, dtype=torch.float64)
    end = labels.turned_by(start, sums, strengths)
    fine = labels.turned_by(start, sums, torch.full((800, 6), 0.004, dtype=torch.float64))
    torch.testing.assert_close(end, fine, atol=2e-2, rtol=0)  # spans may be long
    found = labels.feature_sums(start, end, strengths, True).norm(dim=1)
    assert float(labels.variation((found / found.sum()).numpy(), (sums.norm(dim=1) / sums.norm(dim=1).sum()).numpy())) < 0.05


# Small clients.


def uneven(*rows: int) -> gpfl.Federation:
    draw = np.random.default_rng(0)
    return gpfl.federate([(draw.normal(size=(n, 6)).astype(np.float32), np.arange(n) % 3) for n in rows], test_fraction=0.25)


def test_clients_that_never_train_are_left_out_of_the_labels() -> None:
    result = gpfl.fit("perfedavg", uneven(60, 8, 60), net="mlp", hidden=4, rounds=1, device="cpu")
    state = result.outcome.last
    assert result.engine.ineligible_clients == [1]
    leaks = labels.label_leaks(result.engine, state, range(3))
    assert [leak.client for leak in leaks] == [result.federation.shards[place].name for place in (0, 2)]
    assert "(mean over 2 of 3 clients, the others having too few rows to train; 0 is exact)" in labels.told(
        leaks, "perfedavg", 3
    )
    assert "(mean over 2 clients; 0 is exact)" in labels.told(labels.label_leaks(result.engine, state, [0, 2]), "perfedavg", 2)
    with pytest.raises(gpfl.GpflError, match="client 1 has too few rows to train: name another"):
        labels.label_leaks(result.engine, state, [1])


def test_only_clients_that_are_victims_need_the_rows() -> None:
    federation = uneven(40, 4)  # 30 and 3 of them for training
    assert {one.client for one in victim.choose_victims(federation, [0, 1], 4, [4], 0)[4]} == {0}
    with pytest.raises(gpfl.GpflError, match=r"client 1 has 3 training rows; 4 .* lower --batch or choose other clients"):
        victim.choose_victims(federation, [0, 1], 8, [4], 0)
    assert len(victim.choose_victims(federation, [0], 8, [4], 0)[4]) == 2
    assert len(victim.choose_victims(federation, [0, 1], 6, [1], 0)[1]) == 6
    with pytest.raises(gpfl.GpflError, match=r"client 1 has 3 training rows; 4 .* lower --images or name more clients"):
        victim.choose_victims(federation, [0, 1], 8, [1], 0)
    assert len(victim.choose_victims(federation, [0, 1], 7, [1], 0)[1]) == 7


def test_labels_and_members_are_asked_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    result = gpfl.fit("fedavg", uneven(40, 40), net="mlp", hidden=4, rounds=1, device="cpu")
    told: list[str] = []
    for module, name in ((labels, "guess_shares"), (membership, "losses_of")):
        plain = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *given, plain=plain: told.append(torch.get_float32_matmul_precision()) or plain(*given)
        )
    with matmul_precision("tf32"):
        labels.label_leaks(result.engine, result.outcome.last, [0])
        membership.memberships(result.engine, result.outcome.last, [0])
        assert torch.get_float32_matmul_precision() == "high"
    assert told == ["highest"] * 3
