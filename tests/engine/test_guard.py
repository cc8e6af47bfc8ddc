"""The guard: what it rejects, and that it leaves good uploads alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gpfl.engine.guard import Guard, find_fault, update_norm

SHARED = {"base/w": torch.zeros(2, 3), "head/b": torch.ones(3)}


def upload(scale: float = 1.0, **changes: Tensor | None) -> dict[str, Tensor]:
    """Return a good upload with some tensors replaced or, if None, left out."""
    flat = {path: tensor + scale for path, tensor in SHARED.items()}
    flat |= {name.replace("_", "/"): value for name, value in changes.items() if value is not None}
    return {path: tensor for path, tensor in flat.items() if changes.get(path.replace("/", "_"), tensor) is not None}


def test_good_uploads_pass() -> None:
    assert Guard(SHARED, max_norm_ratio=3).find_faults({0: upload(), 1: upload(2.0), 5: upload(0.5)}, SHARED) == {}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"base_w": torch.full((2, 3), float("nan"))}, "'base/w' has NaN or infinity"),
        ({"head_b": torch.tensor([1.0, float("inf"), 0.0])}, "'head/b' has NaN or infinity"),
        ({"base_w": torch.zeros(1, 1)}, r"'base/w' has shape (1, 1); it must be (2, 3)"),
        ({"base_w": torch.zeros(2, 3, dtype=torch.float64)}, "'base/w' is float64; it must be float32"),
        ({"base_w": None}, "'base/w' is missing"),
        ({"gce_w": torch.zeros(2)}, "the method does not upload 'gce/w'"),
    ],
)
def test_faulty_upload_is_named_with_the_reason(changes: dict[str, Tensor | None], fault: str) -> None:
    assert find_fault(upload(**changes), SHARED) == fault
    assert Guard(SHARED).find_faults({0: upload(), 3: upload(**changes)}, SHARED) == {3: fault}


def test_norm_is_compared_with_the_median_of_the_cohort() -> None:
    uploads = {client: upload(float(client + 1)) for client in range(3)} | {3: upload(1000.0)}
    assert Guard(SHARED, max_norm_ratio=10).find_faults(uploads, SHARED) == {
        3: "its update has norm 3e+03, more than 10 times the cohort's median 7.5"
    }
    assert Guard(SHARED).find_faults(uploads, SHARED) == {}


def test_norm_of_two_clients_says_nothing_about_either() -> None:
    assert Guard(SHARED, max_norm_ratio=2).find_faults({0: upload(), 1: upload(1000.0)}, SHARED) == {}


def test_update_is_what_changed_since_the_download() -> None:
    assert update_norm(upload(2.0), SHARED) == pytest.approx(6.0)  # nine entries moved by 2
    assert update_norm({}, SHARED) == 0.0
