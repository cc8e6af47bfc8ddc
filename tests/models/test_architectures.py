from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.net import InputSpec, Model, Net
from gpfl.errors import GpflError
from gpfl.models import NETS
from gpfl.models.architectures import CNN4, HARCNN, MLP, Architecture, FastText, ResNet18, net_from_architecture


def example(*shape: int, size: int = 2) -> Tensor:
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(0))


def run(net: Net, weights: tree.Tree, x: Tensor) -> Tensor:
    model = Model(net, weights)
    return model("head", model("base", x))


@pytest.mark.parametrize(
    ("shape", "classes", "parameters"),
    [((1, 28, 28), 10, 582_026), ((3, 32, 32), 100, 924_708), ((3, 64, 64), 200, 5_694_600)],
)
def test_cnn4_has_the_parameters_of_the_paper(shape: tuple[int, ...], classes: int, parameters: int) -> None:
    net = net_from_architecture(CNN4(), "cnn4", example(*shape), classes)
    assert sum(t.numel() for t in tree.leaves(net.init(0))) == parameters
    assert net.width == 512


@pytest.mark.parametrize("side", [4, 8, 15, 16])
def test_cnn4_takes_small_images(side: int) -> None:
    x = example(1, side, side)
    net = net_from_architecture(CNN4(channels=(2, 3), hidden=5), "cnn4", x, 4)
    assert run(net, net.init(0), x).shape == (2, 4)


def test_cnn4_raises_for_vectors_and_tiny_images() -> None:
    with pytest.raises(GpflError, match=r"takes images \(channels, height, width\); the data has shape \(6,\)"):
        net_from_architecture(CNN4(), "cnn4", example(6), 3)
    with pytest.raises(GpflError, match="at least 4×4; the data has 3×8"):
        net_from_architecture(CNN4(), "cnn4", example(1, 3, 8), 3)


def test_mlp_flattens_samples_of_any_shape() -> None:
    net = net_from_architecture(MLP(hidden=(7, 5)), "mlp", example(2, 3), 4)
    weights = net.init(0)
    assert net.width == 5
    assert {name: tuple(t.shape) for name, t in tree.flatten(weights).items() if name.endswith("weight")} == {
        "base/fc1.0.weight": (7, 6),
        "base/fc2.0.weight": (5, 7),
        "head/weight": (4, 5),
    }


@pytest.mark.parametrize("name", NETS)
def test_initial_weights_depend_on_the_seed_alone(name: str) -> None:
    specs = {"harcnn": InputSpec((2, 1, 28)), "fasttext": InputSpec((7,), "tokens", vocabulary=9)}
    spec = specs.get(name, InputSpec((1, 8, 8)))
    net = net_from_architecture(NETS[name]().fit_input(spec), name, spec.example(), 3)
    first = tree.flatten(net.init(1))
    torch.manual_seed(99)
    assert all(torch.equal(t, first[path]) for path, t in tree.flatten(net.init(1)).items())
    last = next(path for path in first if path.startswith("head/") and path.endswith("weight"))
    assert not torch.equal(tree.flatten(net.init(2))[last], first[last])


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
def test_architectures_have_the_widths_and_parameters_of_the_paper(architecture, shape, classes, width, count) -> None:
    spec = InputSpec(shape, "tokens" if isinstance(architecture, FastText) else "floats")
    net = net_from_architecture(architecture, "net", spec.example(), classes)
    assert net.width == width
    assert parameters(architecture, shape, classes) == count


def test_head_of_harcnn_is_the_perceptron() -> None:
    head = HARCNN().build((9, 1, 128), 6)["head"]
    assert sum(p.numel() for p in head.parameters()) == 2_232_838


def test_resnet18_equals_its_layers_applied_one_by_one() -> None:
    base = ResNet18().build((3, 32, 32), 5)["base"].eval()
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    h = torch.relu(base.stem[1](base.stem[0](x)))
    h = torch.nn.functional.max_pool2d(h, 3, 2, 1)
    for stage in (base.stage1, base.stage2, base.stage3, base.stage4):
        for block in stage:
            inner = block.norm2(block.conv2(torch.relu(block.norm1(block.conv1(h)))))
            h = torch.relu(inner + (block.shortcut(h) if len(block.shortcut) else h))
    torch.testing.assert_close(base(x), h.mean((2, 3)))


def test_fasttext_averages_all_positions_and_pads_with_zeros() -> None:
    architecture = FastText(hidden=4).fit_input(InputSpec((6,), "tokens", vocabulary=9))
    base = architecture.build((6,), 3)["base"]
    tokens = torch.tensor([[3, 5, 0, 0, 0, 0]])
    table = base.embedding.weight
    assert not table[0].any()
    torch.testing.assert_close(base(tokens), base.fc1((table[3] + table[5]) / 6).unsqueeze(0))


@pytest.mark.parametrize(
    ("architecture", "shape"), [(ResNet18(), (5,)), (HARCNN(), (9, 1, 27)), (HARCNN(), (9, 128)), (FastText(), (200,))]
)
def test_samples_of_another_shape_raise(architecture: Architecture, shape: tuple[int, ...]) -> None:
    with pytest.raises(GpflError, match="takes"):
        architecture.build(shape, 3)
