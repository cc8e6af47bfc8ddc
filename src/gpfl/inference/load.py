"""Load a personal model from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from gpfl.core import options, tree
from gpfl.core.module_checks import LOOSE_TOLERANCE, equal_logits
from gpfl.core.net import InputSpec
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.inference.client_model import ENCODER_KEYS, ClientModel, read_output_spec
from gpfl.inference.threshold import Threshold
from gpfl.io.tensors import read_tensors
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.models.custom import CustomNet, build_net, check_custom_net


def load_model(path: str | Path, *, net: CustomNet | None = None, head: str | None = None) -> ClientModel:
    """Load a client's model from its file.

    Args:
        path: A file of a run's folder `models`, or one that `ClientModel.save` wrote.
        net: The net of the run, if it was given in Python.
        head: Name of the submodule that is the head of `net`, if it was given.

    """
    check_custom_net(net, head)
    flat, metadata = read_tensors(Path(path))
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
    outputs = read_output_spec(content.get("output_spec"), built.classes)
    threshold = Threshold.from_dict(content["threshold"]) if "threshold" in content else None
    model = ClientModel(method, weights, content["client"], spec, encoders[0] if encoders else None, outputs, threshold)
    if not equal_logits(torch.tensor(content["probe_logits"]), torch.tensor(model.probe_logits()), LOOSE_TOLERANCE):
        raise GpflError(
            f"{path} was made with another net: its weights fit, but its logits differ; "
            "give the net that it was trained with, with the same constants and activations"
        )
    return model
