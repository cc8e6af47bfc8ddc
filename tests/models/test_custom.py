from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpfl.core import tree
from gpfl.core.module_checks import check_layers
from gpfl.core.net import Model, Net
from gpfl.errors import GpflError
from gpfl.models.custom import net_from_module


def example(*shape: int, size: int = 2) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(0))


def eval_output(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module.eval()(x)


def run(net: Net, weights: tree.Tree, x: Tensor) -> Tensor:
    model = Model(net, weights)
    return model("head", model("base", x))


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


class Branching(nn.Module):
    """A net whose head is declared before another linear layer."""

    def __init__(self, after: nn.Module | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.body = nn.Linear(6, 4)
        self.after = after or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.fc(self.body(x).relu()))
        return out


class Normed(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, **settings)  # type: ignore[arg-type]
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.norm(x))
        return out


def test_module_is_split_at_its_last_linear_layer() -> None:
    module, x = small(), example(6)
    net = net_from_module(module, x, 3)
    assert net.width == 5
    assert sorted(tree.flatten(net.init(0))) == ["base/0.bias", "base/0.weight", "head/bias", "head/weight"]
    assert torch.allclose(run(net, net.init(0), x), eval_output(module, x))


def test_named_head_overrides_the_last_linear_layer() -> None:
    module, x = Branching(), example(6)
    with pytest.raises(GpflError, match=r"cannot be split at 'body'.*head="):
        net_from_module(module, x, 3)
    net = net_from_module(module, x, 3, head="fc")
    assert net.width == 4
    assert torch.allclose(run(net, net.init(0), x), eval_output(module, x))


def test_head_may_be_a_nested_block() -> None:
    module, x = (
        nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))),
        example(6),
    )
    assert net_from_module(module, x, 3, head="1.1").width == 4
    assert net_from_module(module, x, 3, head="1").width == 4
    net = net_from_module(module, x, 3, head="1.1")
    assert "head/1.weight" in tree.flatten(net.init(0))
    assert torch.allclose(run(net, net.init(0), x), eval_output(module, x))


@pytest.mark.parametrize(
    ("module", "head"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1)), "0"),
        (nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3), nn.Tanh()), "1"),
        (Branching(nn.Tanh()), "fc"),
    ],
    ids=["softmax", "square", "named"],
)
def test_head_that_is_not_called_last_raises(module: nn.Module, head: str) -> None:
    with pytest.raises(GpflError, match=f"'{head}' is not the last layer that the net calls"):
        net_from_module(module, example(6), 3, head=head)


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        (small(), {"head": "9"}, "the net has no submodule '9'; choose head from: 0, 1, 2"),
        (nn.Sequential(nn.ReLU()), {}, "the net has no linear layer below its top level"),
        (small(), {"classes": 4}, "returns logits of shape (3,); the data has 4 classes"),
        (nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)), {}, "layer 'base.1' has dropout 0.5"),
        (nn.Sequential(nn.Linear(6, 5), nn.Dropout(1), nn.Linear(5, 3)), {}, "layer 'base.1' has dropout 1"),
        (Normed(momentum=None), {}, "layer 'base.norm' has momentum None"),
        (Normed(track_running_stats=False), {}, "layer 'base.norm' normalises by the batch at evaluation: set track_running"),
        (nn.Sequential(nn.Linear(7, 3)), {}, "the net cannot take samples of shape (6,), which the data has: mat1 and mat2"),
        (nn.Sequential(nn.BatchNorm2d(6), nn.Linear(6, 3)), {}, "expected 4D input (got 2D input)"),
        (
            nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 3)),
            {},
            "returns features of shape (2, 3); it must return one vector",
        ),
    ],
    ids=["no such head", "no linear", "classes", "dropout", "only dropout", "momentum", "batch", "input", "rank", "features"],
)
def test_unusable_module_raises(module: nn.Module, settings: dict[str, object], message: str) -> None:
    with pytest.raises(GpflError) as error:
        net_from_module(module, example(6), **{"classes": 3, **settings})  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize("layer", [nn.EmbeddingBag(9, 5, max_norm=1.0), nn.Embedding(9, 5, scale_grad_by_freq=True)])
def test_embeddings_whose_gradient_mixes_samples_raise(layer: nn.Module) -> None:
    with pytest.raises(GpflError, match=r"layer 'base\.0' has max_norm or scale_grad_by_freq"):
        check_layers({"base": nn.Sequential(layer), "head": nn.Linear(5, 3)})


def test_dropout_with_rate_zero_is_allowed() -> None:
    assert net_from_module(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, 3)), example(6), 3).width == 5


def test_module_starts_every_run_with_its_weights_and_is_not_modified() -> None:
    module = small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    net = net_from_module(module, example(6), 3)
    weights = net.init(5)
    assert torch.equal(tree.flatten(weights)["head/weight"], before["2.weight"])
    for leaf in tree.leaves(weights):
        leaf.add_(1)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert torch.equal(tree.flatten(net.init(6))["head/weight"], before["2.weight"])


def test_function_builds_new_weights_for_every_seed() -> None:
    net = net_from_module(lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), example(6), 3)
    first, again, other = (tree.flatten(net.init(seed))["head/weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_function_that_returns_no_module_raises() -> None:
    with pytest.raises(GpflError, match=r"returned int; it must return an nn\.Module"):
        net_from_module(lambda: 3, example(6), 3)  # type: ignore[arg-type, return-value]
