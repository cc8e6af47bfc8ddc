"""Load personal models: of a file, or of the clients of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from gpfl.core import options, tree
from gpfl.core.module_checks import LOOSE_TOLERANCE, equal_logits
from gpfl.core.net import InputSpec
from gpfl.core.tree import Tree
from gpfl.data.files.raw_table import join_names
from gpfl.errors import GpflError, did_you_mean, pluralize
from gpfl.inference.client_model import ENCODER_KEYS, ClientModel, OutputSpec, find_model_files
from gpfl.inference.threshold import Threshold
from gpfl.io.tensors import read_tensors
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.models.custom import CustomNet, build_net, check_custom_net


def load_model(path: str | Path, client: str = "", *, net: CustomNet | None = None, head: str | None = None) -> ClientModel:
    """Load a client's model.

    Args:
        path: Folder of a finished run, a folder of models, or a file that `ClientModel.save` wrote.
        client: Name of the client; it may be left out if there is only one.
        net: The net of the run, if it was given in Python.
        head: Name of the submodule that is the head of `net`, if it was given.

    """
    source = Path(path)
    if not source.is_dir():
        model = _read_model(source, net, head)
        if client not in ("", model.name):
            raise GpflError(f"{path} is the model of client '{model.name}', not of '{client}': leave out --client")
        return model
    files = find_models(source)
    if not client and len(files) > 1:
        names = join_names(list(files))
        raise GpflError(f"{path} has the models of {pluralize(len(files), 'client')}: name one with --client ({names})")
    return next(iter(load_models(source, [client] if client else (), net=net, head=head).values()))


def load_models(
    path: str | Path, clients: Sequence[str] = (), *, net: CustomNet | None = None, head: str | None = None
) -> dict[str, ClientModel]:
    """Load the models of clients by name, all if none are named; see `load_model`."""
    source = Path(path)
    if not source.is_dir():
        models = [load_model(source, client, net=net, head=head) for client in clients or ("",)]
        return {model.name: model for model in models}
    files = find_models(source)
    if (unknown := next((name for name in clients if name not in files), None)) is not None:
        raise GpflError(f"{source} has no model of a client '{unknown}'; {did_you_mean(unknown, files)}")
    return {name: _read_model(files[name], net, head) for name in clients or files}


def list_models(path: str | Path) -> dict[str, Path]:
    """Return the model file of each client by name: of a finished run, a folder of models, or the file of one model."""
    source = Path(path)
    return find_models(source) if source.is_dir() else {load_model(source).name: source}


def _read_model(path: Path, net: CustomNet | None, head: str | None) -> ClientModel:
    check_custom_net(net, head)
    if not path.exists():
        raise GpflError(f"there is no run or model {path}")
    try:
        flat, metadata = read_tensors(path)
    except GpflError:
        if path.suffix == ".safetensors":
            raise
        raise GpflError(f"{path} is not a model: give the folder of a run, or a .safetensors file in its models") from None
    if not {"client", "probe_logits"} <= metadata.keys():
        raise GpflError(f"{path} is not a client's model of gpfl")
    content = cast(dict[str, Any], metadata)
    net_name, method_name = content["net"].pop("name"), content["method"].pop("name")
    if net is None and net_name not in NETS:
        raise GpflError(f"{path} was made with a net given in Python: gpfl.load_model(path, net=…)")
    if method_name not in METHODS:
        raise GpflError(f"{path} was made with the method '{method_name}'; known: {', '.join(METHODS)}")
    spec = InputSpec(**{**content["input_spec"], "shape": tuple(content["input_spec"]["shape"])})
    architecture = options.build(NETS[net_name], content["net"], "net") if net is None else net
    built = build_net(architecture, spec.probe(), int(content["classes"]), head=head)
    weights: Tree = {**{branch: {} for branch in content["branches"]}, **tree.unflatten(flat)}
    if mismatch := built.describe_mismatch(weights):
        raise GpflError(f"{path} was made with another net: {mismatch}; give the net that it was trained with")
    method = options.build(METHODS[method_name], content["method"], "method").bind(built, lr=0.0, epochs=1)
    encoders = [kind.from_dict(content[key]) for kind, key in ENCODER_KEYS.items() if key in content]
    outputs = content.get("output_spec", {"class_names": [], "label": ""})  # models of earlier versions have none
    output_spec = OutputSpec(tuple(outputs["class_names"]), outputs["label"])
    threshold = Threshold(**content["threshold"]) if "threshold" in content else None
    model = ClientModel(method, weights, content["client"], spec, encoders[0] if encoders else None, output_spec, threshold)
    if not equal_logits(torch.tensor(content["probe_logits"]), torch.tensor(model.probe_logits()), LOOSE_TOLERANCE):
        raise GpflError(
            f"{path} was made with another net: its weights fit, but its logits differ; "
            "give the net that it was trained with, with the same constants and activations"
        )
    return model


def find_models(run: Path) -> dict[str, Path]:
    """Return the model file of each client by name, in a finished run or a folder of models. Raise if there is none."""
    trials, runs = (sorted(path.parent for path in run.glob(f"{each}/config.toml")) for each in ("seed-*", "*/seed-*"))
    is_run = (run / "config.toml").is_file()
    finished = (run / "summary.json").is_file()
    files = find_model_files(run / "models") if finished else find_model_files(run) if not is_run else {}
    if files:
        return files
    if trials or runs:
        what = f"the trials of {pluralize(len(trials), 'seed')}" if trials else "the runs of several methods"
        raise GpflError(f"{run} holds {what}: choose one of them, such as {(trials or runs)[0]}")
    if (run / "diverged.json").is_file():
        raise GpflError(f"{run} has no models, because its loss became NaN or infinite: train again with a lower --lr")
    if is_run and not finished:
        raise GpflError(f"{run} is not finished, so it has no models yet: gpfl resume {run}")
    if finished:
        raise GpflError(f"{run} has no models; they were deleted: train again with gpfl run")
    raise GpflError(f"{run} holds no models: give the folder of a run, or a model file from its folder models")
