"""Gradients of dummies, the targets they are taken of, and batched L-BFGS."""

from __future__ import annotations

import pytest
import torch
from privacy.blob_runs import SIDE, smooth_net, train_on_blobs
from torch import Tensor

import gpfl
from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.core.net import Model
from gpfl.experiments.privacy_table import COLUMNS
from gpfl.methods import METHODS
from gpfl.methods.gpfl import embeddings_of, valve
from gpfl.models.architectures import CNN4, net_from_architecture
from gpfl.privacy import lbfgs
from gpfl.privacy.gradient_matching import GradientMatching, cosine_distance, cotangent_product
from gpfl.privacy.gradient_targets import gradient_targets, select_target


def bind(method: str, **options: object) -> Method:
    return METHODS[method](**options).bind(smooth_net(), lr=0.1, epochs=1)


def test_methods_offer_the_papers_targets() -> None:
    assert {column.method: set(gradient_targets(bind(column.method))) for column in COLUMNS} == {
        "fedper": {"fe"},
        "fedrep": {"fe"},
        "fedavg": {"fe", "model"},
        "fedrod": {"fe", "model"},
        "gpfl": {"fe", "sfe", "sm"},
    }
    with pytest.raises(gpfl.GpflError, match="fedproto has no target 'fe'"):
        select_target(bind("fedproto"), "fe")


def test_targets_of_gpfl_are_its_global_route_and_its_cosines() -> None:
    result = train_on_blobs("gpfl")
    method, shared = result.engine.method, result.outcome.last.shared
    x = torch.rand(3, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    model, targets = Model(method.net, shared), gradient_targets(method)
    features = valve(model["cov"], model("base", x), embeddings_of(shared).mean(0))
    torch.testing.assert_close(targets["sfe"].output(model, x), features)
    normalize = torch.nn.functional.normalize
    cosines = normalize(features, dim=-1) @ normalize(embeddings_of(shared), dim=-1).T
    torch.testing.assert_close(targets["sm"].output(model, x), cosines)


def test_a_defended_method_has_the_targets_of_the_method() -> None:
    method = train_on_blobs("gpfl", clip=1.0).engine.method
    assert set(gradient_targets(method)) == {"fe", "sfe", "sm"}


def test_gradients_through_relu_and_pooling_are_the_same_batched_and_alone() -> None:
    net = net_from_architecture(CNN4(channels=(3, 4), hidden=8), "cnn4", torch.zeros(2, 1, 16, 16), 4)
    method = METHODS["fedavg"]().bind(net, lr=0.1, epochs=1)
    rng = torch.Generator().manual_seed(0)
    images, outputs = torch.rand(3, 2, 1, 16, 16, generator=rng), torch.randn(3, 2, 8, generator=rng)
    matching = GradientMatching(net, gradient_targets(method)["fe"], method.init(0)[0], cotangent_product)
    gradients = torch.func.vmap(matching.gradient)(images.flip(0), outputs)

    def distance(image: Tensor, output: Tensor, gradient: tree.Tree) -> Tensor:
        return cosine_distance(matching.gradient(image, output), gradient)

    batched = torch.func.vmap(torch.func.grad(distance))(images, outputs, gradients)
    assert float(batched.abs().sum()) > 0
    for index in range(3):
        alone = images[index].clone().requires_grad_()
        distance(alone, outputs[index], tree.take(gradients, index)).backward()
        torch.testing.assert_close(batched[index], alone.grad, atol=1e-6, rtol=1e-4)


def test_lbfgs_solves_each_problem_at_its_own_pace() -> None:
    rng = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 12, generator=rng)
    scales = torch.logspace(0, 3, 12)[None] * torch.tensor([1.0, 0.1, 10.0, 1.0, 100.0])[:, None]

    def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
        offsets = points - centres
        return 2 * scales * offsets + 4 * offsets**3, (scales * offsets**2 + offsets**4).sum(-1)

    state = lbfgs.init(torch.zeros(5, 12), evaluate)
    for _ in range(120):
        state = lbfgs.step(state, evaluate)
    torch.testing.assert_close(tree.leaf(state, "point"), centres, atol=1e-3, rtol=1e-3)
