"""Users' modules: what is asked of one that is to be a net, and how it is cut into base and head."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from gpfl.errors import GpflError

Parts = dict[str, nn.Module]

EQUAL, CLOSE = 1e-5, 1e-3
"""How far scores of the same rows may lie apart, as a share of the largest: by the same steps, and on another machine."""


# Building and cutting.


def build_module(given: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Gives a module of its own on the CPU: a copy of the one given, or what the function given builds."""
    built = given if isinstance(given, nn.Module) else call_builder(given)
    refuse_unready(built)
    try:
        return copy.deepcopy(built).cpu()
    except RuntimeError as problem:
        raise GpflError(f"the net cannot be copied: {reason(problem)}") from problem


def call_builder(given: Callable[[], nn.Module]) -> nn.Module:
    """Gives what a function builds, having refused what is no function without arguments."""
    if not callable(given):
        raise GpflError(f"net is {given!r}; it must be the name of a net, an nn.Module, or a function that builds one")
    name = getattr(given, "__name__", type(given).__name__)
    try:
        inspect.signature(given).bind()
    except (TypeError, ValueError) as problem:
        raise GpflError(
            f"net is {name}, which cannot be called without arguments ({problem}): "
            f"give a module, net={name}(…), or a function, net=lambda: {name}(…)"
        ) from None
    built = given()
    if not isinstance(built, nn.Module):
        raise GpflError(f"the function given as net returned {type(built).__name__}; it must return an nn.Module")
    return built


def split_module(module: nn.Module, head: str | None, example: Tensor) -> Parts:
    """Gives a module, which becomes the base, cut into base and head: `head` names a submodule, else the last linear layer."""
    name = head if head is not None else last_linear(module)
    submodules = dict(module.named_modules())
    if name not in submodules or name == "":
        raise GpflError(f"the net has no submodule '{name}' to be its head; it has: {', '.join(list(submodules)[1:])}")
    wanted = whole_scores(module, example)
    *parents, attribute = name.split(".")
    setattr(module.get_submodule(".".join(parents)), attribute, nn.Identity())
    parts: Parts = {"base": module, "head": submodules[name]}
    refuse_shared(parts)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = evaluated(parts["head"], evaluated(module, example))
    except Exception as problem:
        inside = " (its forward must call it and use nothing else of it)" if isinstance(problem, AttributeError) else ""
        raise GpflError(f"the net cannot be cut at '{name}': {reason(problem)}{inside}; name its head: head='…'") from problem
    if not same_scores(wanted, found):
        raise GpflError(f"'{name}' is not the last thing the net does, so it cannot be its head; name another: head='…'")
    return parts


def whole_scores(module: nn.Module, example: Tensor) -> Tensor:
    """Gives the scores of a net before it is cut; one that cannot take the rows, or gives something else, is refused."""
    refusal = f"cannot take rows of shape {tuple(example.shape[1:])}, as the data has them"
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first, second = (attempt(copy.deepcopy(module).eval(), example, "the net", refusal) for _ in range(2))
    if not same_scores(first, second):
        raise GpflError("the net gives other scores for the same rows the second time; runs must be repeatable: no F.dropout")
    return first


def attempt(module: nn.Module, x: Tensor, who: str, refusal: str) -> Tensor:
    """Gives the output of a module, or refuses it in one line: `who` `refusal`, and the reason."""
    try:
        out = module(x)
    except Exception as problem:  # anything may go wrong in a user's forward
        raise GpflError(f"{who} {refusal}: {reason(problem)}") from problem
    if not isinstance(out, Tensor):
        raise GpflError(f"{who} returns a {type(out).__name__}; it must return one tensor: wrap it to pick the scores out")
    return out


def evaluated(module: nn.Module, x: Tensor) -> Tensor:
    """Gives the output of a copy of the module in eval mode."""
    out: Tensor = copy.deepcopy(module).eval()(x)
    return out


def last_linear(module: nn.Module) -> str:
    """Gives the name of the last linear layer."""
    names: list[str] = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and name]
    if not names:
        raise GpflError("the net has no linear layer below its top; name the submodule that is its head: head='…'")
    return names[-1]


# What is asked of a net.


