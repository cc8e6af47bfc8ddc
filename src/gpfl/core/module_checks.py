"""Checks that a module can be a part of a net, and access to its weights and BatchNorm statistics."""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from gpfl.errors import GpflError

Parts = dict[str, nn.Module]  # the modules of a net by part: {"base": …, "head": …}

TOLERANCE, LOOSE_TOLERANCE = 1e-5, 1e-3
"""Largest difference of equal logits relative to the largest logit: for the same operations, and for another batch."""


def make_template(module: nn.Module) -> nn.Module:
    """Return a copy of the module without BatchNorm's batch counters, which are integers that no method needs."""
    out = copy.deepcopy(module)
    for layer in out.modules():
        if isinstance(layer, _NormBase):
            layer.num_batches_tracked = None
    return out


def batch_norm_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the running means and variances of a module by name."""
    for prefix, layer in module.named_modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            for name in ("running_mean", "running_var"):
                value = getattr(layer, name)
                if isinstance(value, Tensor):
                    yield (f"{prefix}.{name}" if prefix else name), value


def trainable_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters that require a gradient by name."""
    return ((name, value) for name, value in module.named_parameters() if value.requires_grad)


def check_parameters(module: nn.Module) -> None:
    """Raise if a parameter is lazy, or trainable and not float32."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise GpflError(f"'{name}' of the net is lazy and has no shape yet: call the net on a batch first")
    for name, value in trainable_parameters(module):
        if value.dtype != torch.float32:
            dtype = str(value.dtype).removeprefix("torch.")
            raise GpflError(f"'{name}' of the net is {dtype}; inputs and weights are float32: call net.float()")


def check_no_shared_weights(parts: Parts) -> None:
    """Raise if base and head share a weight: a method may upload one of them and keep the other."""
    names = {id(value): name for name, value in parts["base"].named_parameters()}
    for name, value in parts["head"].named_parameters():
        if id(value) in names:
            raise GpflError(
                f"'{name}' of the head is also '{names[id(value)]}' of the base; a method may share one and keep the other "
                "private: give each its own weight"
            )


def check_layers(parts: Parts) -> None:
    """Raise on layers whose training pass is not a function of weights and samples alone."""
    for part, module in parts.items():
        for name, layer in module.named_modules():
            path = f"{part}.{name}" if name else part
            rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0)
            if isinstance(rate, (int, float)) and rate > 0:
                raise GpflError(f"layer '{path}' has dropout {rate:g}; runs must be repeatable per client: set it to 0")
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and (layer.max_norm is not None or layer.scale_grad_by_freq):
                raise GpflError(
                    f"layer '{path}' has max_norm or scale_grad_by_freq, which make a sample's gradient depend on the rest of "
                    "the batch: remove both"
                )
            if isinstance(layer, _BatchNorm) and layer.running_mean is None:
                raise GpflError(f"layer '{path}' normalises by the batch at evaluation: set track_running_stats=True")
            if isinstance(layer, _NormBase) and layer.track_running_stats and layer.momentum is None:
                raise GpflError(f"layer '{path}' has momentum None: set a number such as 0.1")


def check_deterministic(parts: Parts, example: Tensor, name: str) -> None:
    """Raise if a training pass draws random numbers, writes to a buffer or cannot be repeated."""
    for part, module in parts.items():
        template = make_template(module).train()
        statistics = {key for key, _ in batch_norm_buffers(template)}
        before = {key: value.clone() for key, value in template.named_buffers() if key not in statistics}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            rng_state = torch.get_rng_state()
            failure = f"cannot be trained on {len(example)} samples"
            first, second = (run_module(template, example, f"the {part} of net '{name}'", failure) for _ in range(2))
            is_random = not torch.equal(rng_state, torch.get_rng_state())
        after = dict(template.named_buffers())
        for key, value in before.items():
            if key not in after or not torch.equal(value, after[key]):
                raise GpflError(
                    f"the forward pass of net '{name}' writes to its buffer '{part}.{key}'; it must depend on weights and "
                    "samples alone: remove that layer"
                )
        if is_random or not equal_logits(first, second):
            reason = "draws random numbers" if is_random else "returns another output the second time"
            raise GpflError(f"the {part} of net '{name}' {reason} in training; runs must be repeatable: remove F.dropout")
        example = run_eval(module, example)


def check_independent_samples(parts: Parts, example: Tensor, name: str) -> None:
    """Raise if the logits of a sample depend on the rest of the batch, which may be padding."""
    net = copy.deepcopy(nn.Sequential(parts["base"], parts["head"])).eval()
    with torch.no_grad():
        single = run_module(net, example[:1], f"net '{name}'", "cannot take a single sample")
        if not equal_logits(single, net(example)[:1], LOOSE_TOLERANCE):
            raise GpflError(
                f"net '{name}' returns other logits for a sample when the batch changes: remove the layer that mixes them"
            )


def trains_on_single_sample(parts: Parts, example: Tensor) -> bool:
    """Return whether a training pass takes a batch of one; BatchNorm over single values does not."""
    net = nn.Sequential(*(make_template(module) for module in parts.values())).train()
    with torch.no_grad():
        try:
            net(example[:1])
        except (ValueError, RuntimeError):
            return False
    return True


def run_module(module: nn.Module, x: Tensor, name: str, failure: str) -> Tensor:
    """Return the output of a module. Raise its error in one line, after `name` and `failure`."""
    try:
        out = module(x)
    except Exception as error:  # a user's forward may raise anything
        raise GpflError(f"{name} {failure}: {error_line(error)}") from error
    if not isinstance(out, Tensor):
        raise GpflError(f"{name} returns a {type(out).__name__}; it must return one tensor: wrap it to return the logits alone")
    return out


def run_eval(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a copy of the module in eval mode."""
    out: Tensor = copy.deepcopy(module).eval()(x)
    return out


def equal_logits(first: Tensor, second: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Return whether two tensors of logits are equal up to rounding."""
    if first.shape != second.shape:
        return False
    finite = first[torch.isfinite(first)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(first, second, rtol=0.0, atol=tolerance * (largest + 0.01), equal_nan=True)


def error_line(error: Exception) -> str:
    """Return the first line of an error; after its class, unless it is one that torch's layers raise."""
    text = str(error).strip().split("\n")[0]
    common = isinstance(error, (RuntimeError, ValueError, IndexError, AttributeError)) and text
    return text if common else f"{type(error).__name__}: {text}"
