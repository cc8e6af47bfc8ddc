"""Handwritten digits, which are part of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpfl.data.table import DataSource, Table


@dataclass(frozen=True, kw_only=True)
class Digits(DataSource):
    """1,797 images of 8×8 pixels with values 0 to 16, about 180 per class (UCI optical recognition of handwritten digits)."""

    @property
    def defaults(self) -> Mapping[str, Mapping[str, object]]:
        """Twenty clients with four classes each and a small net."""
        return {
            "partition": {"name": "pathological", "clients": 20, "classes_per_client": 4},
            "net": {"name": "mlp"},
            "train": {"rounds": 40, "lr": 0.05},
        }

    def read(self) -> Table:
        """Return the table."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = digits.images.astype(np.uint8)[:, None]  # (samples, 1, 8, 8)
        return Table(images, digits.target, classes=10, name="digits", pixel_max=16)


DIGITS = Digits(name="digits", description="1,797 handwritten digits, 8×8 (part of scikit-learn, no download)")
