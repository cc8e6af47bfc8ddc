"""The Python interface: fit, resume, load, load_model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

import gpfl
from gpfl import config as configs
from gpfl import options, tree
from gpfl.config import Config, Given, RunOptions, TrainOptions
from gpfl.engine import Setting, choose, fitting_threads
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation import Federation
from gpfl.form import Form
from gpfl.method import Method
from gpfl.methods import METHODS
from gpfl.net import Architecture, Net, from_architecture, from_module
from gpfl.nets import NETS
from gpfl.result import ClientModel, Result
from gpfl.runs import RunFolder, read_tensors
from gpfl.schedule import Schedule
from gpfl.simulate import Silent, Simulation, Watch

CustomNet: TypeAlias = Architecture | nn.Module | Callable[[], nn.Module]
NetLike: TypeAlias = str | CustomNet


def fit(
    method: str | Method,
    federation: Federation,
    *,
    net: NetLike | None = None,
    head: str | None = None,
    out: str | Path | None = None,
    watch: Watch | None = None,
    **settings: object,
) -> Result:
    """Gives the result of training `method` on a federation.

    `net` is a name ("cnn4", "mlp"), any module, or a function that builds one; `head` names the submodule that is its
    head, by default the last linear layer. `settings` are options of training, of the run and of the method, such as
    `rounds=50, seed=0, lr=0.01, engine="vmap", lam=0.1`. With `out` the run is kept in a folder.
    """
    given = sort_settings(method, settings)
    if isinstance(net, str):
        given["net"] = {"name": net}
    config = configs.resolve(given, federation=federation, custom_net=net is not None and not isinstance(net, str))
    if isinstance(net, Architecture):
        config = dataclasses.replace(config, net=net)
    if isinstance(method, Method):
        method.check(config.run.allow_noop)
        config = dataclasses.replace(config, method=method)
    module = net if not isinstance(net, (str, Architecture)) else None
    return begin(config, federation, module=module, head=head, out=out, watch=watch)


def begin(
    config: Config,
    federation: Federation,
    *,
    module: nn.Module | Callable[[], nn.Module] | None = None,
    head: str | None = None,
    out: str | Path | None = None,
    watch: Watch | None = None,
) -> Result:
    """Gives the result of a new run."""
    config, setting = prepare(config, federation, module, head)
    folder = RunFolder.create(out, config.to_toml(), federation) if out is not None else None
    return execute(config, setting, folder, watch)


def resume(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    net: CustomNet | None = None,
    head: str | None = None,
    watch: Watch | None = None,
) -> Result:
    """Gives the result of a run that was cut off, as if it had not been; a finished run is opened.

    Data and nets that were given in Python must be given again.
    """
    opened = RunFolder.open(folder)
    given = configs.read(opened.path / "config.toml")
    manifest = opened.path / "federation.toml"
    if federation is None:
        federation = Federation.load(manifest)
    elif federation.manifest() != Federation.load(manifest, federation.table).manifest():
        raise GpflError(f"the federation given is not the one of {opened.path}")
    config = configs.resolve(given, federation=federation, custom_net=net is not None)
    if isinstance(net, Architecture):
        config = dataclasses.replace(config, net=net)
    module = net if not isinstance(net, Architecture) else None
    config, setting = prepare(config, federation, module, head)
    return execute(config, setting, opened, watch)


def load(folder: str | Path, **given: object) -> Result:
    """Gives a finished run: its models, numbers and curves."""
    opened = RunFolder.open(folder)
    if not opened.finished:
        raise GpflError(f"the run in {opened.path} has not finished: gpfl resume {opened.path}")
    return resume(folder, **given)  # type: ignore[arg-type]


def load_model(path: str | Path, *, net: CustomNet | None = None, head: str | None = None) -> ClientModel:
    """Gives a client's model from its file; a net that was given in Python must be given again."""
    flat, facts = read_tensors(Path(path))
    if "client" not in facts:
        raise GpflError(f"{path} is not a client's model of gpfl")
    about = cast(dict[str, Any], facts)
    form = Form(**{**about["form"], "shape": tuple(about["form"]["shape"])})
    classes, example = int(about["classes"]), form.example()
    name, kind = about["net"].pop("name"), about["method"].pop("name")
    if isinstance(net, Architecture):
        built = from_architecture(net, configs.name_of(net), example, classes)
    elif net is not None:
        built = from_module(net, example, classes, head=head)
    elif name in NETS:
        built = from_architecture(options.build(NETS[name], about["net"], "net"), name, example, classes)
    else:
        raise GpflError(f"{path} was made with a net given in Python: gpfl.load_model(path, net=…)")
    if kind not in METHODS:
        raise GpflError(f"{path} was made with the method '{kind}', which is not one of gpfl's: {', '.join(METHODS)}")
    method = options.build(METHODS[kind], about["method"], "method").bind(built, lr=0.0, epochs=1)
    return ClientModel(method, tree.unflatten(flat), about["client"], form)


