"""The Python interface: fit, resume, load, load_model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

import gpfl
from gpfl.core import options, tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Method
from gpfl.core.module_checks import LOOSE_TOLERANCE, equal_logits
from gpfl.core.net import InputSpec, Net
from gpfl.core.tree import Tree
from gpfl.defences import DefenceConfig
from gpfl.engine import Engine, RunSpec, limit_threads, make_engine, matmul_precision
from gpfl.engine.distributed import local_rank, process_group
from gpfl.errors import DivergenceError, GpflError, did_you_mean
from gpfl.federation.federation import MANIFEST, Federation
from gpfl.io.legacy import upgrade_model
from gpfl.io.tensors import read_tensors
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.models.architecture import Architecture, net_from_architecture
from gpfl.models.splitting import net_from_module
from gpfl.training import config as configs
from gpfl.training.config import Config, ConfigDict, RunOptions, TrainOptions, check_device
from gpfl.training.defences import apply_defence, run_guarantee
from gpfl.training.result import ClientModel, Result
from gpfl.training.round_loop import RoundLoop, Silent, Watch, run_concurrently
from gpfl.training.run_dir import RunDir

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
    if not isinstance(federation, Federation):
        raise GpflError(f"federation is {type(federation).__name__}; make one with gpfl.federate(…)")
    refuse_head(net, head)
    given = sort_settings(method, net, settings)
    config = configs.resolve_config(given, federation=federation, custom_net=net is not None and not isinstance(net, str))
    if isinstance(net, Architecture):
        config = dataclasses.replace(config, net=net)
    if isinstance(method, Method):
        config = dataclasses.replace(config, method=checked_method(method, config.run))
    module = net if not isinstance(net, (str, Architecture)) else None
    return start_run(config, federation, module=module, head=head, out=out, watch=watch)


def start_run(
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
    engine = make_engine(config.run.engine, setting)
    folder = RunDir.create(out, config.to_toml(), federation) if out is not None else None
    return execute(PreparedRun(config, setting, folder, watch), engine)


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
    run = open_run(folder, federation=federation, net=net, head=head, watch=watch)
    return execute(run, make_engine(run.config.run.engine, run.setting))


def load(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    net: CustomNet | None = None,
    head: str | None = None,
) -> Result:
    """Gives a finished run: its models, numbers and curves.

    Data and nets that were given in Python must be given again.
    """
    opened = RunDir.open(folder)
    if not opened.finished:
        raise GpflError(f"the run in {opened.path} has not finished: gpfl resume {opened.path}")
    return resume(folder, federation=federation, net=net, head=head)


def load_model(path: str | Path, *, net: CustomNet | None = None, head: str | None = None) -> ClientModel:
    """Gives a client's model from its file; a net that was given in Python must be given again."""
    refuse_name(net)
    refuse_head(net, head)
    flat, facts = read_tensors(Path(path))
    if not {"client", "probe"} <= facts.keys():
        raise GpflError(f"{path} is not a client's model of gpfl")
    about = cast(dict[str, Any], upgrade_model(facts))
    form = InputSpec(**{**about["form"], "shape": tuple(about["form"]["shape"])})
    classes, example = int(about["classes"]), form.probe()
    name, kind = about["net"].pop("name"), about["method"].pop("name")
    if isinstance(net, Architecture):
        built = net_from_architecture(net, configs.name_of(net), example, classes)
    elif net is not None:
        built = net_from_module(net, example, classes, head=head)
    elif name in NETS:
        built = net_from_architecture(options.build(NETS[name], about["net"], "net"), name, example, classes)
    else:
        raise GpflError(f"{path} was made with a net given in Python: gpfl.load_model(path, net=…)")
    if kind not in METHODS:
        raise GpflError(f"{path} was made with the method '{kind}', which is not one of gpfl's: {', '.join(METHODS)}")
    weights: Tree = {**{branch: {} for branch in about["branches"]}, **tree.unflatten(flat)}
    mismatch = built.mismatch(weights)
    if mismatch:
        raise GpflError(f"{path} was made with another net: {mismatch}; give the net that it was trained with")
    method = options.build(METHODS[kind], about["method"], "method").bind(built, lr=0.0, epochs=1)
    model = ClientModel(method, weights, about["client"], form)
    if not equal_logits(torch.tensor(about["probe"]), torch.tensor(model.probe()), LOOSE_TOLERANCE):
        raise GpflError(
            f"{path} was made with another net: its weights fit, but the scores of a test row differ; "
            "give the net that it was trained with, constants and activations too"
        )
    return model


# Parts of the above.


