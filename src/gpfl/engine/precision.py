"""The precision of products: what torch is told for the length of a run, and told again after it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from gpfl.engine.base import RunSpec

T = TypeVar("T")
PRECISIONS = {"float32": "highest", "tf32": "high", "bf16": "medium"}
"""What torch calls the precisions of products."""
LIBRARIES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Operations that newer versions of torch set one by one."""


def exactness(spec: RunSpec) -> AbstractContextManager[None]:
    """Runs products in the precision of the setting, and restores what was set before."""
    return products_in(spec.precision)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Runs products in a precision, and restores what was set before.

    torch lets convolutions on a GPU use TF32 unless it is told otherwise. With bf16 our kernels round what they multiply to
    it; libraries then take TF32, as torch's "medium" lets them.
    """
    before = held()
    exact = precision == "float32"
    newer = {name: "ieee" if exact else "tf32" for name in before.newer if exact or not name.startswith("mkldnn")}
    set_all(Held(PRECISIONS[precision], not exact, newer))
    try:
        yield
    finally:
        set_all(before)


class Held(NamedTuple):
    """What torch holds: by the words that all versions know, and by those of newer ones."""

    products: str | None  # none where torch refuses to tell, since newer words were used that the older ones do not have
    convolutions: bool | None  # whether they may use TF32
    newer: dict[str, str]


def held() -> Held:
    """Gives what torch holds."""
    newer = {name: part.fp32_precision for name in LIBRARIES if hasattr(part := operations(name), "fp32_precision")}
    return Held(told(torch.get_float32_matmul_precision), told(lambda: torch.backends.cudnn.allow_tf32), newer)


def set_all(asked: Held) -> None:
    """Tells torch both ways: the older "no TF32" gives way to a newer word for everything, and the older are asked later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the advice to use newer words
        if asked.products is not None:
            torch.set_float32_matmul_precision(asked.products)
        if asked.convolutions is not None:
            torch.backends.cudnn.allow_tf32 = asked.convolutions
    for name, word in asked.newer.items():
        operations(name).fp32_precision = word


def told(ask: Callable[[], T]) -> T | None:
    """Gives what torch answers, or nothing where it refuses to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ask()
    except RuntimeError:
        return None


def operations(name: str) -> Any:
    """Gives what holds the precision of some operations; nothing in a version that has it not."""
    part: Any = torch.backends
    for word in name.split("."):
        part = getattr(part, word, None)
    return part
