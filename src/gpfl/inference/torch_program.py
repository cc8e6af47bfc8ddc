"""A model's net as Python source: the torch operators from stored samples to logits, without gpfl or the net's classes."""

import copy
import re

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind

from gpfl.core.net import InputSpec
from gpfl.errors import GpflError
from gpfl.inference.client_model import ClientModel

STORED_TYPES = {"floats": torch.float32, "pixels": torch.uint8, "counts": torch.int64, "tokens": torch.int64}
"""Type in which an exported model takes samples of each kind."""

SOURCE_NAMES = {"torch", "device", "inf", "nan"}  # what the source of a net imports
SOURCE = '''"""The net: samples to logits, as the torch operators that it consists of."""

from collections.abc import Mapping

import torch
from torch import device, inf, nan


def logits(weights: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the logits of samples, (samples, classes)."""
    # {shape}
'''


class _FromStoredSamples(nn.Module):
    """A model's module with the conversion of stored samples in front."""

    def __init__(self, module: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.module, self.spec = module, spec

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(self.spec.to_net(x))
        return out


def trace(model: ClientModel) -> ExportedProgram:
    """Return the operators of a model's net, from samples in `STORED_TYPES` to logits."""
    spec = model.input_spec
    module = _FromStoredSamples(model.module(), spec).eval()
    samples = torch.zeros(2, *spec.shape, dtype=STORED_TYPES[spec.kind])
    try:
        return export(module, (samples,), dynamic_shapes=({0: Dim("samples")},), strict=False)
    except Exception as problem:  # a user's module may fail in any way
        raise _export_error(model, problem) from None


def weights_of(program: ExportedProgram) -> dict[str, Tensor]:
    """Return the tensors of a program by the names that its source reads."""
    tensors = {**program.state_dict, **{k: v for k, v in program.constants.items() if isinstance(v, Tensor)}}
    targets = _targets(program).values()
    return {target.removeprefix("module."): tensors[target].detach().cpu().contiguous() for target in targets}


def to_source(program: ExportedProgram, model: ClientModel) -> str:
    """Return Python source with a function `logits(weights, x)` that computes a program."""
    graph, spec = copy.deepcopy(program.graph), model.input_spec
    for node in graph.nodes:
        if not node.users and str(node.target).startswith("aten._assert"):
            graph.erase_node(node)
    code = graph.python_code("self")
    body = re.sub(r"(;  .*| )+$", "", code.src.partition("\n    ")[2], flags=re.MULTILINE)  # without `name = None`
    unknown = {name for name in code.globals if re.search(rf"\b{name}\b", body)} - SOURCE_NAMES
    if unknown or "self." in body:
        raise _export_error(model, TypeError("it cannot be written as source"))
    for name, target in _targets(program).items():
        body = re.sub(rf"\b{name}\b", f'weights["{target.removeprefix("module.")}"]', body)
    body = re.sub(r"return \((.*),\)", r"return \1", body)
    dtype = str(STORED_TYPES[spec.kind]).removeprefix("torch.")
    shape = f"x: {dtype}, (samples, {', '.join(map(str, spec.shape))})"
    return SOURCE.replace("{shape}", shape) + f"    {body.strip()}\n"


def _targets(program: ExportedProgram) -> dict[str, str]:
    """Return the name of the tensor behind each placeholder but the samples."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    return {each.arg.name: str(each.target) for each in program.graph_signature.input_specs if each.kind in kinds}


def _export_error(model: ClientModel, problem: Exception) -> GpflError:
    reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
    return GpflError(
        f"net '{model.method.net.name}' cannot be exported ({reason}): use operators of torch alone, and no branches on "
        "values of tensors"
    )