# Parts of the above.


def sort_settings(method: str | Method, settings: dict[str, object]) -> Given:
    """Gives keyword settings by section."""
    name = method if isinstance(method, str) else method.name
    if name not in METHODS and isinstance(method, str):
        raise GpflError(f"unknown method '{name}'; {did_you_mean(name, METHODS)}")
    own = options.options_of(METHODS[name]) if isinstance(method, str) else {}
    sections = {"run": options.options_of(RunOptions), "train": options.options_of(TrainOptions), "method": own}
    given: Given = {section: {} for section in sections}
    for key, value in settings.items():
        owner = next((section for section, known in sections.items() if key in known), None)
        if owner is None:
            everything = [option for known in sections.values() for option in known]
            raise GpflError(f"unknown setting '{key}'; {did_you_mean(key, everything)}")
        given[owner][key] = value
    if name in METHODS:
        given["method"]["name"] = name
    return given


def prepare(
    config: Config, federation: Federation, module: nn.Module | Callable[[], nn.Module] | None, head: str | None
) -> tuple[Config, Setting]:
    """Gives the config with everything filled in that depends on the net, and the setting to run."""
    if config.run.select == "validation" and not federation.validates:
        raise GpflError("run.select is 'validation', but no client has validation rows: set --validation, such as 0.1")
    device = find_device(config.run.device)
    example: Tensor = federation.table.inputs(torch.arange(min(2, len(federation.table))))
    classes = federation.table.classes
    net: Net
    if config.net is not None:
        architecture = config.net.fitted(federation.table.form)
        config = dataclasses.replace(config, net=architecture)
        net = from_architecture(architecture, configs.name_of(architecture), example, classes)
    else:
        net = from_module(cast(nn.Module, module), example, classes, head=head)
    lr = net.lr if math.isnan(config.train.lr) else config.train.lr
    train = dataclasses.replace(config.train, lr=lr)
    method = config.method.bind(net.to(device), lr=lr, epochs=train.epochs, batch_norm=train.batch_norm)
    schedule = Schedule(
        seed=config.run.seed,
        rounds=train.rounds,
        batch_size=train.batch_size,
        join=train.join,
        shuffle=train.shuffle,
        drop_last=train.drop_last,
    )
    most, needed = int(federation.rows("train").max()), schedule.rows_needed(method.phases())
    if most < needed:
        raise GpflError(
            f"the largest client has {most} training rows; {method.name} needs {needed} at batch size {train.batch_size}: "
            "lower --batch-size"
        )
    setting = Setting(method, federation.to(device), schedule, train.class_counts)
    return dataclasses.replace(config, train=train, method=method), setting


def execute(config: Config, setting: Setting, folder: RunFolder | None, watch: Watch | None) -> Result:
    """Gives the result of a run from where its folder stands."""
    engine = choose(config.run.engine, setting)
    facts = {
        "method": config.method.name,
        "data": config.data,
        "net": setting.method.net.name,
        "clients": len(setting.federation),
        "protocol": config.run.protocol,
        "gpfl": gpfl.__version__,
        "torch": torch.__version__,
    }
    simulation = Simulation(setting, engine, config.run, config.train.patience, folder, watch or Silent(), facts)
    if folder is not None and folder.finished:
        return Result(engine, simulation.reopen())
    with fitting_threads(setting):
        result = Result(engine, simulation.run())
    if folder is not None:
        result.export(folder.path / "models")
        folder.write_summary(result.summary)  # last: its presence says that all is there
    return result


def find_device(name: str) -> torch.device:
    """Gives the device of that name; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise GpflError(f"run.device is '{name}', which cannot be used here: {str(problem).splitlines()[0]}") from None
    return device
