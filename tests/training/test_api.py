"""The Python interface: fit, resume, load and load_model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from conftest import toy_federation, toy_table
from torch import nn

import gpfl
from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms
from gpfl.core.net import Shape
from gpfl.core.options import option
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.methods import METHODS
from gpfl.methods.fedavg import FedAvg
from gpfl.methods.gpfl import GPFL
from gpfl.models.architectures import MLP, Architecture, Parts

FAST = {"rounds": 2, "lr": 0.1, "engine": "loop"}


def small_net(seed: int = 0) -> nn.Module:
    """Return a module whose last linear layer is not at its top level."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)))


class TwoLayerHead(nn.Module):
    """A module whose head has two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.decision = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decision(self.body(x))


@dataclass(frozen=True, kw_only=True)
class Narrow(Architecture):
    """An architecture that is not in NETS."""

    lr: ClassVar[float] = 0.02
    width: int = option(4, "width of the features", min=1)

    def build(self, shape: Shape, classes: int) -> Parts:
        return {"base": nn.Sequential(nn.Linear(shape[0], self.width), nn.Tanh()), "head": nn.Linear(self.width, classes)}


def flat(result: gpfl.Result) -> dict[str, torch.Tensor]:
    return tree.flatten({"shared": result.outcome.last.shared, "private": result.outcome.last.private})


def same(one: gpfl.Result, other: gpfl.Result) -> bool:
    a, b = flat(one), flat(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# Arguments of fit.


@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_by_name(method: str) -> None:
    result = gpfl.fit(method, toy_federation(), net="mlp", rounds=6, lr=0.1)
    assert result.summary["method"] == method
    assert result.accuracy > 0.9
    assert result.history[-1]["loss"] < result.history[0]["loss"]
    if method != "fedavg-ft":  # even its untrained model is fine-tuned
        assert result.history[0]["accuracy"] < 0.9
    assert result.accuracy == result.history[-1]["accuracy"]


def test_method_instance_equals_its_name_and_options() -> None:
    federation = toy_federation()
    by_name = gpfl.fit("gpfl", federation, net="mlp", lam=0.5, mu=0.0, **FAST)
    by_record = gpfl.fit(GPFL(lam=0.5, mu=0.0), federation, net="mlp", **FAST)
    assert same(by_name, by_record)
    assert not same(by_name, gpfl.fit("gpfl", federation, net="mlp", lam=0.1, mu=0.0, **FAST))


def test_fit_takes_a_users_method() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Head(FedAvg):
        """FedAvg that shares the head alone."""

        name: ClassVar[str] = "head-only"
        shares: ClassVar[tuple[str, ...]] = ("head",)

    result = gpfl.fit(Head(), toy_federation(), net="mlp", **FAST)
    assert result.summary["method"] == "head-only"
    assert list(result.outcome.last.shared) == ["head"]


def test_method_whose_steps_return_no_loss_terms_is_an_error() -> None:
    @dataclass(frozen=True, kw_only=True)
    class NoTerms(FedAvg):
        """FedAvg without loss terms."""

        name: ClassVar[str] = "no-terms"

        def step(self, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
            return super().step(shared, local_state, batch, client)[0], {}

    with pytest.raises(GpflError, match="the steps of method 'no-terms' return no loss terms: return at least one"):
        gpfl.fit(NoTerms(), toy_federation(), net="mlp", **FAST)


def test_default_net_depends_on_the_shape_of_the_samples() -> None:
    assert gpfl.fit("fedavg", toy_federation(), **FAST).summary["net"] == "mlp"
    images = np.random.default_rng(0).normal(size=(24, 1, 6, 6)).astype(np.float32)
    federation = gpfl.federate([(images[:12], np.arange(12) % 2), (images[12:], np.arange(12) % 2)])
    assert gpfl.fit("fedavg", federation, rounds=1, lr=0.01).summary["net"] == "cnn4"


def test_module_starts_from_its_weights_and_is_not_changed() -> None:
    module = small_net()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    result = gpfl.fit("fedavg", toy_federation(), net=module, **FAST)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    start, _ = result.engine.method.init(seed=5)
    assert torch.equal(tree.flatten(start)["base/0.weight"], before["0.weight"])
    assert torch.equal(tree.flatten(start)["head/weight"], before["2.2.weight"])


def test_function_as_net_draws_weights_by_seed() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    federation = toy_federation()
    first, again, other = (gpfl.fit("fedavg", federation, net=build, seed=seed, **FAST) for seed in (0, 0, 1))
    assert same(first, again)
    starts = [tree.flatten(result.engine.method.init(seed)[0])["head/weight"] for result, seed in ((first, 0), (other, 1))]
    assert not torch.equal(*starts)


def test_users_architecture_is_built_for_the_data() -> None:
    result = gpfl.fit("gpfl", toy_federation(), net=Narrow(width=7), rounds=2, engine="loop")
    assert result.engine.method.net.width == 7
    assert result.engine.method.lr == 0.02
    assert result.summary["net"] == "Narrow"


def test_named_architecture_as_an_instance_is_that_net() -> None:
    federation = toy_federation()
    assert same(gpfl.fit("fedavg", federation, net=MLP(), **FAST), gpfl.fit("fedavg", federation, net="mlp", **FAST))


def test_head_can_be_named() -> None:
    usual = gpfl.fit("gpfl", toy_federation(), net=TwoLayerHead(), **FAST)
    named = gpfl.fit("gpfl", toy_federation(), net=TwoLayerHead(), head="decision", **FAST)
    assert usual.engine.method.net.width == 4
    assert named.engine.method.net.width == 8
    assert {"private/head/0.weight", "private/head/2.weight"} <= flat(named).keys()


def test_clients_can_have_names_and_their_own_test_samples() -> None:
    table = toy_table(60)
    x, y = table.x.numpy(), table.y.numpy()
    federation = gpfl.federate({"north": (x[:20], y[:20], x[40:50], y[40:50]), "south": (x[20:40], y[20:40], x[50:], y[50:])})
    result = gpfl.fit("local", federation, net="mlp", **FAST)
    assert [client.name for client in result.clients] == ["north", "south"]
    own = [result.clients[0].score(x[40:50], y[40:50]), result.clients[1].score(x[50:], y[50:])]
    assert result.history[-1]["client_accuracies"] == dict(zip(("north", "south"), own, strict=True))


def test_runs_are_equal_for_equal_seeds_only() -> None:
    federation = toy_federation()
    one, again, other = (gpfl.fit("gpfl", federation, net="mlp", seed=seed, client_fraction=0.5, **FAST) for seed in (3, 3, 4))
    assert same(one, again)
    assert not same(one, other)


def test_fit_does_not_use_torchs_global_generator() -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    gpfl.fit("gpfl", toy_federation(), net="mlp", **FAST)
    assert torch.equal(torch.rand(3), wanted)


def test_run_without_out_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gpfl.fit("gpfl", toy_federation(), net="mlp", **FAST)
    assert list(tmp_path.iterdir()) == []


def test_run_folder_holds_the_documented_files(tmp_path: Path) -> None:
    result = gpfl.fit("gpfl", toy_federation(), net="mlp", out=tmp_path / "run", **FAST)
    found = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file())
    models = [f"models/client-{k}.safetensors" for k in range(4)]
    wanted = [
        "checkpoint.safetensors",
        "config.toml",
        "federation.toml",
        "metrics.json",
        "metrics.jsonl",
        *models,
        "summary.json",
    ]
    assert found == wanted
    documented = "method best_round best_accuracy std cov last_accuracy rounds seconds bytes_up bytes_down engine device seed"
    assert {*documented.split(), "selected_accuracy", "selected_std", "selected_cov", "metric"} <= result.summary.keys()
    assert {"round", "accuracy", "loss", "client_accuracies", "seconds"} <= result.history[0].keys()


# Errors.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"method": "gpfll"}, "unknown method 'gpfll'; did you mean 'gpfl'?"),
        ({"net": "mpl"}, "unknown net 'mpl'; did you mean 'mlp'?"),
        ({"round": 3}, "unknown setting 'round'; did you mean 'rounds'?"),
        ({"lr": -0.1}, "train.lr is -0.1; it must be above 0"),
        ({"rounds": 0}, "train.rounds is 0; it must be at least 1"),
        ({"rounds": 2.5}, "train.rounds is 2.5; it must be an integer"),
        ({"client_fraction": (0.9, 0.1)}, "the lower fraction must come first"),
        ({"engine": "vmpa"}, "did you mean 'vmap'?"),
        ({"device": "cuda:99"}, "run.device is 'cuda:99', which cannot be used here"),
        ({"lam": -1.0}, "method.lam is -1.0; it must be at least 0"),
        ({"method": "fedavg", "lam": 1.0}, "unknown setting 'lam'"),
        ({"net": "cnn4"}, "net 'cnn4' takes images"),
        ({"net": nn.Linear(6, 3)}, "the net has no linear layer below its top"),
        ({"net": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))}, "the data has 3 classes"),
        ({"net": nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))}, "the net cannot take samples of shape (6,)"),
        ({"net": nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))}, "has dropout 0.5"),
        ({"net": small_net(), "head": "decision"}, "the net has no submodule 'decision'"),
        ({"net": lambda: 3}, "the function passed as net returned int"),
    ],
)
def test_error_in_a_call_is_one_line_and_nothing_is_written(tmp_path: Path, call: dict[str, object], message: str) -> None:
    settings = {"method": "gpfl", "net": "mlp", "rounds": 1, **call}
    with pytest.raises(gpfl.GpflError) as error:
        gpfl.fit(settings.pop("method"), toy_federation(), out=tmp_path / "run", **settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("net", ["mlp", MLP(), None], ids=["name", "architecture", "none"])
def test_head_without_a_module_is_an_error(tmp_path: Path, net: object) -> None:
    with pytest.raises(gpfl.GpflError, match="head is '0', but net is not a module that could have it"):
        gpfl.fit("gpfl", toy_federation(), net=net, head="0", **FAST)  # type: ignore[arg-type]
    gpfl.fit("fedavg", toy_federation(), net="mlp", out=tmp_path, **FAST)
    again: list[Callable[[], object]] = [
        lambda: gpfl.resume(tmp_path, federation=toy_federation(), head="0"),
        lambda: gpfl.load(tmp_path, federation=toy_federation(), head="0"),
        lambda: gpfl.load_model(tmp_path / "models" / "client-0.safetensors", head="0"),
    ]
    for call in again:
        with pytest.raises(gpfl.GpflError, match="head is '0', but net is not a module"):
            call()


@pytest.mark.parametrize("device", ["meta", "foo", "cuda:x", "CPU", ""])
def test_unknown_device_is_an_error(tmp_path: Path, device: str) -> None:
    with pytest.raises(gpfl.GpflError, match=f"run.device is '{device}'; it must be auto, cpu, cuda, cuda:N or mps"):
        gpfl.fit("fedavg", toy_federation(), net="mlp", device=device, out=tmp_path / "run", **FAST)
    assert not (tmp_path / "run").exists()


def test_settings_can_be_numpy_numbers(tmp_path: Path) -> None:
    federation = toy_federation()
    settings = {"rounds": np.int64(2), "lr": np.float32(0.5), "seed": np.uint32(3), "engine": "loop"}
    mine = gpfl.fit("fedavg", federation, net="mlp", out=tmp_path, **settings)
    assert same(mine, gpfl.fit("fedavg", federation, net="mlp", rounds=2, lr=0.5, seed=3, engine="loop"))
    assert same(mine, gpfl.load(tmp_path, federation=federation))


def test_run_with_an_edited_config_is_an_error(tmp_path: Path) -> None:
    federation = toy_federation()
    gpfl.fit("fedavg", federation, net="mlp", out=tmp_path, **FAST)
    path = tmp_path / "config.toml"
    good = path.read_text()
    path.write_text(good.replace("lr = 0.1", "lr = 0.2"))
    assert path.read_text() != good
    with pytest.raises(gpfl.GpflError, match=r"config.toml has changed since checkpoint.* restore it"):
        gpfl.load(tmp_path, federation=federation)
    path.write_text(good)
    gpfl.load(tmp_path, federation=federation)


X, Y = np.zeros((8, 2), dtype=np.float32), np.arange(8) % 2


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ([(np.where(np.arange(16).reshape(8, 2) == 5, np.nan, X), Y)], "client 0' has NaN or infinity in 1 of 8 rows"),
        ([(X, Y - 1)], "has label -1 in row 0; labels must be 0 to"),
        ([(X, Y + 0.5)], "labels that are not whole numbers"),
        ([(X, Y[:5])], "has 8 rows and 5 labels"),
        ([(X[:1], Y[:1])], "client 0 has no training samples (0 training, 1 test)"),
        ([(X, Y, X[:0], Y[:0])], "has no rows"),
        ([(X, Y), (X[:, :1], Y)], "they must agree"),
        ([], "at least one client"),
    ],
)
def test_error_in_the_data_is_one_line(clients: list[tuple[np.ndarray, ...]], message: str) -> None:
    with pytest.raises(gpfl.GpflError) as error:
        gpfl.federate(clients)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# Resume and load.


def test_finished_run_is_loaded_with_models_history_and_summary(tmp_path: Path) -> None:
    federation = toy_federation()
    result = gpfl.fit("gpfl", federation, net="mlp", out=tmp_path, **FAST)
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for again in (gpfl.load(tmp_path, federation=federation), gpfl.resume(tmp_path, federation=federation)):
        assert same(result, again)
        assert again.summary == result.summary
        assert again.history == result.history
        x = federation.table.x
        assert all(np.array_equal(a.logits(x), b.logits(x)) for a, b in zip(again.clients, result.clients, strict=True))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == content


def test_run_on_named_data_needs_only_its_folder(tmp_path: Path) -> None:
    federation = gpfl.federate("digits", clients=4, classes_per_client=4, seed=2)
    result = gpfl.fit("fedavg", federation, out=tmp_path, rounds=1, batch_size=100)
    assert same(gpfl.load(tmp_path), result)


def test_data_given_in_python_must_be_given_again(tmp_path: Path) -> None:
    gpfl.fit("local", toy_federation(), net="mlp", out=tmp_path, **FAST)
    with pytest.raises(gpfl.GpflError, match=r"divides the data 'arrays', which were given in Python"):
        gpfl.load(tmp_path)


def test_another_federation_is_an_error(tmp_path: Path) -> None:
    federation = toy_federation()
    gpfl.fit("local", federation, net="mlp", out=tmp_path, **FAST)
    with pytest.raises(gpfl.GpflError, match="sha256"):
        gpfl.load(tmp_path, federation=toy_federation(seed=1))
    fewer = gpfl.Federation(federation.table, federation.shards[:2], federation.partition)
    with pytest.raises(gpfl.GpflError, match="the federation differs from the one in"):
        gpfl.load(tmp_path, federation=fewer)


def test_loading_an_unfinished_run_is_an_error(tmp_path: Path) -> None:
    federation = toy_federation()
    gpfl.fit("local", federation, net="mlp", out=tmp_path, **FAST)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(gpfl.GpflError, match=r"has not finished: gpfl resume"):
        gpfl.load(tmp_path, federation=federation)


@pytest.mark.parametrize("net", [small_net(), small_net, Narrow(width=3)], ids=["module", "function", "architecture"])
def test_net_given_in_python_must_be_given_again(tmp_path: Path, net: object) -> None:
    federation = toy_federation()
    result = gpfl.fit("gpfl", federation, net=net, out=tmp_path, **FAST)  # type: ignore[arg-type]
    model_path = tmp_path / "models" / "client-0.safetensors"
    with pytest.raises(gpfl.GpflError, match=r"net given in Python|unknown net 'Narrow'"):
        gpfl.load(tmp_path, federation=federation)
    with pytest.raises(gpfl.GpflError, match="net given in Python"):
        gpfl.load_model(model_path)
    assert same(gpfl.load(tmp_path, federation=federation, net=net), result)
    again = gpfl.load_model(model_path, net=net)  # type: ignore[arg-type]
    assert np.array_equal(again.logits(federation.table.x), result.clients[0].logits(federation.table.x))


def test_another_net_is_an_error(tmp_path: Path) -> None:
    federation = toy_federation()
    gpfl.fit("gpfl", federation, net=small_net(), out=tmp_path, **FAST)
    with pytest.raises(gpfl.GpflError, match="does not belong to this run's method, net and clients"):
        gpfl.load(tmp_path, federation=federation, net=TwoLayerHead())


def test_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    gpfl.fit("gpfl", toy_federation(), net="mlp", out=tmp_path, **FAST)
    with pytest.raises(gpfl.GpflError, match="is not a client's model of gpfl"):
        gpfl.load_model(tmp_path / "checkpoint.safetensors")
    with pytest.raises(gpfl.GpflError, match=r"config.toml is not a model: give the folder of a run"):
        gpfl.load_model(tmp_path / "config.toml")
    with pytest.raises(gpfl.GpflError, match=r"there is no run or model .*nowhere.safetensors"):
        gpfl.load_model(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (METHODS["gpfl"](lam=-3.0), "method.lam"),
        (METHODS["gpfl"](p_scale="foo"), "method.p_scale"),
        (METHODS["fedprox"](mu=0.0), "is FedAvg"),
        (3, "method is int"),
    ],
)
def test_options_of_a_method_instance_are_validated(method: object, message: str) -> None:
    with pytest.raises(gpfl.GpflError, match=re.escape(message)):
        gpfl.fit(method, toy_federation(), rounds=1)  # type: ignore[arg-type]


def test_options_of_a_named_net_are_settings() -> None:
    result = gpfl.fit("fedavg", toy_federation(), net="mlp", hidden=[5, 4], rounds=1)
    assert result.engine.method.net.width == 4


def test_named_data_has_its_default_partition() -> None:
    counts = gpfl.federate("digits").label_counts
    assert counts.shape[0] == 20
    assert (counts > 0).sum(1).max() == 4


def test_import_of_gpfl_is_lazy(tmp_path: Path) -> None:
    code = """
import sys, gpfl
print("torch" in sys.modules, [name for name in gpfl.__all__ if not hasattr(gpfl, name)])
print(gpfl.engine.distributed.exit_process, gpfl.experiments, hasattr(gpfl, "nothing"), dir(gpfl) == sorted(gpfl.__all__))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(gpfl.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == "False []"
    assert second.endswith("False True")
