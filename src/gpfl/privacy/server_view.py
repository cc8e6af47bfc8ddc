"""What an honest but curious server has of one client's round, and what it makes of it before any attack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.core.tree import Tree
from gpfl.errors import GpflError
from gpfl.privacy.gradient_targets import GradientTarget, gradient_targets, weight_decay


@dataclass(frozen=True)
class ServerView:
    """All that an attack is given: what the server sent, what one client sent back, and what is public.

    Public are the method with its code and hyperparameters, the net, the statistics that every net started from, the
    number of images that are looked for and the number of local steps (it follows from the rows a client reports). Private
    parts cannot be put in: the keys are checked against what the method shares.
    """

    method: Method
    sent: Tree
    upload: Tree
    rows: int  # images that are looked for
    steps: int = 1  # local steps that the upload sums up
    public: Tree = field(default_factory=dict)  # BatchNorm statistics of the start, where they are not averaged

    def __post_init__(self) -> None:
        allowed = set(self.method.shared_parts)
        for name, held, keys in (
            ("sent", self.sent, allowed),
            ("upload", self.upload, allowed),
            ("public", self.public, {"batch_norm_stats"}),
        ):
            hidden = sorted(held.keys() - keys)
            if hidden:
                raise GpflError(
                    f"the server does not see '{hidden[0]}' of {self.method.name}; '{name}' may hold {sorted(keys)}"
                )

    @property
    def known(self) -> Tree:
        """The weights at which the server attacks: those that it sent, with the statistics it has."""
        return {**self.public, **self.sent}

    def gradient(self, parts: Sequence[str]) -> Tree:
        """Gives the mean gradient of the client's steps on `parts`, the known weight decay taken out.

        T steps w ← a·w − η·g with a = 1 − ημ end at aᵀ·sent − η(1 + a + … + aᵀ⁻¹)·g, which is solved for g: exact for a
        gradient that stays the same, and so for one step, if the client started from the weights that were sent.
        """
        out: Tree = {}
        for part in parts:
            pull = self.pull(part)
            scale = self.method.lr * sum((1 - self.method.lr * pull) ** step for step in range(self.steps))

            def mean(before: Tensor, after: Tensor, pull: float = pull, scale: float = scale) -> Tensor:
                return (before - after) / scale - pull * before

            out[part] = tree.map_leaves(mean, tree.branch(self.sent, part), tree.branch(self.upload, part))
        return out

    def pull(self, part: str) -> float:
        """Gives the weight decay of a part, which the server knows: at the weights that were sent, or amid many steps."""
        before, after = tree.branch(self.sent, part), tree.branch(self.upload, part)
        if self.steps == 1:
            return weight_decay(self.method, part, before)
        amid = tree.map_leaves(lambda one, other: (one + other) / 2, before, after)
        return min(weight_decay(self.method, part, amid), 1 / self.method.lr)  # none pulls further than to 0


def view_of(method: Method, target: str) -> GradientTarget:
    """Gives the view of that name, or refuses one that the method does not offer."""
    views = gradient_targets(method)
    if target not in views:
        has = f"it offers {', '.join(views)}" if views else "nothing that it sends is the gradient of a net"
        raise GpflError(f"{method.name} has no target '{target}': {has}")
    return views[target]
