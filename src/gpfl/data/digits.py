"""scikit-learn's handwritten digits, which lie inside its wheel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gpfl.data.table import Table


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8×8 pixels in 17 shades, ten classes of about 180 (UCI optical recognition of handwritten digits)."""

    doc: str = "1,797 handwritten digits, 8×8 (inside scikit-learn, no download)"
    defaults: Mapping[str, Mapping[str, object]] = field(
        default_factory=lambda: {
            "split": {"name": "pathological", "clients": 20, "classes_per_client": 4},
            "net": {"name": "mlp"},
            "train": {"rounds": 40, "lr": 0.05},
        }
    )

    def load(self) -> Table:
        """Gives the table."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = digits.images.astype(np.uint8)[:, None]  # (rows, 1, 8, 8), 0 to 16
        return Table(images, digits.target, classes=10, name="digits", white=16)
