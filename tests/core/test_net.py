from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpfl.core import tree
from gpfl.core.module_checks import check_layers
from gpfl.core.net import InputSpec, Model, Net
from gpfl.errors import GpflError
from gpfl.models import NETS
from gpfl.models.architecture import Architecture, net_from_architecture
from gpfl.models.cnn4 import CNN4
from gpfl.models.fasttext import FastText
from gpfl.models.harcnn import HARCNN
from gpfl.models.mlp import MLP
from gpfl.models.resnet18 import ResNet18
from gpfl.models.splitting import net_from_module


def example(*shape: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0))


def whole(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module.eval()(x)


def run(net: Net, weights: tree.Tree, x: Tensor) -> Tensor:
    model = Model(net, weights)
    return model("head", model("base", x))


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


class Branching(nn.Module):
    """A net with its head declared first and a linear layer of its own before it."""

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


# Named architectures.


@pytest.mark.parametrize(
    ("shape", "classes", "parameters"),
    [((1, 28, 28), 10, 582_026), ((3, 32, 32), 100, 924_708), ((3, 64, 64), 200, 5_694_600)],
)
def test_cnn4_has_as_many_parameters_as_the_papers_net(shape: tuple[int, ...], classes: int, parameters: int) -> None:
    net = net_from_architecture(CNN4(), "cnn4", example(*shape), classes)
    assert sum(t.numel() for t in tree.leaves(net.init(0))) == parameters
    assert net.width == 512


@pytest.mark.parametrize("side", [4, 8, 15, 16])
def test_cnn4_takes_small_images(side: int) -> None:
    x = example(1, side, side)
    net = net_from_architecture(CNN4(channels=(2, 3), hidden=5), "cnn4", x, 4)
    assert run(net, net.init(0), x).shape == (2, 4)


def test_cnn4_refuses_what_is_no_image_and_what_is_too_small() -> None:
    with pytest.raises(GpflError, match=r"takes images \(channels, height, width\); the data has shape \(6,\)"):
        net_from_architecture(CNN4(), "cnn4", example(6), 3)
    with pytest.raises(GpflError, match="at least 4×4; the data has 3×8"):
        net_from_architecture(CNN4(), "cnn4", example(1, 3, 8), 3)


def test_an_mlp_flattens_rows_of_any_shape_and_ends_in_its_last_width() -> None:
    net = net_from_architecture(MLP(hidden=(7, 5)), "mlp", example(2, 3), 4)
    weights = net.init(0)
    assert net.width == 5
    assert {name: tuple(t.shape) for name, t in tree.flatten(weights).items() if name.endswith("weight")} == {
        "base/fc1.0.weight": (7, 6),
        "base/fc2.0.weight": (5, 7),
        "head/weight": (4, 5),
    }


@pytest.mark.parametrize("name", NETS)
def test_a_named_net_draws_its_weights_from_the_seed_alone(name: str) -> None:
    forms = {"harcnn": InputSpec((2, 1, 28)), "fasttext": InputSpec((7,), "tokens", vocabulary=9)}
    form = forms.get(name, InputSpec((1, 8, 8)))
    net = net_from_architecture(NETS[name]().fit_input(form), name, form.example(), 3)
    first = tree.flatten(net.init(1))
    torch.manual_seed(99)
    assert all(torch.equal(t, first[path]) for path, t in tree.flatten(net.init(1)).items())
    last = next(path for path in first if path.startswith("head/") and path.endswith("weight"))
    assert not torch.equal(tree.flatten(net.init(2))[last], first[last])


# Nets from modules.


def test_a_module_is_cut_at_its_last_linear_layer() -> None:
    module, x = small(), example(6)
    net = net_from_module(module, x, 3)
    assert net.width == 5
    assert sorted(tree.flatten(net.init(0))) == ["base/0.bias", "base/0.weight", "head/bias", "head/weight"]
    assert torch.allclose(run(net, net.init(0), x), whole(module, x))


def test_a_named_head_overrides_the_last_linear_layer() -> None:
    module, x = Branching(), example(6)
    with pytest.raises(GpflError, match=r"cannot be split at 'body'.*head="):
        net_from_module(module, x, 3)
    net = net_from_module(module, x, 3, head="fc")
    assert net.width == 4
    assert torch.allclose(run(net, net.init(0), x), whole(module, x))


def test_a_head_may_be_a_block_deep_in_the_module() -> None:
    module, x = (
        nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)))),
        example(6),
    )
    assert net_from_module(module, x, 3, head="1.1").width == 4
    assert net_from_module(module, x, 3, head="1").width == 4
    net = net_from_module(module, x, 3, head="1.1")
    assert "head/1.weight" in tree.flatten(net.init(0))
    assert torch.allclose(run(net, net.init(0), x), whole(module, x))


@pytest.mark.parametrize(
    ("module", "head"),
    [
        (nn.Sequential(nn.Linear(6, 3), nn.Softmax(-1)), "0"),
        (nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3), nn.Tanh()), "1"),
        (Branching(nn.Tanh()), "fc"),
    ],
    ids=["softmax", "square", "named"],
)
def test_a_head_that_is_not_the_last_thing_is_refused_though_shapes_fit(module: nn.Module, head: str) -> None:
    with pytest.raises(GpflError, match=f"'{head}' is not the last layer that the net calls"):
        net_from_module(module, example(6), 3, head=head)


