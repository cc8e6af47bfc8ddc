"""fastText for classification."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from gpfl.core.net import InputSpec, Shape
from gpfl.core.options import option
from gpfl.errors import GpflError
from gpfl.models.architecture import Architecture, Parts


@dataclass(frozen=True, kw_only=True)
class FastText(Architecture):
    """The mean of word embeddings and one linear layer without activation as base, one linear layer as head.

    Joulin et al., Bag of Tricks for Efficient Text Classification, EACL 2017, on words alone. Token 0, used for
    padding and unknown words, is a zero vector; the mean is over all positions, as in the authors' code.
    """

    lr = 0.1

    hidden: int = option(32, "width of the embeddings and of the features", symbol="K", min=1)
    vocabulary: int = option(0, "number of tokens; 0 = that of the data", min=0)

    def fit_input(self, spec: InputSpec) -> Self:
        """Return the architecture with the size of the data's vocabulary."""
        return self if self.vocabulary else dataclasses.replace(self, vocabulary=spec.vocabulary)

    def build(self, shape: Shape, classes: int) -> Parts:
        """Return the modules for texts of `shape` (positions,)."""
        if len(shape) != 1 or not self.vocabulary:
            raise GpflError(f"net 'fasttext' takes texts as tokens; the data has samples of shape {shape} that are not tokens")
        base = nn.Sequential()
        base.add_module("embedding", nn.Embedding(self.vocabulary, self.hidden, padding_idx=0))
        base.add_module("mean", _MeanOverPositions())
        base.add_module("fc1", nn.Linear(self.hidden, self.hidden))
        return {"base": base, "head": nn.Linear(self.hidden, classes)}


class _MeanOverPositions(nn.Module):
    """The mean over the second to last axis."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean (batch, width) of (batch, positions, width)."""
        return x.mean(-2)
