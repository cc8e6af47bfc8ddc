"""Train: fit, resume and load in Python, and the execution of runs, one at a time or several trials at once."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

import gpfl
from gpfl.core import options
from gpfl.core.method import Method
from gpfl.core.precision import matmul_precision
from gpfl.defences import DefenceConfig
from gpfl.engine import Engine, RunSpec, limit_threads, make_engine
from gpfl.engine.distributed import process_group
from gpfl.errors import DivergenceError, GpflError, did_you_mean
from gpfl.federation import MANIFEST, Federation, share_table
from gpfl.inference.metrics import DECISION_METRICS, describe_bootstrap
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.models.custom import CustomNet, NetLike, check_custom_net, check_head
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict, RunOptions, TrainOptions, load_table, read_config, resolve_config
from gpfl.training.prepare import prepare, run_guarantee
from gpfl.training.result import Result
from gpfl.training.round_loop import RoundLoop, run_concurrently
from gpfl.training.run_dir import RunDir


class PreparedRun(NamedTuple):
    """A run that is ready to execute, from the start or from the last checkpoint of its directory."""

    config: Config
    spec: RunSpec
    run_dir: RunDir | None = None
    callbacks: Sequence[Callback] = ()


def fit(
    method: str | Method,
    federation: Federation,
    *,
    net: NetLike | None = None,
    head: str | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: object,
) -> Result:
    """Train a method on a federation.

    Args:
        method: A name, such as "gpfl", or a `Method`.
        federation: The clients and their samples.
        net: A name ("cnn4", "mlp"), a module, or a function that builds one.
        head: Name of the submodule of `net` that is the head, by default the last linear layer.
        out: Folder to keep the run in.
        callbacks: Callbacks, see `gpfl.Callback`.
        **settings: Options of the run, of training, of the method, of the net and of a defence, such as
            `rounds=50, seed=0, lr=0.01, engine="vmap", lam=0.1`.

    Returns:
        The models, the history and the summary.

    """
    if not isinstance(federation, Federation):
        raise GpflError(f"federation is {type(federation).__name__}; make one with gpfl.federate(…)")
    check_head(net, head)
    sections = _group_settings(method, net, settings)
    config = resolve_config(sections, federation=federation, custom_net=net is not None and not isinstance(net, str))
    if isinstance(method, Method):
        values = {key: value for key, value in options.option_values(method).items() if not options.is_unset(value)}
        checked = options.build(type(method), values, "method")
        if not config.run.allow_noop:
            options.check_not_disabled(checked, "method")
        config = dataclasses.replace(config, method=checked)
    custom = net if not isinstance(net, str) else None
    return start_run(config, federation, net=custom, head=head, out=out, callbacks=callbacks)


def resume(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    net: CustomNet | None = None,
    head: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Resume an interrupted run, with the numbers of an uninterrupted one, or load a finished run.

    A federation or net that was given in Python must be given again.
    """
    run = open_run(folder, federation=federation, net=net, head=head, callbacks=callbacks)
    return execute(run, make_engine(run.config.run.engine, run.spec))


def load(
    folder: str | Path, *, federation: Federation | None = None, net: CustomNet | None = None, head: str | None = None
) -> Result:
    """Load a finished run. A federation or net that was given in Python must be given again."""
    run_dir = RunDir.open(folder)
    if not run_dir.finished:
        raise GpflError(f"the run in {run_dir.path} has not finished: gpfl resume {run_dir.path}")
    return resume(folder, federation=federation, net=net, head=head)


def _group_settings(method: str | Method, net: NetLike | None, settings: Mapping[str, object]) -> ConfigDict:
    if not isinstance(method, (str, Method)):
        raise GpflError(f"method is {type(method).__name__}; give a name ({', '.join(METHODS)}) or a Method")
    if isinstance(method, str) and method not in METHODS:
        raise GpflError(f"unknown method '{method}'; {did_you_mean(method, METHODS)}")
    known = {"run": options.options_of(RunOptions), "train": options.options_of(TrainOptions)}
    sections: ConfigDict = {"run": {}, "train": {}, "defence": {}}
    if isinstance(method, str):
        known["method"], sections["method"] = options.options_of(METHODS[method]), {"name": method}
    if isinstance(net, str):
        known["net"], sections["net"] = options.options_of(NETS[net]) if net in NETS else {}, {"name": net}
    known["defence"] = options.options_of(DefenceConfig)
    for key, value in settings.items():
        section = next((section for section, keys in known.items() if key in keys), None)
        if section is None:
            keys = [key for keys in known.values() for key in keys]
            raise GpflError(f"unknown setting '{key}'; {did_you_mean(key, keys)}")
        sections[section][key] = value
    return sections