@pytest.mark.parametrize(
    ("module", "settings", "words"),
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
def test_a_module_that_cannot_serve_is_refused(module: nn.Module, settings: dict[str, object], words: str) -> None:
    with pytest.raises(GpflError) as problem:
        net_from_module(module, example(6), **{"classes": 3, **settings})  # type: ignore[arg-type]
    assert words in str(problem.value)


@pytest.mark.parametrize("layer", [nn.EmbeddingBag(9, 5, max_norm=1.0), nn.Embedding(9, 5, scale_grad_by_freq=True)])
def test_embeddings_whose_steps_depend_on_the_rows_of_a_batch_are_refused(layer: nn.Module) -> None:
    with pytest.raises(GpflError, match=r"layer 'base\.0' has max_norm or scale_grad_by_freq"):
        check_layers({"base": nn.Sequential(layer), "head": nn.Linear(5, 3)})


def test_dropout_of_nothing_is_no_dropout() -> None:
    assert net_from_module(nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, 3)), example(6), 3).width == 5


def test_a_module_starts_every_run_from_its_own_weights_and_is_left_alone() -> None:
    module = small()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    net = net_from_module(module, example(6), 3)
    weights = net.init(5)
    assert torch.equal(tree.flatten(weights)["head/weight"], before["2.weight"])
    for leaf in tree.leaves(weights):
        leaf.add_(1)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert torch.equal(tree.flatten(net.init(6))["head/weight"], before["2.weight"])


def test_a_function_builds_new_weights_for_every_seed() -> None:
    net = net_from_module(lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), example(6), 3)
    first, again, other = (tree.flatten(net.init(seed))["head/weight"] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_function_that_builds_no_module_is_refused() -> None:
    with pytest.raises(GpflError, match=r"returned int; it must return an nn\.Module"):
        net_from_module(lambda: 3, example(6), 3)  # type: ignore[arg-type, return-value]


# Models.


def test_a_model_uses_the_weights_it_is_given_and_not_the_templates() -> None:
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
    assert torch.allclose(run(net, weights, x), whole(small(7), x))


def test_training_passes_collect_batchnorm_statistics_as_torch_does_and_mutate_nothing() -> None:
    module, batches = Normed(), [example(6, rows=5) + 1, example(6, rows=4) * 3]
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


def test_a_frozen_model_uses_its_statistics_and_collects_none() -> None:
    net, x = net_from_module(Normed(), example(6), 3), example(6, rows=4) + 2
    weights = net.init(0)
    tree.leaf(tree.branch(tree.branch(weights, "batch_norm_stats"), "base"), "norm.running_mean").fill_(2.0)
    model = Model(net, weights)
    assert torch.allclose(model("base", x), (x - 2) / (1 + 1e-5) ** 0.5, atol=1e-6)
    assert torch.equal(tree.flatten(model.batch_norm_stats)["base/norm.running_mean"], torch.full((6,), 2.0))


def test_only_nets_with_running_statistics_keep_them() -> None:
    assert net_from_module(Normed(), example(6), 3).has_batch_norm
    plain = net_from_module(small(), example(6), 3)
    assert not plain.has_batch_norm
    assert "batch_norm_stats" not in plain.init(0)


def parameters(architecture: Architecture, shape: tuple[int, ...], classes: int) -> int:
    return sum(p.numel() for part in architecture.build(shape, classes).values() for p in part.parameters())


@pytest.mark.parametrize(
    ("architecture", "shape", "classes", "width", "count"),
    [
        (ResNet18(), (3, 64, 64), 200, 512, 11_279_112),
        (FastText(vocabulary=98_635), (200,), 4, 32, 3_157_508),
        (MLP(hidden=(1000, 500, 100)), (5000,), 2, 100, 5_551_802),
        (HARCNN(), (9, 1, 128), 6, 1664, 2_253_958),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Architecture) else str(value),
)
def test_backbones_of_the_paper_have_its_widths_and_parameters(architecture, shape, classes, width, count) -> None:
    form = InputSpec(shape, "tokens" if isinstance(architecture, FastText) else "floats")
    net = net_from_architecture(architecture, "net", form.example(), classes)
    assert net.width == width
    assert parameters(architecture, shape, classes) == count


def test_head_of_harcnn_is_the_whole_perceptron() -> None:
    head = HARCNN().build((9, 1, 128), 6)["head"]
    assert sum(p.numel() for p in head.parameters()) == 2_232_838


def test_resnet18_gives_what_its_layers_give_one_by_one() -> None:
    base = ResNet18().build((3, 32, 32), 5)["base"].eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    h = torch.relu(base.stem[1](base.stem[0](x)))
    h = torch.nn.functional.max_pool2d(h, 3, 2, 1)
    for stage in (base.stage1, base.stage2, base.stage3, base.stage4):
        for block in stage:
            inner = block.norm2(block.conv2(torch.relu(block.norm1(block.conv1(h)))))
            h = torch.relu(inner + (block.shortcut(h) if len(block.shortcut) else h))
    torch.testing.assert_close(base(x), h.mean((2, 3)))


def test_fasttext_takes_the_mean_over_all_positions_and_pads_with_zeros() -> None:
    architecture = FastText(hidden=4).fit_input(InputSpec((6,), "tokens", vocabulary=9))
    base = architecture.build((6,), 3)["base"]
    words = torch.tensor([[3, 5, 0, 0, 0, 0]])
    table = base.embedding.weight
    assert not table[0].any()
    torch.testing.assert_close(base(words), base.fc1((table[3] + table[5]) / 6).unsqueeze(0))


@pytest.mark.parametrize(
    ("architecture", "shape"), [(ResNet18(), (5,)), (HARCNN(), (9, 1, 27)), (HARCNN(), (9, 128)), (FastText(), (200,))]
)
def test_net_for_other_rows_is_refused(architecture: Architecture, shape: tuple[int, ...]) -> None:
    with pytest.raises(GpflError, match="takes"):
        architecture.build(shape, 3)