class PreparedRun(NamedTuple):
    """A run that is ready to be executed from where its folder stands."""

    config: Config
    setting: RunSpec
    folder: RunDir | None = None
    watch: Watch | None = None


def open_run(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    net: CustomNet | None = None,
    head: str | None = None,
    watch: Watch | None = None,
) -> PreparedRun:
    """Gives the run of a folder."""
    opened = RunDir.open(folder)
    refuse_name(net)
    refuse_head(net, head)
    config, federation = load_run_config(opened, federation, custom_net=net is not None)
    if isinstance(net, Architecture):
        config = dataclasses.replace(config, net=net)
    module = net if not isinstance(net, Architecture) else None
    config, setting = prepare(config, federation, module, head)
    return PreparedRun(config, setting, opened, watch)


def load_run_config(folder: RunDir, given: Federation | None, custom_net: bool) -> tuple[Config, Federation]:
    """Gives the config and the federation of a folder; what is wrong with a file that was changed comes with the way out."""
    manifest = folder.path / MANIFEST
    try:
        sections = configs.read_config(folder.path / "config.toml")
        federation = Federation.load(manifest, given.table if given else configs.table_of(sections))
        if given is not None and given.manifest() != federation.manifest():
            raise GpflError(f"the federation given is not the one of {folder.path}")
        return configs.resolve_config(sections, federation=given or federation, custom_net=custom_net), given or federation
    except GpflError as problem:
        changed = folder.changed_files()
        if not changed:
            raise
        raise GpflError(
            f"{problem}; {folder.path / changed[0]} is not as the run wrote it: restore it, or start a new run"
        ) from None


def refuse_name(net: NetLike | None) -> None:
    """Refuses the name of a net where only one that was given in Python is to be given again."""
    if isinstance(net, str):
        raise GpflError(f"net is the name '{net}'; only a net that was given in Python is given again: leave net out")


def refuse_head(net: NetLike | None, head: str | None) -> None:
    """Refuses the name of a head where no module was given that it could be in."""
    if head is not None and (net is None or isinstance(net, (str, Architecture))):
        raise GpflError(f"head is '{head}', but no module was given as net to look for it in: leave head out, or give net=…")


def sort_settings(method: str | Method, net: NetLike | None, settings: dict[str, object]) -> ConfigDict:
    """Gives keyword settings by section."""
    if not isinstance(method, (str, Method)):
        raise GpflError(f"method is {type(method).__name__}; give a name ({', '.join(METHODS)}) or a Method")
    if isinstance(method, str) and method not in METHODS:
        raise GpflError(f"unknown method '{method}'; {did_you_mean(method, METHODS)}")
    sections = {"run": options.options_of(RunOptions), "train": options.options_of(TrainOptions)}
    given: ConfigDict = {"run": {}, "train": {}, "defence": {}}
    if isinstance(method, str):
        sections["method"], given["method"] = options.options_of(METHODS[method]), {"name": method}
    if isinstance(net, str):
        sections["net"] = options.options_of(NETS[net]) if net in NETS else {}
        given["net"] = {"name": net}
    sections["defence"] = options.options_of(DefenceConfig)
    for key, value in settings.items():
        owner = next((section for section, known in sections.items() if key in known), None)
        if owner is None:
            everything = [option for known in sections.values() for option in known]
            raise GpflError(f"unknown setting '{key}'; {did_you_mean(key, everything)}")
        given[owner][key] = value
    return given


def checked_method(method: Method, run: RunOptions) -> Method:
    """Gives a method that was made in Python, its values checked as those of a config are."""
    values = {key: value for key, value in options.option_values(method).items() if value == value}  # NaN is filled in by net
    checked = options.build(type(method), values, "method")
    if not run.allow_noop:
        options.check_not_disabled(checked, "method")
    return checked


