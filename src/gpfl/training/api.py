"""The Python interface to training: fit, resume, load."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpfl.core import options
from gpfl.core.method import Method
from gpfl.defences import DefenceConfig
from gpfl.engine import make_engine
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation import Federation
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.models.custom import CustomNet, NetLike, check_head
from gpfl.training.callbacks import Callback
from gpfl.training.config import ConfigDict, RunOptions, TrainOptions, resolve_config
from gpfl.training.execute import execute, open_run, start_run
from gpfl.training.result import Result
from gpfl.training.run_dir import RunDir


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
