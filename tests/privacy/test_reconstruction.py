"""Reconstruction of images: attacks that must succeed, that must fail, and the sign of what they find."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from privacy.blob_runs import SIDE, make_runner, train_on_blobs
from torch import Tensor

import gpfl
from gpfl.core import tree
from gpfl.privacy import geiping, image_metrics
from gpfl.privacy.attack_runner import AttackCase
from gpfl.privacy.gradient_matching import GradientMatching, cotangent_product, initial_logits
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.reconstruction import ATTACKS, AttackConfig, reconstruct
from gpfl.privacy.server_view import ServerView
from gpfl.privacy.uploads import AttackedBatch, choose_batches, load_images, mean_image, observe_uploads, state_at


@pytest.fixture(scope="module")
def fedavg() -> gpfl.Result:
    return train_on_blobs("fedavg")


@pytest.fixture(scope="module")
def trained_fedavg() -> gpfl.Result:
    return train_on_blobs("fedavg", rounds=10)


def observe_images(result: gpfl.Result, count: int = 1) -> tuple[list[AttackedBatch], list[ServerView], Tensor]:
    """Return single images of client 0, the server's views of one step on each, and the images."""
    batches = choose_batches(result.federation, [0], count, [1], 0)[1]
    views = observe_uploads(result.engine, state_at(result, "0"), batches, "one")
    return batches, views, load_images(result.federation, batches)


@pytest.mark.parametrize(
    ("attack", "target", "iterations"), [("dlg", "model", 200), ("geiping", "model", 250), ("geiping", "fe", 400)]
)
def test_one_image_is_reconstructed_from_its_exact_gradient(
    fedavg: gpfl.Result, attack: str, target: str, iterations: int
) -> None:
    _, views, true = observe_images(fedavg)
    found = reconstruct(views, target, attack, true.shape[1:], [(0,)], AttackConfig(iterations=iterations, restarts=2))
    assert float(image_metrics.psnr(true, found.images)) > 25


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_is_reconstructed_from_noise(fedavg: gpfl.Result, attack: str) -> None:
    batches, views, true = observe_images(fedavg, 4)
    rng = torch.Generator().manual_seed(0)

    def add_noise(view: ServerView) -> ServerView:
        upload = tree.map_leaves(lambda t: t + 100 * torch.randn(t.shape, generator=rng), view.upload)
        return dataclasses.replace(view, upload=upload)

    keys = [(batch.samples[0],) for batch in batches]
    config = AttackConfig(iterations=40, restarts=1)
    found = reconstruct([add_noise(view) for view in views], "model", attack, true.shape[1:], keys, config)
    mean = mean_image(fedavg.federation).expand_as(true)
    assert float(image_metrics.psnr(true, found.images).mean()) < float(image_metrics.psnr(true, mean).mean())


def test_private_models_do_not_change_the_reconstruction() -> None:
    result = train_on_blobs("ditto")
    engine, state = result.engine, state_at(result, "best")
    batch = [AttackedBatch(0, (int(engine.federation.shards[0].train[0]),))]
    other = state._replace(private=tree.map_leaves(lambda t: t + 1, state.private))
    views = [observe_uploads(engine, each, batch, "one") for each in (state, other)]
    config = AttackConfig(iterations=3, restarts=1)
    first, second = (reconstruct(each, "model", "geiping", (1, 1, SIDE, SIDE), [(0,)], config) for each in views)
    assert torch.equal(first.images, second.images)


def test_concurrent_searches_find_what_each_finds_alone(fedavg: gpfl.Result) -> None:
    batches, views, true = observe_images(fedavg, 3)
    keys = [(batch.samples[0],) for batch in batches]
    config = AttackConfig(iterations=8, restarts=2)
    concurrent, alone = (
        reconstruct(views, "model", "geiping", true.shape[1:], keys, dataclasses.replace(config, n_concurrent=number))
        for number in (0, 1)
    )
    torch.testing.assert_close(concurrent.images, alone.images, atol=2e-2, rtol=0)
    assert torch.equal(concurrent.initial_logits, alone.initial_logits)


# Sign ambiguity.


def is_upright(true: Tensor, found: Tensor) -> Tensor:
    return image_metrics.psnr(true, found).flatten() > image_metrics.psnr(true, 1 - found).flatten()


def test_the_gradient_distance_alone_resolves_the_sign(trained_fedavg: gpfl.Result) -> None:
    result, target = trained_fedavg, gradient_targets(trained_fedavg.engine.method)["fe"]
    batches = choose_batches(result.federation, range(4), 8, [1], 3)[1]
    views = observe_uploads(result.engine, state_at(result, "best"), batches, "one")
    true = load_images(result.federation, batches)
    matching = GradientMatching(result.engine.method.net, target, views[0].weights, cotangent_product, iterations=200)
    gradients = tree.stack([view.gradient(target.parts) for view in views])
    start = 1 - (0.1 + 0.8 * true)
    found, distances = geiping.reconstruct_with_cotangent(matching, gradients, start)
    inverted = ~is_upright(true, found)
    assert int(inverted.sum()) >= 6, "a search from the negative of an image mostly ends there"
    resolved, closer = geiping.resolve_sign(matching, gradients, found, distances)
    assert int(is_upright(true, resolved)[inverted].sum()) >= int(inverted.sum()) - 1
    assert bool((closer <= distances).all())


def test_the_sign_is_resolved_for_single_images_without_labels_only(
    fedavg: gpfl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def record_shape(
        matching: GradientMatching, gradients: tree.Tree, image: Tensor, distance: Tensor
    ) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(image.shape))
        return 1 - image, distance / 2

    monkeypatch.setattr(geiping, "resolve_sign", record_shape)
    for batch, target in ((1, "fe"), (2, "fe"), (1, "model")):
        runner = make_runner(fedavg, 2, batch, AttackConfig(iterations=2, restarts=2, n_concurrent=3))
        runner.run([AttackCase("fedavg", target, "geiping", "0", "one", batch)])
    assert shapes == [(2, 1, 1, 8, 8)]


def test_every_second_restart_begins_at_the_negative_of_the_one_before() -> None:
    starts = initial_logits((1, 4, 4), [(7, restart) for restart in range(4)], 0)
    assert torch.equal(starts[1], -starts[0])
    assert torch.equal(starts[3], -starts[2])
    assert not torch.equal(starts[2].abs(), starts[0].abs())