def start_run(
    config: Config,
    federation: Federation,
    *,
    net: CustomNet | None = None,
    head: str | None = None,
    out: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Execute a new run; `net` is a custom network, for which the config has no section."""
    config, spec = prepare(config, federation, net, head)
    engine = make_engine(config.run.engine, spec)  # raises before a folder is made
    if out is None and config.run.private_state == "disk":
        raise GpflError("run.private_state is 'disk', which needs a folder for the run: give out=")
    run_dir = RunDir.create(out, config.to_toml(), federation) if out is not None else None
    return execute(PreparedRun(config, spec, run_dir, callbacks), engine)


def open_run(
    folder: str | Path,
    *,
    federation: Federation | None = None,
    net: CustomNet | None = None,
    head: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> PreparedRun:
    """Open the run of a folder. A federation or net that was given in Python must be given again."""
    check_custom_net(net, head)
    run_dir = RunDir.open(folder)
    config, federation = load_run_config(run_dir, federation, custom_net=net is not None)
    config, spec = prepare(config, federation, net, head)
    return PreparedRun(config, spec, run_dir, callbacks)


def load_run_config(run_dir: RunDir, federation: Federation | None, custom_net: bool) -> tuple[Config, Federation]:
    """Return the config and the federation of a run. An error names the file that has changed, if one has."""
    try:
        sections = read_config(run_dir.path / "config.toml")
        table = federation.table if federation else load_table(sections)
        manifest = run_dir.path / MANIFEST
        saved = Federation.load(manifest, table)
        if federation is not None and federation.manifest() != saved.manifest():
            raise GpflError(f"the federation differs from the one in {manifest}: pass the same one")
        federation = federation or saved
        return resolve_config(sections, federation=federation, custom_net=custom_net), federation
    except GpflError as error:
        changed = run_dir.changed_files()
        if not changed:
            raise
        raise GpflError(
            f"{error}; {run_dir.path / changed[0]} has changed since the run wrote it: restore it, or start a new run"
        ) from None


def execute(run: PreparedRun, engine: Engine) -> Result:
    """Run to the end and write models and summary; a finished run is read from its directory."""
    loop = make_loop(run, engine)
    if run.run_dir is not None and run.run_dir.finished:
        return Result(engine, loop.reopen(), run.config.run.threshold)
    with limit_threads(run.spec), matmul_precision(run.spec.precision):
        outcome = loop.run()
    return _finish(Result(engine, outcome, run.config.run.threshold), run)


def execute_trials(runs: Sequence[PreparedRun]) -> list[Result | DivergenceError]:
    """Run unfinished trials to their end, concurrently if the engine supports it.

    Trials differ in their seeds, in float hyperparameters such as λ or the learning rate, or in their clients' samples and how
    these are encoded, as long as the nets have the same shapes. One that diverges does not stop the others; its error is
    returned in place of its result.
    """
    federations = share_table([run.spec.federation for run in runs])
    runs = [
        run._replace(spec=dataclasses.replace(run.spec, federation=federation))
        for run, federation in zip(runs, federations, strict=True)
    ]
    first = runs[0].spec
    engine = make_engine(runs[0].config.run.engine, first)
    if not engine.supports_concurrent_trials:
        return [_execute_or_diverge(run) for run in runs]
    engines = [engine.for_trial(run.spec) for run in runs]
    with limit_threads(first), matmul_precision(first.precision):
        outcomes = run_concurrently([make_loop(run, engine) for run, engine in zip(runs, engines, strict=True)])
    return [
        outcome if isinstance(outcome, DivergenceError) else _finish(Result(engine, outcome, run.config.run.threshold), run)
        for engine, outcome, run in zip(engines, outcomes, runs, strict=True)
    ]


def _execute_or_diverge(run: PreparedRun) -> Result | DivergenceError:
    try:
        return execute(run, make_engine(run.config.run.engine, run.spec))
    except DivergenceError as end:
        return end.with_traceback(None)  # the traceback would keep the state alive


def _finish(result: Result, run: PreparedRun) -> Result:
    """Write the models, the metrics and the summary of a run into its directory, and call `on_run_end`."""
    if run.run_dir is not None and process_group().is_main:
        result.export(run.run_dir.path / "models")
        run.run_dir.write_metrics_report(_describe_metrics(result))
        result.summary["metrics"] = result.metrics.summary()
        if any(result.thresholds.values()):
            result.summary["thresholds"] = {name: each.value for name, each in result.thresholds.items() if each is not None}
        run.run_dir.write_summary(result.summary)  # last: it marks the run as finished
    process_group().barrier()  # a process that exited earlier would abort the main one before it has written
    for callback in run.callbacks:
        callback.on_run_end(result.summary)
    return result


def _describe_metrics(result: Result) -> dict[str, object]:
    """Return the content of metrics.json: all metrics of the models that are kept."""
    federation = result.federation
    content = {
        "round": result.summary["selected_round"],
        "selected_by": result.summary["selected_by"],
        **describe_bootstrap(int(federation.n_samples("test").sum()) * federation.table.classes),
        "test": result.metrics.to_dict(),
    }
    if federation.has_validation:
        content["validation"] = result.evaluate("validation", n_resamples=0).to_dict()
    if any(result.thresholds.values()):
        report = result.evaluate(n_resamples=0, use_thresholds=True)
        decided = {name: {key: client.values[key] for key in DECISION_METRICS} for name, client in report.clients.items()}
        content["thresholds"] = {
            "metric": result.threshold_metric,
            "clients": {name: threshold and dataclasses.asdict(threshold) for name, threshold in result.thresholds.items()},
            "test": {"overall": {key: report.overall.values[key] for key in DECISION_METRICS}, "clients": decided},
        }
    return content


def make_loop(run: PreparedRun, engine: Engine) -> RoundLoop:
    """Return the round loop of a run."""
    config, spec = run.config, run.spec
    metadata: dict[str, object] = {
        "method": config.method.name,
        "data": config.data,
        "net": spec.method.net.name,
        "clients": len(spec.federation),
        "protocol": config.run.protocol,
        "gpfl": gpfl.__version__,
        "torch": torch.__version__,
    }
    if config.defence.enabled:
        metadata["defence"] = options.option_values(config.defence)
        if guarantee := run_guarantee(spec.method, spec.federation, spec.schedule):
            metadata["privacy"] = {**guarantee, "noise_source": engine.noise_source}
    return RoundLoop(spec, engine, config.run, config.train.patience, run.run_dir, run.callbacks, metadata)