def refuse_unready(module: nn.Module) -> None:
    """Refuses weights that are not there yet, or are of another type than the data."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(value):
            raise GpflError(f"'{name}' of the net is lazy and has no shape yet: call the net once on a batch, then give it")
    for name, value in module.named_parameters():
        if value.requires_grad and value.dtype != torch.float32:
            kind = str(value.dtype).removeprefix("torch.")
            raise GpflError(f"'{name}' of the net is {kind}; rows and weights are float32: call net.float()")


def refuse_shared(parts: Parts) -> None:
    """Refuses a weight that lies in both parts: one of them may travel while the other stays."""
    names = {id(value): name for name, value in parts["base"].named_parameters()}
    for name, value in parts["head"].named_parameters():
        if id(value) in names:
            raise GpflError(
                f"'{name}' of the head is also '{names[id(value)]}' of the base; one may travel while the other stays: "
                "give each a weight of its own"
            )


def refuse_layers(parts: Parts) -> None:
    """Refuses layers whose result is not a function of weights and rows alone."""
    for part, module in parts.items():
        for name, layer in module.named_modules():
            where = f"{part}.{name}" if name else part
            rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0)
            if isinstance(rate, (int, float)) and rate > 0:
                raise GpflError(f"layer '{where}' has dropout {rate:g}; runs must be repeatable per client: set it to 0")
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and (layer.max_norm is not None or layer.scale_grad_by_freq):
                raise GpflError(
                    f"layer '{where}' has max_norm or scale_grad_by_freq, by which rows of a batch change each other's steps: "
                    "leave both out"
                )
            if isinstance(layer, _BatchNorm) and layer.running_mean is None:
                raise GpflError(f"layer '{where}' normalises by the batch at evaluation: set track_running_stats=True")
            if isinstance(layer, _NormBase) and layer.track_running_stats and layer.momentum is None:
                raise GpflError(f"layer '{where}' has momentum None; give it a number such as 0.1")


def refuse_state(parts: Parts, example: Tensor, name: str) -> None:
    """Refuses a net whose training pass draws random numbers, writes into a buffer or cannot be repeated."""
    for part, module in parts.items():
        trained = template(module).train()
        kept = {key for key, _ in statistics(trained)}
        before = {key: value.clone() for key, value in trained.named_buffers() if key not in kept}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            state = torch.get_rng_state()
            refusal = f"cannot be trained on {len(example)} rows"
            first, second = (attempt(trained, example, f"the {part} of net '{name}'", refusal) for _ in range(2))
            drawn = not torch.equal(state, torch.get_rng_state())
        after = dict(trained.named_buffers())
        for key, value in before.items():
            if key not in after or not torch.equal(value, after[key]):
                raise GpflError(
                    f"the forward of net '{name}' writes into its buffer '{part}.{key}'; a pass must depend on "
                    "weights and rows alone: leave that layer out"
                )
        if drawn or not same_scores(first, second):
            why = "draws random numbers" if drawn else "gives other outputs the second time"
            raise GpflError(f"the {part} of net '{name}' {why} in training; runs must be repeatable per client: no F.dropout")
        example = evaluated(module, example)


def refuse_mixing(parts: Parts, example: Tensor, name: str) -> None:
    """Refuses a net whose scores of a row depend on the rows beside it: batches may be padded."""
    net = copy.deepcopy(nn.Sequential(parts["base"], parts["head"])).eval()
    with torch.no_grad():
        alone = attempt(net, example[:1], f"net '{name}'", "cannot take a single row")
        if not same_scores(alone, net(example)[:1], CLOSE):
            raise GpflError(f"net '{name}' gives a row other scores when other rows are beside it: let it take rows one by one")


def trains_on_one_row(parts: Parts, example: Tensor) -> bool:
    """Tells whether a training pass takes a batch of one row; BatchNorm over single values does not."""
    net = nn.Sequential(*(template(module) for module in parts.values())).train()
    with torch.no_grad():
        try:
            net(example[:1])
        except (ValueError, RuntimeError):
            return False
    return True


# Copies, statistics, scores.


def template(module: nn.Module) -> nn.Module:
    """Gives a copy of the module that counts no batches: the counter is an integer that no method needs."""
    out = copy.deepcopy(module)
    for layer in out.modules():
        if isinstance(layer, _NormBase):
            layer.num_batches_tracked = None
    return out


def statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gives the running means and variances of a module by name."""
    for prefix, layer in module.named_modules():
        if isinstance(layer, _NormBase) and layer.track_running_stats:
            for name in ("running_mean", "running_var"):
                value = getattr(layer, name)
                if isinstance(value, Tensor):
                    yield (f"{prefix}.{name}" if prefix else name), value


def trainable(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Gives the weights of a module that move, by name; the others (requires_grad=False) are constants of it."""
    return ((name, value) for name, value in module.named_parameters() if value.requires_grad)


def same_scores(one: Tensor, other: Tensor, share: float = EQUAL) -> bool:
    """Tells whether two tensors of scores agree but for rounding."""
    if one.shape != other.shape:
        return False
    finite = one[torch.isfinite(one)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=share * (largest + 0.01), equal_nan=True)


def reason(problem: Exception) -> str:
    """Gives an exception in one line, with its kind where that is not one that torch's layers use."""
    text = str(problem).strip().split("\n")[0]
    plain = isinstance(problem, (RuntimeError, ValueError, IndexError, AttributeError)) and text
    return text if plain else f"{type(problem).__name__}: {text}"
