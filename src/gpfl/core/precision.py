"""The precision of matrix products and convolutions during a run."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

T = TypeVar("T")
MATMUL_PRECISIONS = {"float32": "highest", "tf32": "high", "bf16": "medium"}
"""The names that `torch.set_float32_matmul_precision` has for our precisions."""
BACKENDS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Parts of `torch.backends` that have a `fp32_precision` of their own in newer versions of torch."""
NORMALISATIONS = {F.batch_norm, F.group_norm, F.instance_norm, F.layer_norm}
active = ["float32"]
"""Precisions of the runs in progress, the innermost last. Nets on CPUs read it, since torch has no setting of bf16 for them."""


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Run matrix products and convolutions in a precision, and restore torch's settings after.

    By default torch lets convolutions on a GPU use TF32. With bf16 our kernels round the factors to bf16; cuBLAS and cuDNN
    then use TF32, as torch's "medium" permits. On a CPU, bf16 holds for nets, see `call_in_bf16`.
    """
    before = read_settings()
    exact = precision == "float32"
    by_backend = {name: "ieee" if exact else "tf32" for name in before.by_backend if exact or not name.startswith("mkldnn")}
    apply_settings(PrecisionSettings(MATMUL_PRECISIONS[precision], not exact, by_backend))
    active.append(precision)
    try:
        yield
    finally:
        active.pop()
        apply_settings(before)


def call_in_bf16(net: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the output of a net on a CPU, whose convolutions and linear layers round their inputs and weights to bf16.

    The weights themselves, normalisation and the output are float32.
    """
    # The cache of autocast would return the weights of older steps.
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), _Float32Normalisation():
        return net().float()


class _Float32Normalisation(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in NORMALISATIONS:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))


class PrecisionSettings(NamedTuple):
    """torch's precision settings: those of all versions, and those of newer versions by backend."""

    matmul: str | None  # None where torch raises because only the newer API can express the current setting
    allow_tf32: bool | None  # for convolutions; None as above
    by_backend: dict[str, str]


def read_settings() -> PrecisionSettings:
    """Return torch's current settings."""
    by_backend = {name: part.fp32_precision for name in BACKENDS if hasattr(part := backend(name), "fp32_precision")}
    return PrecisionSettings(
        _value_or_none(torch.get_float32_matmul_precision), _value_or_none(lambda: torch.backends.cudnn.allow_tf32), by_backend
    )


def apply_settings(settings: PrecisionSettings) -> None:
    """Set both APIs, the newer one last: it overrides the older, and reading the older then may raise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises the newer API
        if settings.matmul is not None:
            torch.set_float32_matmul_precision(settings.matmul)
        if settings.allow_tf32 is not None:
            torch.backends.cudnn.allow_tf32 = settings.allow_tf32
    for name, value in settings.by_backend.items():
        backend(name).fp32_precision = value


def backend(name: str) -> Any:
    """Return the part of `torch.backends` with a dotted name, or None where this version of torch has none."""
    part: Any = torch.backends
    for attribute in name.split("."):
        part = getattr(part, attribute, None)
    return part


def _value_or_none(read: Callable[[], T]) -> T | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return read()
    except RuntimeError:
        return None
