from __future__ import annotations

import torch
from torch import Tensor, nn

from gpfl.core import tree
from gpfl.core.net import Model, Net
from gpfl.models.custom import net_from_module


def example(*shape: int, size: int = 2) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(0))


def eval_output(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module.eval()(x)


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


class Normed(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, **settings)  # type: ignore[arg-type]
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.norm(x))
        return out


def run(net: Net, weights: tree.Tree, x: Tensor) -> Tensor:
    model = Model(net, weights)
    return model("head", model("base", x))


def test_model_uses_its_weights_and_not_those_of_the_net() -> None:
    net, x = net_from_module(small(), example(6), 3), example(6)
    other = {name: p.detach() for name, p in small(7).named_parameters()}
    weights = tree.unflatten(
        {
            "base/0.weight": other["0.weight"],
            "base/0.bias": other["0.bias"],
            "head/weight": other["2.weight"],
            "head/bias": other["2.bias"],
        }
    )
    assert torch.allclose(run(net, weights, x), eval_output(small(7), x))


def test_training_passes_collect_batch_norm_statistics_and_modify_nothing() -> None:
    module, batches = Normed(), [example(6, size=5) + 1, example(6, size=4) * 3]
    net = net_from_module(module, example(6), 3)
    weights = net.init(0)
    before = {path: t.clone() for path, t in tree.flatten(weights).items()}
    model = Model(net, weights, training=True)
    outputs = [model("base", x) for x in batches]
    module.train()
    expected = [module.norm(x) for x in batches]
    assert all(torch.allclose(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))
    stats = tree.flatten(model.batch_norm_stats)
    assert torch.allclose(stats["base/norm.running_mean"], module.norm.running_mean)
    assert torch.allclose(stats["base/norm.running_var"], module.norm.running_var)
    assert not torch.equal(stats["base/norm.running_mean"], before["batch_norm_stats/base/norm.running_mean"])
    assert all(torch.equal(t, before[path]) for path, t in tree.flatten(weights).items())


def test_eval_pass_uses_statistics_and_collects_none() -> None:
    net, x = net_from_module(Normed(), example(6), 3), example(6, size=4) + 2
    weights = net.init(0)
    tree.leaf(tree.branch(tree.branch(weights, "batch_norm_stats"), "base"), "norm.running_mean").fill_(2.0)
    model = Model(net, weights)
    assert torch.allclose(model("base", x), (x - 2) / (1 + 1e-5) ** 0.5, atol=1e-6)
    assert torch.equal(tree.flatten(model.batch_norm_stats)["base/norm.running_mean"], torch.full((6,), 2.0))


def test_only_nets_with_batch_norm_have_statistics() -> None:
    assert net_from_module(Normed(), example(6), 3).has_batch_norm
    plain = net_from_module(small(), example(6), 3)
    assert not plain.has_batch_norm
    assert "batch_norm_stats" not in plain.init(0)
