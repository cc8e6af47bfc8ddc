"""Inference of label distributions from uploads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from privacy.uneven_clients import uneven_federation

import gpfl
from gpfl.core import tree
from gpfl.methods.gpfl import embeddings_of
from gpfl.privacy import embedding_inference, label_inference
from gpfl.privacy.label_inference import (
    LabelInference,
    guess_labels,
    infer_label_distributions,
    total_variation_distance,
)
from gpfl.privacy.uploads import ROUNDS, AttackedBatch, observe_uploads, state_at


@cache
def train_on_digits(method: str) -> gpfl.Result:
    federation = gpfl.federate("digits", clients=4, classes_per_client=3, seed=0)
    return gpfl.fit(method, federation, net="mlp", device="cpu", rounds=1, lr=0.05)


def train_on_skewed_digits(beta: float = 0.1, **settings: object) -> gpfl.Result:
    federation = gpfl.federate("digits", partition="dirichlet", clients=4, beta=beta, min_samples=10, seed=0)
    return gpfl.fit("gpfl", federation, **{"net": "mlp", "hidden": 32, "lr": 0.05, "device": "cpu", **settings})


def mean_guess(labels: Sequence[LabelInference]) -> float:
    return float(np.mean([each.guess for each in labels]))


def mean_baseline(labels: Sequence[LabelInference]) -> float:
    return float(np.mean([min(each.uniform, each.overall) for each in labels]))


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedrod", "gpfl", "fedproto"])
@pytest.mark.parametrize("round_", ROUNDS)
def test_the_label_of_a_single_image_is_exact(method: str, round_: str) -> None:
    result = train_on_digits(method)
    samples = result.federation.shards[1].train[:12]
    batches = [AttackedBatch(1, (int(sample),)) for sample in samples]
    guesses = [guess_labels(view) for view in observe_uploads(result.engine, state_at(result, round_), batches, "one")]
    labels = [[int(result.federation.table.y[sample])] for sample in samples]
    assert [guess.tolist() for guess in guesses if guess is not None] == labels


@pytest.mark.parametrize("method", ["fedavg", "gpfl", "fedproto", "fedrod"])
def test_an_upload_reveals_more_about_labels_than_no_upload(method: str) -> None:
    result = train_on_digits(method)
    labels = infer_label_distributions(result.engine, state_at(result, "0"), range(4))
    assert mean_guess(labels) < 0.5 * mean_baseline(labels)


def test_a_base_alone_reveals_no_labels() -> None:
    result = train_on_digits("fedper")
    (label,) = infer_label_distributions(result.engine, state_at(result, "0"), [0])
    assert label.guess is None


def test_label_counts_sum_to_the_number_of_images() -> None:
    assert label_inference._round_counts(torch.tensor([0.5, 0.3, 0.2, 0.0]), 4).tolist() == [2, 1, 1, 0]
    assert total_variation_distance(np.array([0.5, 0.5]), np.array([1.0, 0.0])) == 0.5


# GPFL's embeddings.


@pytest.mark.parametrize("beta", [0.1, pytest.param(1.0, marks=pytest.mark.slow)])
def test_embeddings_that_weight_decay_has_shortened_still_reveal_the_labels(beta: float) -> None:
    result = train_on_skewed_digits(beta, rounds=20, without=("pci",))
    lengths = [float(embeddings_of(state_at(result, round_).shared).norm()) for round_ in ROUNDS]
    assert lengths[1] < 0.05 * lengths[0]
    labels = infer_label_distributions(result.engine, result.outcome.last, range(2))
    assert mean_guess(labels) < 0.5 * mean_baseline(labels)


@pytest.mark.parametrize("settings", [{"clip": 1.0, "noise": 0.003, "mu": 0.0}, {"reg": "norm", "mu": 1.0}])
def test_neither_a_little_noise_nor_a_norm_hides_the_labels_from_the_embeddings(settings: dict[str, object]) -> None:
    result = train_on_skewed_digits(rounds=1, without=("cov",), **settings)
    labels = infer_label_distributions(result.engine, result.outcome.last, range(2))
    assert mean_guess(labels) < 0.3 * np.mean([each.uniform for each in labels])


def test_fitted_features_explain_the_rotation_of_embeddings() -> None:
    rng = torch.Generator().manual_seed(0)
    start = torch.nn.functional.normalize(torch.randn(6, 24, generator=rng), dim=1).double()
    features = torch.rand(6, 24, generator=rng).double() * torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0, 0.0])[:, None] / 24**0.5
    rates = torch.full((8, 6), 0.4, dtype=torch.float64)
    end = embedding_inference.rotate(start, features, rates)
    fine = embedding_inference.rotate(start, features, torch.full((800, 6), 0.004, dtype=torch.float64))
    torch.testing.assert_close(end, fine, atol=2e-2, rtol=0)  # spans may be long
    fitted = embedding_inference.fit_features(start, end, rates, positive=True).norm(dim=1)
    true = features.norm(dim=1)
    assert total_variation_distance((fitted / fitted.sum()).numpy(), (true / true.sum()).numpy()) < 0.05


# Clients that do not train.


@pytest.mark.parametrize(("classes", "width", "rate"), [(2, 5, 0.5), (7, 4, 3.0), (10, 32, 40.0)])
def test_embeddings_rotate_as_by_the_plain_formula(classes: int, width: int, rate: float) -> None:
    generator = torch.Generator().manual_seed(classes)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    features, rates = draw(classes, width) / classes, rate * draw(6, classes).abs()
    features[0] = 0  # a class without samples
    start = expected = torch.nn.functional.normalize(draw(classes, width), dim=1)
    for each in rates:
        cosines = torch.nn.functional.normalize(features, dim=1) @ expected.T
        force = features - torch.softmax(cosines, 1).T @ features
        size = force.norm(dim=1, keepdim=True).clamp_min(1e-12)
        angle = (each.unsqueeze(1) * size).clamp_max(15)
        cosine = (expected * force / size).sum(1, keepdim=True)
        moved = expected + force / size * (angle.sinh() + cosine * (angle.cosh() - 1))
        expected = torch.nn.functional.normalize(moved, dim=1)
    torch.testing.assert_close(embedding_inference.rotate(start, features, rates), expected, rtol=0, atol=1e-12)


def test_where_noise_leaves_no_direction_all_classes_are_guessed_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    result = train_on_skewed_digits(rounds=1, clip=1.0, noise=0.001)
    (view,) = observe_uploads(result.engine, state_at(result, "0"), [AttackedBatch(0, (0,))], "epoch")
    features = torch.ones(10, 3, dtype=torch.float64)
    features[5:] *= -1
    monkeypatch.setattr(embedding_inference, "fit_features", lambda *_, **__: features)
    assert embedding_inference.embedding_scores(view).tolist() == [1] * 10
    features[0] *= 1.1
    assert embedding_inference.embedding_scores(view).argmax() == 0


def test_clients_that_never_train_are_left_out() -> None:
    result = gpfl.fit("perfedavg", uneven_federation(60, 8, 60), net="mlp", hidden=4, rounds=1, device="cpu")
    assert result.engine.ineligible_clients == [1]
    labels = infer_label_distributions(result.engine, result.outcome.last, range(3))
    assert [each.client for each in labels] == [result.federation.shards[index].name for index in (0, 2)]
    with pytest.raises(gpfl.GpflError, match="client 1 has too few samples to train: choose another"):
        infer_label_distributions(result.engine, result.outcome.last, [1])


# Secure sums.


@pytest.mark.parametrize("method", ["fedavg", "gpfl"])
def test_under_a_secure_sum_attacks_see_the_mean_alone(method: str) -> None:
    federation = gpfl.federate("digits", clients=4, classes_per_client=3, seed=0)
    result = gpfl.fit(method, federation, net="mlp", device="cpu", rounds=1, lr=0.05, secure_sum=True, engine="loop")
    state = state_at(result, "0")
    views = observe_uploads(result.engine, state, [AttackedBatch(client, (0,)) for client in range(4)], "epoch")
    mean = result.engine.train(state.shared, state.private, range(4), 0).mean
    for view in views:
        assert all(torch.equal(a, b) for a, b in tree.zip_leaves(view.upload, mean))
    labels = infer_label_distributions(result.engine, state, range(4))
    plain = infer_label_distributions(train_on_digits(method).engine, state, range(4))
    assert mean_guess(labels) > mean_guess(plain)
    if method == "fedavg":
        assert mean_guess(labels) > 0.9 * mean_baseline(labels)


def test_under_a_secure_sum_the_others_of_an_attack_on_one_step_take_one_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = gpfl.federate("digits", clients=4, classes_per_client=3, seed=0)
    result = gpfl.fit("fedavg", federation, net="mlp", device="cpu", rounds=1, lr=0.05, secure_sum=True, engine="loop")
    engine, state = result.engine, state_at(result, "0")
    batches = [AttackedBatch(0, (int(federation.shards[0].train[0]),))]
    (view,) = observe_uploads(engine, state, batches, "one")
    plan = engine.plan
    monkeypatch.setattr(engine, "plan", lambda *which: [each[:1] for each in plan(*which)])
    (expected,) = observe_uploads(engine, state, batches, "one")
    assert all(torch.equal(a, b) for a, b in tree.zip_leaves(view.upload, expected.upload))
