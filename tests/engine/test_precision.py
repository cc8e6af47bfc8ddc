"""Products have the precision of the setting for the length of a run, whatever torch was told before it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import pytest
import torch

from gpfl.engine import exactness
from gpfl.engine.precision import Held, held, operations, set_all

backends = torch.backends
newer = pytest.mark.skipif(
    not hasattr(backends.cuda.matmul, "fp32_precision"), reason="this version of torch has no such words"
)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, everything = held(), getattr(backends, "fp32_precision", None)
    yield
    if everything is not None:
        backends.fp32_precision = everything
    set_all(before)


def of(precision: str) -> object:
    return types.SimpleNamespace(precision=precision)


def set_for_everything() -> None:
    backends.fp32_precision = "tf32"


def set_for_products() -> None:
    backends.cuda.matmul.fp32_precision = "tf32"


def set_for_convolutions() -> None:
    backends.cudnn.conv.fp32_precision = "ieee"


def set_in_older_words() -> None:
    torch.set_float32_matmul_precision("high")
    backends.cudnn.allow_tf32 = True


TOLD: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "in older words": set_in_older_words,
    "for everything": set_for_everything,
    "for products": set_for_products,
    "for convolutions": set_for_convolutions,
}


@newer
@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
def test_precision_is_that_of_the_setting_whatever_torch_was_told(told: Callable[[], None]) -> None:
    told()
    before = held()
    for precision, word, library in (("float32", "highest", "ieee"), ("tf32", "high", "tf32"), ("bf16", "medium", "tf32")):
        with exactness(of(precision)):  # type: ignore[arg-type]
            assert torch.get_float32_matmul_precision() == word
            assert backends.cudnn.allow_tf32 == (precision != "float32")
            for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn"):
                assert operations(name).fp32_precision == library
        after = held()
        assert after.newer == before.newer
        assert before.products in (after.products, None)  # none: torch did not tell
        assert before.convolutions in (after.convolutions, None)


def test_precision_is_given_back_after_a_mistake_too() -> None:
    before = held()
    with pytest.raises(KeyError), exactness(of("tf32")):  # type: ignore[arg-type]
        raise KeyError
    assert held() == before


def test_older_versions_are_told_in_the_words_that_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpfl.engine.precision.LIBRARIES", ("cuda.unheard_of", "cudnn.unheard.of"))
    assert held().newer == {}
    with exactness(of("float32")):  # type: ignore[arg-type]
        assert held() == Held("highest", False, {})
