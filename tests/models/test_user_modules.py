"""Nets from the user's modules: frozen weights, saved models, batches of one, and errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import toy_federation
from torch import Tensor, nn
from torch.nn import functional as F

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Phase
from gpfl.core.net import InputSpec
from gpfl.engine import RunSpec
from gpfl.engine.selection import select_engine
from gpfl.inference.client_model import PersonalModule
from gpfl.methods import METHODS
from gpfl.models.custom import net_from_module

FAST = {"rounds": 2, "lr": 0.1}
every_method = pytest.mark.parametrize("method", METHODS)
both_engines = pytest.mark.parametrize("engine", ["loop", "vmap"])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def net(*middle: nn.Module, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), *(middle or (nn.ReLU(),)), nn.Linear(5, 3))


def half_frozen(frozen: tuple[str, ...] = ("0.weight", "2.weight")) -> nn.Sequential:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    for name, parameter in module.named_parameters():
        parameter.data = random(*parameter.shape) / 2
        parameter.requires_grad = name not in frozen
    return module


class Custom(nn.Module):
    """A net with any forward function."""

    def __init__(self, forward: Callable[[Custom, Tensor], object]) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("count", torch.zeros(()))
        self.forward_ = forward

    def forward(self, x: Tensor) -> object:
        return self.forward_(self, x)


def flat(result: gpfl.Result) -> dict[str, Tensor]:
    return tree.flatten({"shared": result.outcome.last.shared, "private": result.outcome.last.private})


# Frozen weights.


@every_method
@both_engines
def test_frozen_weights_are_neither_trained_nor_sent(method: str, engine: str) -> None:
    module = half_frozen()
    frozen = {"base.0.weight": module[0].weight, "base.2.weight": module[2].weight}
    result = gpfl.fit(method, toy_federation(), net=module, engine=engine, **FAST)
    assert not any(path.endswith(("0.weight", "2.weight")) for path in flat(result))
    free = gpfl.fit(method, toy_federation(), net=half_frozen(()), engine=engine, **FAST)
    shared = "shared/base/0.weight" in flat(free)
    assert (result.summary["bytes_down"] < free.summary["bytes_down"]) == shared
    x = result.federation.table.x
    for client in result.clients:
        own = dict(client.module().named_parameters())
        assert all(torch.equal(own[name], value) and not own[name].requires_grad for name, value in frozen.items())
        with torch.no_grad():
            assert np.allclose(client.module()(x).numpy(), client.logits(x), atol=1e-6)
    trained = [result.clients[0].module().get_parameter(name) for name in ("base.0.bias", "head.weight")]
    assert not any(torch.equal(*pair) for pair in zip(trained, (module[0].bias, module[4].weight), strict=True))


@every_method
def test_engines_agree_on_frozen_weights(method: str) -> None:
    one, other = (flat(gpfl.fit(method, toy_federation(), net=half_frozen(), engine=e, **FAST)) for e in ("loop", "vmap"))
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[path], other[path], atol=1e-5) for path in one)


@every_method
@pytest.mark.parametrize("engine", ["loop", pytest.param("vmap", marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", ["base", "head"])
def test_part_that_is_frozen_entirely_can_be_saved_and_resumed(tmp_path: Path, method: str, engine: str, part: str) -> None:
    names = [name for name, _ in half_frozen().named_parameters()]
    frozen = tuple(name for name in names if (name[0] == "4") == (part == "head"))
    federation, module = toy_federation(), half_frozen(frozen)
    result = gpfl.fit(method, federation, net=module, engine=engine, out=tmp_path, **FAST)
    again = gpfl.load(tmp_path, federation=federation, net=module)
    loaded = gpfl.load_model(tmp_path / "models" / "client-0.safetensors", net=module)
    x = federation.table.x
    for model in (again.clients[0], loaded):
        assert np.array_equal(model.logits(x), result.clients[0].logits(x))
    assert result.personalize(x[:20], federation.table.y[:20], rounds=1).logits(x).shape == (120, 3)
    state, clients = again.outcome.last, [client for client in range(4) if again.engine.can_train(client)]
    again.engine.train(state.shared, tree.take(state.private, torch.tensor(clients)), clients, 2)


def test_net_without_trainable_weights_raises() -> None:
    names = tuple(name for name, _ in half_frozen().named_parameters())
    with pytest.raises(gpfl.GpflError, match="net 'custom' has no trainable weight"):
        net_from_module(half_frozen(names), random(2, 6), 3)


def test_function_that_freezes_weights_has_the_same_constants_for_every_seed() -> None:
    def build() -> nn.Module:
        module = net()
        module[0].requires_grad_(False)
        return module

    built = net_from_module(build, random(2, 6), 3)
    assert sorted(tree.flatten(built.init(5))) == ["head/bias", "head/weight"]


# Saved models.


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (net(nn.ReLU(), nn.Linear(5, 5)), "another net: the net's 'base/2.bias' is missing"),
        (nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3)), r"'base/0.bias' has shape \(5,\), in the net \(7,\)"),
        (nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)), "the net has no 'base/0.bias'"),
        (net(nn.BatchNorm1d(5)), "the net's 'base/1.bias' is missing"),
        (net(nn.Identity()), "its weights fit, but its logits differ"),
        (net(nn.LeakyReLU(0.1)), "its weights fit, but its logits differ"),
        ("mlp", "net is the name 'mlp'; pass net only if it was given in Python"),
    ],
    ids=["deeper", "wider", "fewer", "normed", "no relu", "other relu", "name"],
)
def test_model_is_not_loaded_into_another_net(tmp_path: Path, other: object, message: str) -> None:
    result = gpfl.fit("fedper", toy_federation(), net=net(), out=tmp_path / "run", **FAST)
    path = tmp_path / "run" / "models" / "client-0.safetensors"
    assert np.array_equal(
        gpfl.load_model(path, net=net(seed=9)).logits(random(4, 6)), result.clients[0].logits(random(4, 6))
    )  # other weights are no other net
    with pytest.raises(gpfl.GpflError, match=message):
        gpfl.load_model(path, net=other)  # type: ignore[arg-type]
    if other == "mlp":
        with pytest.raises(gpfl.GpflError, match=message):
            gpfl.resume(tmp_path / "run", net=other, federation=toy_federation())  # type: ignore[arg-type]


def test_model_is_not_loaded_with_other_constants(tmp_path: Path) -> None:
    module = half_frozen()
    gpfl.fit("gpfl", toy_federation(), net=module, **FAST).clients[0].save(tmp_path / "model.safetensors")
    gpfl.load_model(tmp_path / "model.safetensors", net=module)
    module[0].weight.data += 0.1
    with pytest.raises(gpfl.GpflError, match="the same constants and activations"):
        gpfl.load_model(tmp_path / "model.safetensors", net=module)


def test_personal_module_raises_if_weights_do_not_fit() -> None:
    result = gpfl.fit("fedavg", toy_federation(), net=net(nn.BatchNorm1d(5)), **FAST)
    method, weights = result.engine.method, result.clients[0].weights
    PersonalModule(method, weights)
    for wrong in (
        tree.drop(weights, ("batch_norm_stats",)),
        {**weights, "base": {**weights["base"], "7.weight": torch.ones(2)}},
    ):
        with pytest.raises(gpfl.GpflError, match="the weights are not those of net 'custom'"):
            PersonalModule(method, wrong)


@pytest.mark.parametrize(
    "spec", [InputSpec((4,)), InputSpec((2, 3), "pixels", pixel_max=16), InputSpec((9,), "tokens", vocabulary=5)], ids=str
)
def test_probe_matches_the_spec_and_has_many_values(spec: InputSpec) -> None:
    probe = spec.probe()
    assert probe.shape == (2, *spec.shape)
    assert probe.dtype == spec.example().dtype
    assert len(probe.unique()) > 3
    assert spec.kind != "pixels" or (probe.min() >= -1 and probe.max() <= 1)


@every_method
@pytest.mark.parametrize("module", ["mlp", net(), lambda: net()], ids=["named", "module", "function"])
def test_module_can_be_pickled(method: str, module: object) -> None:
    client = gpfl.fit(method, toy_federation(), net=module, rounds=1).clients[0]  # type: ignore[arg-type]
    module = client.module()
    again = pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        assert torch.equal(again(random(4, 6)), module(random(4, 6)))


def test_module_of_fedrod_uses_the_statistics_of_a_head_with_batch_norm() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)))
    client = gpfl.fit("fedrod", toy_federation(), net=module, head="1", **FAST).clients[0]
    with torch.no_grad():
        assert np.allclose(client.module()(random(4, 6)).numpy(), client.logits(random(4, 6)), atol=1e-6)


# Batches of one sample.


@pytest.mark.parametrize(
    ("n_samples", "settings", "smallest"),
    [
        (20, {}, 10),
        (21, {}, 10),
        (21, {"drop_last": False}, 1),
        (24, {"drop_last": False}, 4),
        (1, {}, 1),
        (7, {}, 7),
        (3, {"batch_size": 1}, 1),
    ],
)
@pytest.mark.parametrize("batches", [1, 2])
def test_smallest_batch_is_that_of_the_schedule(n_samples: int, settings: dict, smallest: int, batches: int) -> None:
    schedule = Schedule(seed=0, rounds=1, **{"batch_size": 10, **settings})
    first = schedule.batches(np.arange(n_samples))
    sizes = [int((steps >= 0).sum()) for steps in (first[:1] if batches > 1 else first)]
    phase = Phase(None, batches=batches)  # type: ignore[arg-type]
    assert schedule.smallest_batch(n_samples, (phase,)) == min(sizes)
    assert batches > 1 or min(sizes) == smallest


@both_engines
@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ((40, 28), {"drop_last": False}, "client 1 has 21 training samples, which makes a batch of 1 at batch size 10"),
        ((40, 28), {"batch_size": 1}, r"client 0 has 30 .*: raise --batch-size"),
        ((40, 2), {}, r"client 1 has 1 training sample, .*: add samples or leave it out"),
    ],
    ids=["last", "size", "only"],
)
def test_batch_norm_with_a_batch_of_one_raises_before_training(
    tmp_path: Path, engine: str, sizes: tuple[int, ...], settings: dict, message: str
) -> None:
    federation = toy_federation(sizes)
    with pytest.raises(gpfl.GpflError, match=message):
        gpfl.fit("fedavg", federation, net=net(nn.BatchNorm1d(5)), engine=engine, out=tmp_path / "run", **FAST, **settings)
    assert not (tmp_path / "run").exists()
    gpfl.fit("fedavg", federation, net=net(nn.LayerNorm(5)), engine=engine, **FAST, **settings)


def test_new_client_with_a_batch_of_one_raises_with_batch_norm() -> None:
    result = gpfl.fit("fedavg", toy_federation(), net=net(nn.BatchNorm1d(5)), **FAST)
    with pytest.raises(gpfl.GpflError, match="client late has 1 training sample,"):
        result.personalize(random(1, 6), [0], name="late")
    assert result.personalize(random(2, 6), [0, 1]).predict(random(1, 6)).shape == (1,)


def test_batch_norm_over_pixels_takes_a_batch_of_one() -> None:
    images = np.random.default_rng(0).normal(size=(40, 1, 4, 4)).astype(np.float32)
    federation = gpfl.federate([(images[:28], np.arange(28) % 2), (images[28:], np.arange(12) % 2)])
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    assert net_from_module(module, federation.table.inputs(torch.arange(2)), 2).min_batch == 1
    one, other = (
        flat(gpfl.fit("fedavg", federation, net=module, drop_last=False, engine=engine, **FAST)) for engine in ("loop", "vmap")
    )
    assert all(torch.allclose(one[path], other[path], atol=1e-5) for path in one)


# Errors.


def counted(self: Custom, x: Tensor) -> Tensor:
    if self.training:
        self.count += 1
    return self.fc(self.body(x))


def replaced(self: Custom, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return self.fc(self.body(x))


def drifting(self: Custom, x: Tensor) -> Tensor:
    if self.training:
        self.scale = getattr(self, "scale", 1.0) + 1.0
    return self.fc(self.body(x) * getattr(self, "scale", 1.0))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    module[1].weight = module[0].weight
    return module


def double() -> nn.Module:
    return net().double()


def custom(forward: Callable[[Custom, Tensor], object]) -> Callable[[], nn.Module]:
    return lambda: Custom(forward)


ERRORS: dict[str, tuple[object, str]] = {
    "buffer": (custom(counted), "writes to its buffer 'base.count'; it must depend on weights and samples alone"),
    "new buffer": (custom(replaced), "writes to its buffer 'base.count'"),
    "spectral norm": (net(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))), "writes to its buffer 'base.1.param"),
    "attribute": (custom(drifting), "the base of net 'custom' returns another output the second time in training"),
    "dropout in training": (
        custom(lambda self, x: self.fc(F.dropout(self.body(x), 1e-4, self.training))),
        "the base of net 'custom' draws random numbers in training; runs must be repeatable",
    ),
    "dropout always": (
        custom(lambda self, x: self.fc(F.dropout(self.body(x)))),
        "returns different logits when called twice",
    ),
    "batch mean": (
        custom(lambda self, x: self.fc(self.body(x - x.mean(0)))),
        "returns other logits for a sample when the batch changes",
    ),
    "squeeze": (
        custom(lambda self, x: self.fc(self.body(x).squeeze(0).reshape(2, 5))),
        "net 'custom' cannot take a single sample",
    ),
    "attribute of head": (
        custom(lambda self, x: self.fc(self.body(x).reshape(-1, self.fc.in_features))),
        "the net cannot be split at 'fc': 'Identity' object has no attribute 'in_features' (its forward must call it and use",
    ),
    "weight of head": (
        custom(lambda self, x: F.linear(self.body(x), self.fc.weight)),
        "no attribute 'weight' (its forward must",
    ),
    "tuple": (custom(lambda self, x: (self.fc(self.body(x)), x)), "the net returns a tuple; it must return one tensor"),
    "dict": (custom(lambda self, x: {"logits": self.fc(self.body(x))}), "the net returns a dict; it must return one tensor"),
    "error": (
        custom(lambda self, x: {}["weight"]),
        "cannot take samples of shape (6,), which the data has: KeyError: 'weight'",
    ),
    "tied": (tied, "'weight' of the head is also '0.weight' of the base"),
    "double": (double, "'0.weight' of the net is float64; inputs and weights are float32: call net.float()"),
    "lazy": (nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3)), "'0.weight' of the net is lazy and has no shape yet"),
    "number": (5, "net is 5; it must be the name of a net, an nn.Module, or a function that builds one"),
    "class": (nn.Linear, "net is Linear, which cannot be called without arguments (missing a required argument"),
    "width": (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)), "the net cannot take samples of shape (6,), which the data has"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_unusable_net_raises_one_line(tmp_path: Path, case: str) -> None:
    module, message = ERRORS[case]
    federation = toy_federation() if case != "tied" else toy_federation(classes=6)
    before = torch.get_rng_state()
    with pytest.raises(gpfl.GpflError) as error:
        gpfl.fit("fedavg", federation, net=module, out=tmp_path / "run", **FAST)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_may_be_shared_within_a_part() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    module[2].weight = module[0].weight
    client = gpfl.fit("gpfl", toy_federation(), net=module, **FAST).clients[0]
    with torch.no_grad():
        assert np.allclose(client.module()(random(4, 6)).numpy(), client.logits(random(4, 6)), atol=1e-6)


# Nets that cannot be vmapped.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.LSTM(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.cell(x.reshape(-1, 3, 2))[0][:, -1])
        return out


def branching(self: Custom, x: Tensor) -> Tensor:
    h = self.body(x)
    return self.fc(h if self.body.bias.sum() > 100 else h.relu())


@pytest.mark.parametrize(
    "module", [Recurrent(), Custom(branching), net(nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)))]
)
def test_engine_auto_uses_loop_if_torch_cannot_vmap_the_net(module: nn.Module) -> None:
    result = gpfl.fit("gpfl", toy_federation(), net=module, **FAST)
    assert result.summary["engine"] == "loop"


def test_engine_auto_uses_vmap_if_it_can() -> None:
    assert gpfl.fit("gpfl", toy_federation(), net=net(), **FAST).summary["engine"] == "vmap"


def test_engine_vmap_raises_if_it_cannot_run_the_net(tmp_path: Path) -> None:
    with pytest.raises(
        gpfl.GpflError, match=r"engine 'vmap' cannot run gpfl with net 'custom' \(vmap: .*\): use --engine loop"
    ):
        gpfl.fit("gpfl", toy_federation(), net=Custom(branching), engine="vmap", out=tmp_path / "run", **FAST)
    assert not (tmp_path / "run").exists()


def test_engine_selection_tries_a_client_that_can_train() -> None:
    federation = toy_federation((9, 41, 33))
    built = net_from_module(net(nn.BatchNorm1d(5)), federation.table.inputs(torch.arange(2)), 3)
    method = METHODS["perfedavg"]().bind(built, lr=0.1, epochs=1)
    assert select_engine(RunSpec(method, federation, Schedule(seed=0, rounds=1))) == "vmap"
