"""GPFL's own properties: guidance, contexts, protocols."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import toy_federation
from torch import Tensor
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Batch, ClientInfo, LossTerms
from gpfl.core.net import Model
from gpfl.engine import ENGINES, RunSpec
from gpfl.errors import GpflError
from gpfl.methods.factored_valve import FactoredGPFL
from gpfl.methods.gpfl import GPFL, batch_distance, cosine_logits, embeddings_of, mean_distance, valve
from gpfl.methods.gpfl_variants import GPFLVariant
from gpfl.models.architectures import MLP, net_from_architecture
from gpfl.training import config as configs


def bound(**options: object) -> GPFL:
    federation = toy_federation()
    net = net_from_architecture(MLP(hidden=(8,)), "mlp", federation.table.inputs(torch.arange(2)), 3)
    return GPFL(**options).bind(net, lr=0.05, epochs=1)  # type: ignore[arg-type]


def client_info(counts: tuple[float, ...] = (3.0, 5.0, 0.0), round: int = 0) -> ClientInfo:
    return ClientInfo(torch.tensor(sum(counts)), torch.tensor(counts), torch.tensor(float(round)), torch.tensor(5.0))


def make_batch(size: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 6, generator=generator)
    return Batch(x, torch.arange(size) % 3, torch.ones(size))


def labelled(y: Tensor, mask: Tensor | None = None) -> Batch:
    return Batch(torch.zeros(len(y)), y, torch.ones(len(y)) if mask is None else mask)


MASK = torch.tensor([1.0, 1.0, 0.0])


@pytest.fixture
def features() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)


def test_angle_loss_is_cross_entropy_of_cosines_and_ignores_scale() -> None:
    f, c, y = torch.randn(5, 8), torch.randn(3, 8), torch.tensor([0, 1, 2, 1, 0])
    logits = cosine_logits(f, c)
    by_hand = torch.stack([f @ u / (f.norm(dim=1) * u.norm()) for u in c], dim=1)
    torch.testing.assert_close(logits, by_hand)
    torch.testing.assert_close(cosine_logits(7 * f, 0.1 * c), logits)
    one_hot = F.one_hot(y, 3)
    expected = -(torch.log_softmax(by_hand, 1) * one_hot).sum(1).mean()
    torch.testing.assert_close(labelled(y).cross_entropy(logits), expected)


def test_angle_loss_of_the_ideal_simplex_is_its_minimum() -> None:
    classes = 10
    simplex = F.normalize(torch.eye(classes) - 1 / classes)
    loss = labelled(torch.arange(classes)).cross_entropy(cosine_logits(simplex, simplex))
    assert loss.item() == pytest.approx(math.log(1 + 9 * math.exp(-10 / 9)), abs=1e-5)


def test_dead_features_give_zero_logits_and_zero_gradient() -> None:
    f = torch.zeros(2, 8, requires_grad=True)
    logits = cosine_logits(F.relu(f), torch.randn(3, 8))
    assert torch.equal(logits, torch.zeros(2, 3))
    labelled(torch.tensor([0, 1])).cross_entropy(logits).backward()
    assert float(f.grad.abs().max()) == 0


def test_distances_agree_with_a_computation_by_hand() -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, 0.0], [9.0, 9.0]]), torch.tensor([[0.0, 0.0], [0.0, 12.0], [0.0, 0.0]])
    padded, full = (labelled(torch.zeros(3), mask) for mask in (MASK, torch.ones(3)))
    assert batch_distance(a, b, padded).item() == pytest.approx(13.0)
    assert mean_distance(a, b, padded).item() == pytest.approx((5 + 12) / 2)
    assert batch_distance(a, b, full).item() > 13.1
    assert mean_distance(a, b, full).item() > 8.6


def test_batch_distance_is_root_of_batch_size_times_the_mean() -> None:
    a = torch.zeros(10, 8)
    b = F.normalize(torch.randn(10, 8), dim=1) * 3
    batch = labelled(torch.zeros(10))
    assert float(batch_distance(a, b, batch)) == pytest.approx(math.sqrt(10) * float(mean_distance(a, b, batch)), rel=1e-5)


@pytest.mark.parametrize("distance", [batch_distance, mean_distance])
def test_padding_has_no_gradient_and_distance_zero_a_finite_one(distance, features: tuple[Tensor, Tensor]) -> None:
    a, batch = features[0].clone().requires_grad_(), labelled(torch.zeros(3), MASK)
    (gradient,) = torch.autograd.grad(distance(a, features[1], batch), a)
    assert gradient[:2].abs().min() > 0
    assert torch.equal(gradient[2], torch.zeros(4))
    (at_zero,) = torch.autograd.grad(distance(a, a.detach(), batch), a)
    assert torch.equal(at_zero, torch.zeros(3, 4))


def test_batch_of_padding_has_no_loss_and_no_gradient(features: tuple[Tensor, Tensor]) -> None:
    a, nothing = features[0].clone().requires_grad_(), labelled(torch.zeros(3, dtype=torch.int64), torch.zeros(3))
    total = nothing.cross_entropy(a) + batch_distance(a, features[1], nothing)
    (gradient,) = torch.autograd.grad(total, a)
    assert total.item() == 0.0
    assert torch.equal(gradient, torch.zeros(3, 4))


def test_contexts_are_constant_in_local_training() -> None:
    method = bound()
    shared, private = method.init(0)
    client = client_info()
    local_state = method.download(shared, private, client)
    after = local_state
    for _ in range(3):
        after, _ = method.step(shared, after, make_batch(), client)
    for name in ("g", "p"):
        assert torch.equal(tree.leaf(tree.branch(after, "context"), name), tree.leaf(tree.branch(local_state, "context"), name))
    assert not torch.equal(embeddings_of(after), embeddings_of(local_state))


def test_embeddings_have_no_gradient_from_the_magnitude_term() -> None:
    client, tables = client_info(), []
    for lam in (0.0, 10.0):
        method = bound(lam=lam)
        shared, private = method.init(0)
        local_state = method.download(shared, private, client)
        updated, _, _ = method.optimizer_step(shared, local_state, make_batch(), client, parts=("gce",))
        tables.append(embeddings_of(updated))
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], embeddings_of(shared))


def test_personal_context_is_weighted_by_class_frequencies() -> None:
    shared, private = bound().init(0)
    table = embeddings_of(shared)
    context = bound().contexts(shared, private, client_info((3.0, 5.0, 0.0)))
    g, p = context["g"], context["p"]
    torch.testing.assert_close(g, table.mean(0))
    torch.testing.assert_close(p, 3 / 8 * table[0] + 5 / 8 * table[1])
    divided = bound(p_scale="mean").contexts(shared, private, client_info((3.0, 5.0, 0.0)))
    torch.testing.assert_close(divided["p"], p / 3)


def run(source: str, rounds: int, client_fraction: float = 1.0):
    method = bound(cond_source=source)
    engine = ENGINES["vmap"](RunSpec(method, toy_federation(), Schedule(seed=0, rounds=5, client_fraction=client_fraction)))
    shared, private = method.init(0)
    private = tree.repeat(private, 4)
    states = [(shared, private)]
    for number in range(rounds):
        clients = engine.schedule.sample_clients(number, 4)
        index = torch.tensor(clients)
        cohort = engine.train(shared, tree.take(private, index), clients, number)
        shared, private = method.aggregate(shared, cohort.mean), tree.map_leaves(torch.clone, private)
        tree.index_copy_(private, index, cohort.private)
        states.append((shared, private))
    return engine, states


def contexts(engine, state, round: int) -> list[torch.Tensor]:
    info = engine.client_info(range(4), round)
    return [engine.method.contexts(state[0], tree.take(state[1], c), info.select(c))["g"] for c in range(4)]


def test_global_contexts_agree_on_all_clients() -> None:
    engine, states = run("global", 2)
    g = contexts(engine, states[2], 2)
    assert all(torch.equal(g[0], other) for other in g[1:])


def test_stale_contexts_are_zero_in_round_0_and_differ_between_clients_later() -> None:
    engine, states = run("stale_local", 1)
    assert all(float(g.abs().max()) == 0 for g in contexts(engine, states[0], 0))
    g = contexts(engine, states[1], 1)
    assert float((g[0] - g[1]).abs().max()) > 1e-4


def test_stale_context_of_an_absent_client_uses_the_previous_embeddings() -> None:
    engine, states = run("stale_local", 2, client_fraction=0.5)
    outside = next(c for c in range(4) if c not in engine.schedule.sample_clients(1, 4))
    g = contexts(engine, states[2], 2)[outside]
    torch.testing.assert_close(g, embeddings_of(states[1][0]).mean(0))


def test_valve_is_the_formula_of_the_paper() -> None:
    shared, _ = bound().init(0)
    weights = tree.branch(shared, "cov")
    f, context = torch.randn(4, 8), torch.randn(8)

    def branch(name: str) -> torch.Tensor:
        hidden = torch.relu(weights[f"{name}.linear.weight"] @ context + weights[f"{name}.linear.bias"])
        centred = (hidden - hidden.mean()) / torch.sqrt(hidden.var(unbiased=False) + 1e-5)
        return centred * weights[f"{name}.norm.weight"] + weights[f"{name}.norm.bias"]

    expected = torch.relu((branch("gamma") + 1) * f + branch("beta"))
    torch.testing.assert_close(valve(weights, f, context), expected)


def test_prediction_uses_the_personal_route() -> None:
    method = bound()
    shared, private = method.init(0)
    model = method.personal_weights(shared, private, make_batch(), client_info())
    assert "gce" not in model
    f = Model(method.net, model)("base", make_batch().x)
    p = method.contexts(shared, private, client_info())["p"]
    expected = Model(method.net, model)("head", valve(tree.branch(model, "cov"), f, p))
    torch.testing.assert_close(method.logits(Model(method.net, model), make_batch().x), expected)


def test_norm_penalty_and_weight_decay_agree_with_their_formulas() -> None:
    client, batch = client_info(), make_batch()
    free = bound(mu=0.0, lam=0.0)
    shared, private = free.init(0)
    local_state = free.download(shared, private, client)
    base = embeddings_of(free.step(shared, local_state, batch, client)[0])
    table = embeddings_of(local_state)
    decayed = embeddings_of(bound(mu=0.3, lam=0.0).step(shared, local_state, batch, client)[0])
    torch.testing.assert_close(decayed, base - 0.05 * 0.3 * table)
    penalised = bound(mu=0.3, lam=0.0, reg="norm")
    normed = embeddings_of(penalised.step(shared, penalised.download(shared, private, client), batch, client)[0])
    torch.testing.assert_close(normed, base - 0.05 * 0.3 * table / table.norm())


@pytest.mark.parametrize(
    ("protocol", "expected", "shuffle"),
    [
        ("corrected", ("sum", "global", "batch", "wd"), True),
        ("paper", ("mean", "global", "sample_mean", "norm"), True),
        ("reference", ("sum", "stale_local", "batch", "wd"), False),
    ],
)
def test_protocol_sets_its_options(protocol: str, expected: tuple[str, ...], shuffle: bool) -> None:
    config = configs.resolve_config({"run": {"protocol": protocol}})
    method = config.method
    assert isinstance(method, GPFL)
    assert (method.p_scale, method.cond_source, method.mlg_norm, method.reg) == expected
    assert config.train.shuffle is shuffle
    override = configs.resolve_config({"run": {"protocol": protocol}, "method": {"p_scale": "mean"}})
    assert override.method.p_scale == "mean"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("net", "lam", "mu"),
    [("cnn4", 0.01, 0.1), ("mlp", 0.01, 0.1), ("resnet18", 1e-4, 0.0), ("fasttext", 1e-4, 0.0), ("harcnn", 0.01, 1.0)],
)
def test_defaults_of_lambda_and_mu_depend_on_the_net(net: str, lam: float, mu: float) -> None:
    federation = toy_federation()
    built = net_from_architecture(MLP(hidden=(8,)), net, federation.table.inputs(torch.arange(2)), 3)
    method = GPFL().bind(built, lr=0.1, epochs=1)
    assert (method.lam, method.mu) == (lam, mu)
    assert GPFL(lam=0.5).bind(built, lr=0.1, epochs=1).lam == 0.5


# Classes.


def test_bind_returns_the_class_that_implements_the_options() -> None:
    assert type(bound()) is FactoredGPFL
    assert type(bound(valve="full")) is GPFL
    for options in ({"without": ("cov",)}, {"guidance": "embeddings"}, {"alpha_noise": 0.1}, {"share_valve": False}):
        assert type(bound(**options)) is GPFLVariant


def test_derived_class_keeps_its_type_and_its_methods() -> None:
    class Angles(GPFL):
        def guidance_loss(self, *args: object) -> LossTerms:
            return {"angle": super().guidance_loss(*args)["angle"]}  # type: ignore[arg-type]

    net = bound().net
    method = Angles().bind(net, lr=0.05, epochs=1)
    shared, private = method.init(0)
    _, terms = method.step(shared, method.download(shared, private, client_info()), make_batch(), client_info())
    assert type(method) is Angles
    assert terms.keys() == {"ce", "angle"}
    with pytest.raises(GpflError, match=r"method.without is \('pci',\), which Angles does not implement: derive it from"):
        Angles(without=("pci",)).bind(net, lr=0.05, epochs=1)


# Valves that reveal less.


def class_weights(counts: list[float], seed: int = 0, index: int = 0, **options: object) -> list[float]:
    net = net_from_architecture(MLP(hidden=(8,)), "mlp", torch.zeros(2, 6), len(counts))
    method = GPFL(**options).bind(net, lr=0.1, epochs=1)
    _, private = method.init(seed)
    labels, one = torch.tensor(counts), torch.ones(())
    return method.class_weights(private, ClientInfo(labels.sum(), labels, one, one, one * index)).tolist()


def test_class_weights_are_rounded_up_to_levels() -> None:
    assert class_weights([14.0, 4, 2, 0]) == pytest.approx([0.7, 0.2, 0.1, 0])
    assert class_weights([14.0, 4, 2, 0], alpha_levels=1) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert class_weights([14.0, 4, 2, 0], alpha_levels=2) == pytest.approx([0.5, 0.25, 0.25, 0])
    assert class_weights([15.0, 5, 0, 0], alpha_levels=4) == pytest.approx([0.75, 0.25, 0, 0])


def test_noise_of_class_weights_is_fixed_for_each_client_and_seed() -> None:
    weights = [class_weights([14.0, 4, 2, 0], *key, alpha_noise=0.1) for key in ((0, 0), (0, 0), (0, 1), (1, 0))]
    assert weights[0] == weights[1]
    assert len({tuple(each) for each in weights}) == 3
    assert all(sum(each) == pytest.approx(1) and min(each) > 0 for each in weights)


def test_personal_route_leaves_the_valve_alone() -> None:
    def valve_after(valve_gradient: str, counts: list[float], form: str) -> torch.Tensor:
        net = net_from_architecture(MLP(hidden=(8,)), "mlp", torch.zeros(2, 6), 3)
        method = GPFL(valve_gradient=valve_gradient, valve=form).bind(net, lr=0.1, epochs=1)
        shared, private = method.init(0)
        labels, one = torch.tensor(counts), torch.ones(())
        client = ClientInfo(labels.sum(), labels, one, one)
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
        state = method.download(shared, private, client)
        state, _ = method.step(shared, state, Batch(x, torch.arange(6) % 3, torch.ones(6)), client)
        return method.upload(shared, state, private, client)[0]["cov"]["gamma.linear.weight"]

    for form in ("factored", "full"):
        assert torch.equal(valve_after("global", [1.0, 2, 3], form), valve_after("global", [6.0, 0, 0], form))
        assert not torch.equal(valve_after("both", [1.0, 2, 3], form), valve_after("both", [6.0, 0, 0], form))
