"""What an honest-but-curious server observes of one client's round, and the gradient it derives before any attack."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.privacy.gradient_targets import weight_decay


@dataclass(frozen=True)
class ServerView:
    """The input of an attack: what the server sent, what one client uploaded, and what is public.

    Public are the method with its code and hyperparameters, the net, the initial BatchNorm statistics, the number of images to
    reconstruct, the number of the client's samples and with it that of local steps. Private parts are rejected: the keys are
    checked against what the method shares.
    """

    method: Method
    sent: Tree
    upload: Tree
    n_images: int  # to reconstruct
    steps: int = 1  # local steps that the upload sums up
    public: Tree = field(default_factory=dict)  # initial BatchNorm statistics, if they are not averaged
    n_samples: int = 0  # behind the client's class weights; 0: unknown
    context_embeddings: Tensor | None = None  # behind GPFL's contexts of the round; None: unknown

    def __post_init__(self) -> None:
        shared = set(self.method.shared_parts)
        for name, state, allowed in (
            ("sent", self.sent, shared),
            ("upload", self.upload, shared),
            ("public", self.public, {"batch_norm_stats"}),
        ):
            hidden = sorted(state.keys() - allowed)
            if hidden:
                raise GpflError(
                    f"the server does not see '{hidden[0]}' of {self.method.name}; '{name}' may hold {sorted(allowed)}"
                )

    def to(self, device: torch.device) -> "ServerView":
        """Return the view with its values on a device."""
        embeddings = None if self.context_embeddings is None else self.context_embeddings.to(device)
        sent, upload, public = (tree.to(each, device) for each in (self.sent, self.upload, self.public))
        return dataclasses.replace(self, sent=sent, upload=upload, public=public, context_embeddings=embeddings)

    @property
    def weights(self) -> Tree:
        """The weights at which the server attacks: those it sent, with the BatchNorm statistics it knows."""
        return {**self.public, **self.sent}

    def gradient(self, parts: Sequence[str]) -> Tree:
        """Return the mean gradient of the client's steps on `parts`, without the known weight decay.

        T steps w ← a·w − η·g with a = 1 − ημ end at aᵀ·sent − η(1 + a + … + aᵀ⁻¹)·g, which is solved for g. This is exact for
        a constant gradient, and so for one step, if the client started from the weights that were sent.
        """
        gradient: Tree = {}
        for part in parts:
            decay = self.weight_decay(part)
            scale = self.method.lr * sum((1 - self.method.lr * decay) ** step for step in range(self.steps))

            def mean(before: Tensor, after: Tensor, decay: float = decay, scale: float = scale) -> Tensor:
                return (before - after) / scale - decay * before

            gradient[part] = tree.map_leaves(mean, tree.branch(self.sent, part), tree.branch(self.upload, part))
        return gradient

    def weight_decay(self, part: str) -> float:
        """Return the weight decay of a part: at the weights that were sent, or halfway through the round."""
        before, after = tree.branch(self.sent, part), tree.branch(self.upload, part)
        if self.steps == 1:
            return weight_decay(self.method, part, before)
        middle = tree.map_leaves(lambda a, b: (a + b) / 2, before, after)
        return min(weight_decay(self.method, part, middle), 1 / self.method.lr)  # a larger one would flip the weights
