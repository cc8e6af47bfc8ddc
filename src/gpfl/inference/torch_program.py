"""A model's net as Python source: the torch operators from stored samples to logits, without gpfl or the net's classes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind

from gpfl.core.net import InputSpec
from gpfl.errors import GpflError
from gpfl.inference.client_model import ClientModel

STORED_TYPES = {"floats": torch.float32, "pixels": torch.uint8, "counts": torch.int64, "tokens": torch.int64}
"""Type in which an exported model takes samples of each kind."""

SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//"}

SOURCE = '''"""The net: samples to logits, as the torch operators that it consists of."""

from collections.abc import Mapping

import torch


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
    return {_weight_name(target): tensors[target].detach().cpu().contiguous() for target in _targets(program).values()}


def to_source(program: ExportedProgram, model: ClientModel) -> str:
    """Return Python source with a function `logits(weights, x)` that computes a program."""
    names = {name: f"weights[{_weight_name(target)!r}]" for name, target in _targets(program).items()}
    spec = model.input_spec
    lines = []
    try:
        for node in program.graph.nodes:
            if node.op == "placeholder":
                names.setdefault(node.name, "x")
            elif node.op == "output":
                lines.append(f"    return {_format(node.args[0][0], names)}")
            elif node.users or not str(node.target).startswith("aten._assert"):
                names[node.name] = node.name
                lines.append(f"    {node.name} = {_format_call(node, names)}")
    except TypeError as problem:
        raise _export_error(model, problem) from None
    dtype = str(STORED_TYPES[spec.kind]).removeprefix("torch.")
    shape = f"x: {dtype}, (samples, {', '.join(map(str, spec.shape))})"
    return SOURCE.replace("{shape}", shape) + "\n".join(lines).replace("'", '"') + "\n"


def _targets(program: ExportedProgram) -> dict[str, str]:
    """Return the name of the tensor behind each placeholder but the samples."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    return {each.arg.name: str(each.target) for each in program.graph_signature.input_specs if each.kind in kinds}


def _weight_name(target: str) -> str:
    return target.removeprefix("module.")


def _format_call(node: fx.Node, names: Mapping[str, str]) -> str:
    arguments = [_format(value, names) for value in node.args]
    arguments += [f"{key}={_format(value, names)}" for key, value in node.kwargs.items()]
    if isinstance(node.target, torch._ops.OpOverload):
        return f"torch.ops.{node.target}({', '.join(arguments)})"
    if getattr(node.target, "__module__", "") == "_operator":  # arithmetic on sizes, and parts of a tuple
        name = getattr(node.target, "__name__", "")
        if name in SYMBOLS:
            return f" {SYMBOLS[name]} ".join(f"({each})" for each in arguments)
        if name == "getitem":
            return f"{arguments[0]}[{arguments[1]}]"
    raise TypeError(f"its operator {node.target} cannot be written as source")


def _format(value: object, names: Mapping[str, str]) -> str:
    """Return an argument of an operator as source."""
    if isinstance(value, fx.Node):
        return names[value.name]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_format(each, names) for each in value)}]"
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return '"cpu"'
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)):
        return repr(value)
    raise TypeError(f"its argument {value!r} cannot be written as source")


def _export_error(model: ClientModel, problem: Exception) -> GpflError:
    reason = (str(problem).strip() or type(problem).__name__).splitlines()[0]
    return GpflError(
        f"net '{model.method.net.name}' cannot be exported ({reason}): use operators of torch alone, and no branches on "
        "values of tensors"
    )
