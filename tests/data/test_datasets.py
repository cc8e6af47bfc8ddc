from __future__ import annotations

import numpy as np
import pytest
import torch

from gpfl.core.net import InputSpec
from gpfl.data import DATASETS, Table
from gpfl.errors import GpflError


def test_digits_are_complete_and_scaled_to_minus_one_to_one() -> None:
    table = DATASETS["digits"].load()
    assert (len(table), table.shape, table.classes, table.name) == (1797, (1, 8, 8), 10, "digits")
    x = table.inputs(torch.arange(len(table)))
    assert (float(x.min()), float(x.max())) == (-1.0, 1.0)
    assert np.bincount(table.y).min() > 170


def test_bytes_are_scaled_and_floats_are_not() -> None:
    pixels = Table(np.array([[0, 255]], dtype=np.uint8), [0])
    assert pixels.inputs(torch.tensor([0])).tolist() == [[-1.0, 1.0]]
    assert Table([[0.0, 255.0]], [0]).inputs(torch.tensor([0])).tolist() == [[0.0, 255.0]]


def test_an_index_of_minus_one_is_padding() -> None:
    table = Table([[1.0], [2.0], [3.0]], [0, 1, 2])
    batch = table.batch(torch.tensor([[2, -1], [1, 0]]))
    assert batch.mask.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert (batch.x[0, 0].item(), batch.y[0, 0].item()) == (3.0, 2)
    assert batch.x.shape == (2, 2, 1)


def test_classes_are_counted_from_labels_unless_given() -> None:
    assert Table([[1.0], [2.0]], [0, 2]).classes == 3
    assert Table([[1.0], [2.0]], [0, 2], classes=5).classes == 5


def test_equal_content_has_an_equal_digest_and_other_content_another() -> None:
    x, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    digest = Table(x, y).digest
    assert Table(torch.tensor(x), torch.tensor(y), name="other").digest == digest
    pixels = x.astype(np.uint8)
    others = [Table(x + 1, y), Table(x, 1 - y), Table(x, y, classes=3), Table(x[:, None], y)]
    others += [Table(pixels, y), Table(pixels, y, pixel_max=16)]
    assert len({digest, *(other.digest for other in others)}) == 7


@pytest.mark.parametrize(
    "x",
    [
        np.frombuffer(bytes([1, 2]), dtype=np.uint8).reshape(2, 1),
        np.array([[1], [2]], dtype=">f8"),
        np.array([[1], [2]], dtype=np.longdouble),
        np.array([[1, 0], [2, 0]], dtype=np.int16)[:, :1],
        torch.tensor([[1.0], [2.0]], requires_grad=True),
    ],
    ids=["read-only", "other byte order", "long", "strided", "with gradient"],
)
def test_samples_may_be_any_array_of_numbers(x: object) -> None:
    table = Table(x, [0, 1])  # type: ignore[arg-type]
    assert table.x.flatten().tolist() == [1, 2]
    assert not table.x.requires_grad
    assert len(table.digest) == 64


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1.0], [np.nan], [np.inf]], [0, 1, 1], "NaN or infinity in 2 of 3 rows, first in row 1"),
        ([[1.0], [1e300]], [0, 1], "NaN or infinity in 1 of 2 rows, first in row 1"),
        ([[1.0], [2.0]], [0], "has 2 rows and 1 labels"),
        ([1.0, 2.0], [0, 1], "has rows without dimensions (shape (2,))"),
        ([[1.0], [2.0, 3.0]], [0, 1], "rows of unequal shape"),
        ([["a"], ["b"]], [0, 1], "encode text and categories as numbers first"),
        ([[1.0], [2.0]], ["cat", "dog"], "encode text and categories as numbers first"),
        ([[1.0], [2.0]], [[0], [1]], "labels of shape (2, 1)"),
        ([[1.0], [2.0]], [0, 0.5], "labels that are not whole numbers, such as 0.5"),
        ([[1.0], [2.0]], [0, np.nan], "labels that are not whole numbers, such as nan"),
        ([[1.0], [2.0]], [0, -1], "label -1 in row 1; labels must be 0 to 0"),
        (np.zeros((0, 2)), [], "has no rows"),
    ],
)
def test_invalid_samples_and_labels_are_errors(x: object, y: object, message: str) -> None:
    with pytest.raises(GpflError) as problem:
        Table(x, y)  # type: ignore[arg-type]
    assert message in str(problem.value)


def test_a_label_beyond_the_given_classes_is_an_error() -> None:
    with pytest.raises(GpflError, match="label 3 in row 1; labels must be 0 to 2"):
        Table([[1.0], [2.0]], [0, 3], classes=3)


@pytest.mark.parametrize("spec", [InputSpec((4,), "tokens", vocabulary=9), InputSpec((1, 2, 2), "pixels", 16), InputSpec((4,))])
def test_a_table_has_the_input_spec_that_it_is_given(spec: InputSpec) -> None:
    samples = np.arange(8, dtype=np.uint8 if spec.kind == "pixels" else np.int64).reshape(2, *spec.shape)
    assert Table(samples, [0, 1], input_spec=spec).input_spec == spec