def prepare(
    config: Config, federation: Federation, module: nn.Module | Callable[[], nn.Module] | None, head: str | None
) -> tuple[Config, RunSpec]:
    """Gives the config with everything filled in that depends on the net, and the setting to run."""
    if config.run.select == "validation" and not federation.has_validation:
        raise GpflError("run.select is 'validation', but no client has validation rows: set --validation-fraction, such as 0.1")
    device = find_device(config.run.device)
    if config.run.precision != "float32" and device.type != "cuda":
        raise GpflError(
            f"run.precision is '{config.run.precision}', which is for a GPU; run.device is '{device}': leave it out"
        )
    example: Tensor = federation.table.inputs(torch.arange(min(2, len(federation.table)))).cpu()  # where nets are made
    classes = federation.table.classes
    net: Net
    if config.net is not None:
        architecture = config.net.fit_input(federation.table.input_spec)
        config = dataclasses.replace(config, net=architecture)
        net = net_from_architecture(architecture, configs.name_of(architecture), example, classes)
    else:
        net = net_from_module(cast(nn.Module, module), example, classes, head=head)
    lr = net.lr if math.isnan(config.train.lr) else config.train.lr
    train = dataclasses.replace(config.train, lr=lr)
    method = config.method.bind(net.to(device), lr=lr, epochs=train.epochs, batch_norm=train.batch_norm)
    schedule = Schedule(
        seed=config.run.seed,
        rounds=train.rounds,
        batch_size=train.batch_size,
        client_fraction=train.client_fraction,
        shuffle=train.shuffle,
        drop_last=train.drop_last,
    )
    most, needed = int(federation.n_samples("train").max()), schedule.min_samples(method.phases())
    if most < needed:
        raise GpflError(
            f"the largest client has {most} training rows; {method.name} needs {needed} at batch size {train.batch_size}: "
            "lower --batch-size"
        )
    for shard in federation.shards:
        schedule.check_batch_size(method, len(shard.train), shard.name)
    placed = federation.to(device)
    guard = apply_defence(method, config.defence, placed, schedule)
    setting = RunSpec(guard, placed, schedule, train.class_counts, config.run.compile, config.run.precision)
    return dataclasses.replace(config, train=train, method=method), setting


def execute(run: PreparedRun, engine: Engine) -> Result:
    """Gives the result of a run from where its folder stands."""
    simulation = simulation_of(run, engine)
    if run.folder is not None and run.folder.finished:
        return Result(engine, simulation.reopen())
    with limit_threads(run.setting), matmul_precision(run.setting.precision):
        outcome = simulation.run()
    return kept(Result(engine, outcome), run)


def execute_trials(runs: Sequence[PreparedRun]) -> list[Result | DivergenceError]:
    """Gives the results of unfinished trials, whose clients train at once where the engine can.

    Trials differ in their seeds, or in numbers of their method such as λ or the learning rate. One that diverges does not stop
    the others; its end stands in place of its result.
    """
    first = runs[0].setting
    engine = make_engine(runs[0].config.run.engine, first)
    # One table on the device for all.
    runs = [run._replace(setting=dataclasses.replace(run.setting, federation=first.federation)) for run in runs]
    if not engine.supports_concurrent_trials:
        return [execute_or_diverge(run, make_engine(run.config.run.engine, run.setting)) for run in runs]
    engines = [engine.for_trial(run.setting) for run in runs]
    simulations = [simulation_of(run, own) for run, own in zip(runs, engines, strict=True)]
    with limit_threads(first), matmul_precision(first.precision):
        outcomes = run_concurrently(simulations)
    return [
        outcome if isinstance(outcome, DivergenceError) else kept(Result(own, outcome), run)
        for own, outcome, run in zip(engines, outcomes, runs, strict=True)
    ]


def execute_or_diverge(run: PreparedRun, engine: Engine) -> Result | DivergenceError:
    """Gives the result of a run, or its end where it diverges."""
    try:
        return execute(run, engine)
    except DivergenceError as end:
        return end.with_traceback(None)  # which would hold on to its state


def kept(result: Result, run: PreparedRun) -> Result:
    """Gives the result, having written its models and its summary into the run's folder."""
    if run.folder is not None and process_group().is_main:
        result.export(run.folder.path / "models")
        run.folder.write_summary(result.summary)  # last: its presence says that all is there
    process_group().barrier()  # a process that ended before the first has written would take the others with it
    return result


def simulation_of(run: PreparedRun, engine: Engine) -> RoundLoop:
    """Gives the simulation of a run."""
    config, setting, folder, watch = run
    facts = {
        "method": config.method.name,
        "data": config.data,
        "net": setting.method.net.name,
        "clients": len(setting.federation),
        "protocol": config.run.protocol,
        "gpfl": gpfl.__version__,
        "torch": torch.__version__,
        **defence_facts(config, setting),
    }
    return RoundLoop(setting, engine, config.run, config.train.patience, folder, watch or Silent(), facts)


def defence_facts(config: Config, setting: RunSpec) -> dict[str, object]:
    """Gives what the summary says of a run's defence: its options, and what it promises."""
    if not config.defence.enabled:
        return {}
    promise = run_guarantee(setting.method, setting.federation, setting.schedule)
    return {"defence": options.option_values(config.defence), **({"privacy": promise} if promise else {})}


def find_device(name: str) -> torch.device:
    """Gives the device of that name; `auto` is the GPU if there is one."""
    check_device(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and process_group().world_size > 1:
        name = f"cuda:{local_rank()}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise GpflError(f"run.device is '{name}', which cannot be used here: {str(problem).splitlines()[0]}") from None
    return device
