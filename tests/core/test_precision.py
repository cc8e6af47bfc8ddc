"""Products have the precision of the run while it lasts, whatever torch was set to before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

import gpfl
from gpfl.core.precision import PrecisionSettings, apply_settings, backend, matmul_precision, read_settings
from gpfl.errors import GpflError
from gpfl.training.devices import find_device

backends = torch.backends
needs_new_api = pytest.mark.skipif(
    not hasattr(backends.cuda.matmul, "fp32_precision"), reason="this version of torch has no fp32_precision"
)


@pytest.fixture(autouse=True)
def _restore_settings() -> Iterator[None]:
    before, for_all_backends = read_settings(), getattr(backends, "fp32_precision", None)
    yield
    if for_all_backends is not None:
        backends.fp32_precision = for_all_backends
    apply_settings(before)


def set_all_backends() -> None:
    backends.fp32_precision = "tf32"


def set_matmul() -> None:
    backends.cuda.matmul.fp32_precision = "tf32"


def set_convolutions() -> None:
    backends.cudnn.conv.fp32_precision = "ieee"


def set_by_old_api() -> None:
    torch.set_float32_matmul_precision("high")
    backends.cudnn.allow_tf32 = True


SETUPS: dict[str, Callable[[], None]] = {
    "defaults": lambda: None,
    "old API": set_by_old_api,
    "all backends": set_all_backends,
    "matmul": set_matmul,
    "convolutions": set_convolutions,
}


@needs_new_api
@pytest.mark.parametrize("set_up", SETUPS.values(), ids=SETUPS)
def test_precision_is_that_of_the_run_whatever_torch_was_set_to(set_up: Callable[[], None]) -> None:
    set_up()
    before = read_settings()
    for precision, matmul, library in (("float32", "highest", "ieee"), ("tf32", "high", "tf32"), ("bf16", "medium", "tf32")):
        with matmul_precision(precision):
            assert torch.get_float32_matmul_precision() == matmul
            assert backends.cudnn.allow_tf32 == (precision != "float32")
            for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn"):
                assert backend(name).fp32_precision == library
        after = read_settings()
        assert after.by_backend == before.by_backend
        assert before.matmul in (after.matmul, None)  # None: torch raised
        assert before.allow_tf32 in (after.allow_tf32, None)


def test_precision_is_restored_after_an_error() -> None:
    before = read_settings()
    with pytest.raises(KeyError), matmul_precision("tf32"):
        raise KeyError
    assert read_settings() == before


def test_older_versions_of_torch_are_set_by_the_older_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpfl.core.precision.BACKENDS", ("cuda.unheard_of", "cudnn.unheard.of"))
    assert read_settings().by_backend == {}
    with matmul_precision("float32"):
        assert read_settings() == PrecisionSettings("highest", False, {})


def test_bf16_needs_a_cpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    for supported in checks:
        for name in checks:
            monkeypatch.setattr(torch.cpu, name, lambda name=name, supported=supported: name == supported, raising=False)
        assert find_device("cpu", "bf16") == torch.device("cpu")
    for name in checks:
        monkeypatch.delattr(torch.cpu, name)  # as in other versions of torch
    with pytest.raises(
        GpflError, match=r"run\.precision is 'bf16', which needs a GPU, or a CPU with AVX512-BF16 or AMX: leave"
    ):
        find_device("cpu", "bf16")
    with pytest.raises(GpflError, match=r"run\.precision is 'tf32', which needs a GPU"):
        find_device("cpu", "tf32")


@pytest.mark.parametrize("net", ["mlp", "cnn4"])
def test_bf16_on_a_cpu_reaches_the_accuracy_of_float32(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpfl.training.devices.cpu_has_bf16", lambda: True)  # torch emulates it
    table = gpfl.federate("digits").table
    x = table.x if net == "mlp" else F.pad(table.x.repeat_interleave(3, 2).repeat_interleave(3, 3), (2, 2, 2, 2))
    digits = gpfl.Table(x.numpy()[:600], table.y.numpy()[:600], classes=10, name="digits", pixel_max=16)
    federation = gpfl.federate(digits, clients=4, classes_per_client=5)
    rough, exact = (
        gpfl.fit("fedper", federation, net=net, rounds=12, lr=0.1, device="cpu", precision=each) for each in ("bf16", "float32")
    )
    assert rough.accuracy > 0.8
    assert rough.accuracy == pytest.approx(exact.accuracy, abs=0.04)
    assert rough.history[-1]["loss"] != exact.history[-1]["loss"]
