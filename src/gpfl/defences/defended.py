"""A method under a defence: the same method, but for the gradients of its steps and what leaves a client."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.randomness import make_salt, random_key
from gpfl.core.tree import Tree
from gpfl.defences.config import NO_DEFENCE, WHOLE, DefenceConfig
from gpfl.defences.per_example import PerExampleGradient
from gpfl.defences.uploads import protected, wire_bytes
from gpfl.errors import GpflError
from gpfl.methods.gpfl import GPFL

STEPS = "defence"
"""Where the state of a local round counts the steps done: every step's noise is its own."""


@dataclass(frozen=True, kw_only=True)
class Defended(Method):
    """What a defended method does differently. It stands before a method's own class, whose functions it calls."""

    defence: DefenceConfig = NO_DEFENCE
    salt: float = 0.0  # of the run's seed: a number like others, so that trials with several seeds run at once
    crowd: int = 1  # the fewest clients that join a round: their noise adds up to what is stated
    recorded: list[PerExampleGradient] | None = dataclasses.field(default=None, repr=False, compare=False)  # of every step

    # Gradients.

    def phases(self) -> tuple[Phase, ...]:
        """Gives the method's passes, their steps by rows where gradients are clipped."""
        phases = super().phases()
        if not self.defence.example_clip:
            return phases
        return tuple(phase._replace(step=partial(self.per_example_step, number)) for number, phase in enumerate(phases))

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Gives the state in which local training starts."""
        local_state = super().download(shared, private, client)
        return {**local_state, STEPS: {"done": torch.zeros_like(client.round)}} if self.defence.example_clip else local_state

    def per_example_step(
        self, phase: int, shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo
    ) -> tuple[Tree, LossTerms]:
        """Return the state after a step of a phase with per-example gradients."""
        done = tree.leaf(tree.branch(local_state, STEPS), "done")
        gradient = PerExampleGradient(
            self.key(client, "example", done), self.defence.example_clip, self.defence.example_noise * self.defence.example_clip
        )
        if self.recorded is not None:
            gradient.coupling = {}
            self.recorded.append(gradient)
        method = self.replace(gradient=gradient)
        after, terms = super(Defended, method).phases()[phase].step(shared, tree.drop(local_state, (STEPS,)), batch, client)
        return {**after, STEPS: {"done": done + 1}}, terms

    # What leaves the client.

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Gives what the client sends, defended, and what it keeps."""
        sent, kept = super().upload(shared, tree.drop(local_state, (STEPS,)), private, client)
        if self.defence.on_uploads and sent:
            sent = protected(shared, sent, self.defence, self.noise_share, self.key(client, "upload"))
        return sent, kept

    @property
    def noise_share(self) -> float:
        """The standard deviation of the noise that one client adds; of a crowd it adds up to noise × clip."""
        return self.defence.noise * self.defence.clip / math.sqrt(self.crowd)

    def aggregation_weight(self, client: ClientInfo) -> Tensor:
        """Gives every client the same weight where there is noise: by its rows, one could weigh more than its bound."""
        return torch.ones_like(client.n_samples) if self.defence.noise else super().aggregation_weight(client)

    def key(self, client: ClientInfo, purpose: str, *words: Tensor) -> Tensor:
        """Gives the stream of a client's draws in a round."""
        salt = self.salt if isinstance(self.salt, Tensor) else torch.full_like(client.round, self.salt)
        return random_key(salt, purpose, client.round, client.index, *words)


def upload_bytes(method: Method, upload: Tree) -> int:
    """Return the bytes that an upload takes on the wire; `upload` is one, or a mean of several."""
    return wire_bytes(upload, method.defence if isinstance(method, Defended) else NO_DEFENCE)


def defended(method: Method, defence: DefenceConfig, *, seed: int, crowd: int) -> Method:
    """Gives a bound method under a defence; the method itself where nothing is asked for. What cannot be is refused."""
    if not defence.on:
        return method
    refuse_uploads(method, defence)
    refuse_statistics(method, defence)
    values = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    return defended_kind(type(method))(**values, defence=defence, salt=make_salt(seed), crowd=max(1, crowd))


KINDS: dict[type[Method], type[Defended]] = {}
"""Classes that were made, so that the methods of two trials are of one."""


def defended_kind(kind: type[Method]) -> type[Defended]:
    """Gives the class of a method under a defence: Defended's functions first, then the method's own."""
    if kind not in KINDS:
        made = type(f"Defended{kind.__name__}", (Defended, kind), {"__doc__": kind.__doc__, "__module__": __name__})
        KINDS[kind] = dataclass(frozen=True, kw_only=True)(made)
    return KINDS[kind]


def cautions(method: Method) -> list[str]:
    """Gives what is said before a run whose updates are bounded by what is not of the data: weight decay."""
    decaying = method.guidance if isinstance(method, GPFL) and method.reg == "wd" and method.mu else ()
    if not isinstance(method, Defended) or not decaying or not (method.defence.clip or method.defence.top_k < 1):
        return []
    what = "clipped" if method.defence.clip else "cut to its largest entries"
    return [
        f"Weight decay moves the parts {' and '.join(decaying)} in every step and is in the update that is {what}: little of "
        "what the data say may be left. Without decay (of gpfl: --mu 0) all of the bound is theirs."
    ]


def refuse_uploads(method: Method, defence: DefenceConfig) -> None:
    """Refuses to clip, noise or compress what is no update of weights."""
    if defence.on_uploads and method.shares and "base" not in method.shares:
        raise GpflError(
            f"{method.name} sends {', '.join(method.shares)}, which are no update of weights: a clipped, noisy or compressed "
            "difference of them means nothing; leave out --clip, --noise, --top-k and --bits"
        )


def refuse_statistics(method: Method, defence: DefenceConfig) -> None:
    """Refuses BatchNorm where it mixes rows, or where noise and rounding could turn a variance negative."""
    if not method.net.has_batch_norm:
        return
    if defence.example_clip:
        raise GpflError(
            f"defence.example_clip is {defence.example_clip:g}, but the BatchNorm of net '{method.net.name}' mixes rows, so no "
            "row's gradient has a bound of its own: use another net"
        )
    if "batch_norm_stats" in method.shared_parts and (defence.noise or defence.bits < WHOLE):
        raise GpflError(
            "train.batch_norm is 'average', so that BatchNorm's variances are sent: noise and rounding could turn one "
            "negative; use --batch-norm local"
        )
