"""Configs: precedence of values, validation, and the written file."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import toy_federation, toy_table
from torch import nn

import gpfl
from gpfl.core import options
from gpfl.core.net import Net
from gpfl.data import DATASETS, DataSource
from gpfl.errors import GpflError
from gpfl.federation import PARTITIONS
from gpfl.federation.partition import Dirichlet, Pathological
from gpfl.methods import METHODS
from gpfl.methods.gpfl import GPFL
from gpfl.models import NETS
from gpfl.models.architectures import CNN4, MLP, net_from_architecture
from gpfl.training import config
from gpfl.training.config import ConfigDict, resolve_config


@dataclass(frozen=True, kw_only=True)
class OpposedDefaults(DataSource):
    """A dataset whose defaults contradict a protocol."""

    name: str = "toys"
    description: str = "a toy"

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        return {
            "train": {"shuffle": True, "rounds": 7, "lr": 0.3},
            "partition": {"name": "dirichlet", "clients": 6, "beta": 2.0},
            "net": {"name": "mlp", "hidden": [9]},
        }

    def read(self) -> gpfl.Table:
        return toy_table()


@pytest.fixture
def dataset(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(DATASETS, "toys", OpposedDefaults())
    return "toys"


def test_default_config_is_gpfl_on_digits() -> None:
    made = resolve_config({})
    assert (made.data, made.method.name, made.net, made.train.rounds) == ("digits", "gpfl", MLP(), 40)
    assert made.partition == Pathological(clients=20, classes_per_client=4)


def test_given_values_precede_protocol_data_and_defaults(dataset: str) -> None:
    base: ConfigDict = {"data": {"name": dataset}}
    default = resolve_config(base).train
    assert (default.shuffle, default.rounds, default.batch_size) == (True, 7, 10)
    preset = resolve_config({**base, "run": {"protocol": "reference"}}).train
    assert (preset.shuffle, preset.class_counts, preset.rounds) == (False, "used", 7)
    given = resolve_config({**base, "run": {"protocol": "reference"}, "train": {"shuffle": True, "rounds": 2}}).train
    assert (given.shuffle, given.class_counts, given.rounds) == (True, "used", 2)


@pytest.mark.parametrize(
    ("protocol", "values"),
    [
        ("corrected", ("sum", "global", "batch", "wd")),
        ("paper", ("mean", "global", "sample_mean", "norm")),
        ("reference", ("sum", "stale_local", "batch", "wd")),
    ],
)
def test_protocol_sets_options_that_are_not_given(protocol: str, values: tuple[str, ...]) -> None:
    keys = ("p_scale", "cond_source", "mlg_norm", "reg")
    method = resolve_config({"run": {"protocol": protocol}}).method
    assert tuple(getattr(method, key) for key in keys) == values
    changed = resolve_config({"run": {"protocol": protocol}, "method": {"reg": "norm"}}).method
    assert tuple(getattr(changed, key) for key in keys) == (*values[:3], "norm")


def test_defaults_of_a_dataset_hold_for_its_own_partition_and_net(dataset: str) -> None:
    made = resolve_config({"data": {"name": dataset}})
    assert (made.partition, made.net) == (Dirichlet(clients=6, beta=2.0), MLP(hidden=(9,)))
    other = resolve_config({"data": {"name": dataset}, "partition": {"name": "pathological"}, "net": {"name": "cnn4"}})
    assert (other.partition, other.net) == (Pathological(clients=6), CNN4())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trian": {}}, "unknown section 'trian'; did you mean 'train'?"),
        ({"train": {"round": 3}}, "unknown key 'train.round'; did you mean 'rounds'?"),
        ({"run": {"sed": 3}}, "unknown key 'run.sed'; did you mean 'seed'?"),
        ({"data": {"name": "digit"}}, "unknown data 'digit'; did you mean 'digits'?"),
        ({"data": {"nam": "digits"}}, "unknown key 'data.nam'; did you mean 'name'?"),
        ({"data": {"name": "arrays"}}, "it was given in Python: give it again there"),
        ({"method": {"name": "fedavgg"}}, "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        ({"method": {"lamb": 1.0}}, "unknown key 'method.lamb'; did you mean 'lam'?"),
        (
            {"method": {"name": "fedavg", "lam": 1.0}},
            "method.lam belongs to method gpfl, pfedme, ditto, fedphp, fedproto, not to fedavg",
        ),
        ({"method": {"name": 3}}, "method.name is 3; it must be text"),
        ({"net": {"name": "cnn"}}, "unknown net 'cnn'; did you mean 'cnn4'?"),
        ({"net": {"hiden": 3}}, "unknown key 'net.hiden'; did you mean 'hidden'?"),
        ({"net": {"name": "custom"}}, "this run used a net given in Python"),
        ({"partition": {"name": "pathologic"}}, "unknown partition 'pathologic'; did you mean 'pathological'?"),
        ({"partition": {"client": 3}}, "unknown key 'partition.client'; did you mean 'clients'?"),
        (
            {"partition": {"beta": 0.1}},
            "partition.beta belongs to partition dirichlet, not to pathological: leave it out, or choose --partition dirichlet",
        ),
        ({"partition": {"name": "manifest"}}, "partition.file must name the file"),
        ({"partition": {"name": "manifest", "file": "f", "clients": 3}}, "partition.clients cannot be set"),
        ({"train": {"lr": -0.1}}, "train.lr is -0.1; it must be above 0"),
        ({"train": {"client_fraction": 0}}, "train.client_fraction is 0; it must be above 0 and at most 1"),
        ({"train": {"client_fraction": [0.8, 0.2]}}, "train.client_fraction is [0.8, 0.2]; the lower fraction must come first"),
        ({"train": {"rounds": 0}}, "train.rounds is 0; it must be at least 1"),
        ({"method": {"lam": -1}}, "method.lam is -1; it must be at least 0"),
        ({"partition": {"test_fraction": 0.0}}, "partition.test_fraction is 0.0; it must be above 0 and at most 0.9"),
        ({"run": {"protocol": "papr"}}, "it must be one of corrected, paper, reference; did you mean 'paper'?"),
    ],
)
def test_error_names_the_key_and_the_fix(given: ConfigDict, message: str) -> None:
    with pytest.raises(GpflError) as error:
        resolve_config(given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "given",
    [
        {"method": {"lam": 1e-05, "mu": 0.0}},
        {
            "method": {"lam": 0.1, "mu": 0.1},
            "run": {"protocol": "reference", "seed": 3},
            "train": {"client_fraction": [0.5, 1]},
        },
        {"method": {"name": "fedavg"}, "partition": {"name": "dirichlet", "beta": 0.5, "cap": False}, "net": {"name": "cnn4"}},
        {
            "method": {"name": "local"},
            "net": {"hidden": [8, 4]},
            "train": {"lr": 0.1, "shuffle": False, "client_fraction": 0.5},
        },
    ],
)
def test_written_config_resolves_to_the_same(given: ConfigDict) -> None:
    made = resolve_config(given)
    again = resolve_config(made.sections())
    assert again == made
    assert again.to_toml() == made.to_toml()


def test_config_of_a_federation_names_the_manifest_of_its_folder(tmp_path: Path) -> None:
    federation = toy_federation()
    made = resolve_config({"method": {"name": "fedavg"}, "train": {"lr": 0.1}}, federation=federation)
    assert (made.partition, made.data, made.net) == (None, "arrays", MLP())
    (tmp_path / "config.toml").write_text(made.to_toml())
    given = config.read_config(tmp_path / "config.toml")
    assert given["partition"] == {"name": "manifest", "file": str(tmp_path / "federation.toml")}
    again = resolve_config(given, federation=federation)
    assert (again.train, again.net) == (made.train, made.net)


def test_default_net_of_images_is_the_cnn() -> None:
    images = gpfl.federate([(torch.zeros(8, 1, 8, 8), torch.arange(8) % 2)])
    assert resolve_config({}, federation=images).net == CNN4()
    assert resolve_config({}, federation=images, custom_net=True).net is None


def test_custom_net_is_written_as_custom() -> None:
    text = resolve_config({"method": {"name": "fedavg"}}, custom_net=True).to_toml()
    assert tomllib.loads(text)["net"] == {"name": "custom"}


def test_config_builds_its_federation(tmp_path: Path) -> None:
    made = resolve_config({"partition": {"clients": 5, "classes_per_client": 4}})
    federation = made.federation()
    assert len(federation) == 5
    federation.save(tmp_path / "f.toml")
    by_manifest = resolve_config({"partition": {"name": "manifest", "file": str(tmp_path / "f.toml")}})
    assert by_manifest.federation().manifest() == federation.manifest()


def test_value_outside_a_section_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("lam = 3\n")
    with pytest.raises(GpflError, match=r"c\.toml: 'lam' stands outside a section; the sections are run, data"):
        config.read_config(tmp_path / "c.toml")


def make_net(name: str) -> Net:
    parts = {"base": nn.Flatten(), "head": nn.Linear(4, 3)}
    return Net(parts, torch.zeros(2, 4), 3, name=name)


@pytest.mark.parametrize(
    ("name", "lam", "mu"),
    [
        ("cnn4", 0.01, 0.1),
        ("mlp", 0.01, 0.1),
        ("custom", 0.01, 0.1),
        ("resnet18", 1e-4, 0.0),
        ("fasttext", 1e-4, 0.0),
        ("harcnn", 0.01, 1.0),
    ],
)
def test_lambda_and_mu_of_gpfl_default_to_those_of_the_net(name: str, lam: float, mu: float) -> None:
    free = GPFL().bind(make_net(name), lr=0.1, epochs=1)
    assert (free.lam, free.mu) == (lam, mu)
    fixed = GPFL(lam=0.5).bind(make_net(name), lr=0.1, epochs=1)
    assert (fixed.lam, fixed.mu) == (0.5, mu)


def test_binding_sets_defaults_of_the_net_in_a_copy() -> None:
    made = resolve_config({})
    net = net_from_architecture(MLP(), "mlp", torch.zeros(2, 6), 3)
    bound = dataclasses.replace(made, method=made.method.bind(net, lr=0.1, epochs=2))
    assert math.isnan(options.option_values(made.method)["lam"])  # type: ignore[arg-type]
    section = bound.sections()["method"]
    assert (section["lam"], section["mu"]) == (0.01, 0.1)
    assert resolve_config(bound.sections()).to_toml() == bound.to_toml()


WRITTEN = {
    "gpfl": "lam mu p_scale cond_source mlg_norm reg without",
    "fedavg": "",
    "fedprox": "mu",
    "perfedavg": "alpha beta passes",
    "pfedme": "steps lam p_lr beta theta_decay eval_model",
    "ditto": "lam personal_epochs",
    "fedper": "",
    "fedrep": "head_epochs",
    "fedrod": "",
    "fedphp": "mu lam variant",
    "fedproto": "lam prototypes",
    "local": "",
    "fedavg-ft": "ft_epochs ft_parts ft_lr",
    "cnn4": "channels hidden",
    "resnet18": "",
    "fasttext": "hidden vocabulary",
    "harcnn": "",
    "mlp": "hidden",
    "pathological": "clients total_clients test_fraction validation_fraction seed classes_per_client balanced",
    "dirichlet": "clients total_clients test_fraction validation_fraction seed beta cap min_samples",
    "natural": "clients total_clients test_fraction validation_fraction seed min_samples",
    "run": "seed protocol engine precision compile device eval_every checkpoint_every allow_noop select",
    "train": "rounds lr batch_size epochs client_fraction shuffle drop_last class_counts batch_norm patience",
}


@pytest.mark.parametrize(
    ("section", "name"),
    [
        *(("method", name) for name in METHODS),
        *(("net", name) for name in NETS),
        *(("partition", name) for name in PARTITIONS),
        *(("run", ""), ("train", "")),
    ],
)
def test_configs_have_the_keys_of_recorded_results(section: str, name: str) -> None:
    given = {"data": {"name": "digits"}, **({section: {"name": name}} if name else {})}
    written = resolve_config(given).sections()[section]
    keys = " ".join(key for key in written if key != "name")
    hint = "declare a new option with option(…, omit_default=True): else results would no longer be found"
    assert keys == WRITTEN.get(name or section, keys), hint


def test_option_with_omit_default_is_written_only_if_set() -> None:
    @dataclasses.dataclass(frozen=True)
    class Record:
        old: int = options.option(1, "old")
        new: int = options.option(2, "new", omit_default=True)

    assert options.config_values(Record()) == {"old": 1}
    assert options.config_values(Record(new=3)) == {"old": 1, "new": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partition": {"name": "iid"}}, "unknown partition 'iid'"),
        ({"partition": {"name": "dirichlet", "beta": -1}}, "partition.beta is -1"),
        ({"net": {"name": "cnn"}}, "unknown net 'cnn'"),
        ({"method": {"name": "gpfI"}}, "unknown method 'gpfI'"),
        ({"train": {"rounds": -1}}, "train.rounds is -1"),
        ({"defence": {"clip": -1}}, "defence.clip is -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_are_raised_before_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: ConfigDict, message: str
) -> None:
    (tmp_path / "rows.csv").write_text("a,label\n1,x\n2,y\n")

    def read(*_: object) -> None:
        raise AssertionError("the file is read")

    monkeypatch.setattr("gpfl.data.files.dataset.read_once", read)
    with pytest.raises(GpflError, match=message):
        resolve_config({"data": {"name": str(tmp_path / "rows.csv")}, **given})
