"""One client's round: its samples, its batches, its training and its evaluation."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Phase
from gpfl.core.net import InputSpec, Model
from gpfl.core.randomness import generator
from gpfl.core.tree import Tree
from gpfl.errors import GpflError, pluralize

Indices: TypeAlias = npt.NDArray[np.int64]
Plan: TypeAlias = list[Indices]
"""Sample indices of every step, (steps, samples), for each phase; -1 pads a short batch."""


GATHERED_STEPS = 32  # steps of a client whose samples are gathered and converted at once


class Samples:
    """Samples and labels in memory, with the spec that converts them to net inputs."""

    def __init__(self, x: Tensor, y: Tensor, input_spec: InputSpec) -> None:
        self.x, self.y, self.input_spec = x, y, input_spec

    def inputs(self, indices: Tensor) -> Tensor:
        """Return the net inputs of the samples at `indices`."""
        return self.input_spec.to_net(self.x[indices])

    def batch(self, indices: Tensor) -> Batch:
        """Return the batch of the samples at `indices`; -1 is padding and masked out."""
        valid = indices.clamp_min(0)
        return Batch(self.inputs(valid), self.y[valid], (indices >= 0).to(torch.float32))

    def batches(self, steps: Indices) -> Iterator[Batch]:
        """Yield the batch of each step without its padding. Steps without samples are skipped: weight decay would still act."""
        sizes = (steps >= 0).sum(1).tolist()
        for part in torch.split(torch.from_numpy(steps).to(self.y.device), GATHERED_STEPS):
            for x, y, mask in zip(*self.batch(part), strict=True):
                if size := sizes.pop(0):
                    yield Batch(x[:size], y[:size], mask[:size])


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The clients and batches of each round, as functions of (seed, round, client)."""

    seed: int
    rounds: int
    batch_size: int = 10
    client_fraction: float | tuple[float, float] = 1.0
    shuffle: bool = True
    drop_last: bool = True
    purpose: str = "batches"  # of the generator that shuffles

    def for_final_phases(self) -> Self:
        """Return the schedule of a method's final phases, which shuffle independently of training."""
        return dataclasses.replace(self, purpose="final_batches")

    def sample_clients(self, round: int, clients: int) -> list[int]:
        """Return the sampled clients of a round in ascending order; a range of fractions makes their number random."""
        rng = generator(self.seed, "cohort", round)
        if isinstance(self.client_fraction, tuple):
            low, high = (count_clients(fraction, clients) for fraction in self.client_fraction)
            size = int(rng.integers(low, high, endpoint=True))
        else:
            size = count_clients(self.client_fraction, clients)
        if size == clients:
            return list(range(clients))
        return sorted(int(c) for c in rng.choice(clients, size, replace=False))

    def plan(self, phases: Sequence[Phase], samples: Indices, round: int, client: int) -> Plan:
        """Return the batches of a client's round. All phases use the same orders, so one more does not change the others."""
        epochs = max(phase.epochs for phase in phases)
        rng = generator(self.seed, self.purpose, round, client)
        orders = [rng.permutation(samples) if self.shuffle else samples for _ in range(epochs)]
        return [np.concatenate([self.batches(order, phase.batches) for order in orders[: phase.epochs]]) for phase in phases]

    def batches(self, samples: Indices, per_step: int = 1) -> Indices:
        """Return samples divided into steps of `per_step` batches, (steps, samples).

        With `drop_last`, a short last step is dropped unless it is the client's only one. With several batches per step it
        is always dropped.
        """
        width = self.batch_size * per_step
        full = len(samples) // width
        steps = samples[: full * width].reshape(full, width)
        rest = samples[full * width :]
        if per_step > 1 or len(rest) == 0 or (self.drop_last and full):
            return steps
        padded = np.full((1, width), -1, dtype=np.int64)
        padded[0, : len(rest)] = rest
        return np.concatenate([steps, padded])

    def min_samples(self, phases: Sequence[Phase]) -> int:
        """Return the number of training samples that a client needs to have a step in every phase."""
        return max(self.batch_size * phase.batches if phase.batches > 1 else 1 for phase in phases)

    def smallest_batch(self, n_samples: int, phases: Sequence[Phase]) -> int:
        """Return the size of the smallest batch of a client with `n_samples` training samples."""
        rest = n_samples % self.batch_size
        short = n_samples < self.batch_size or (not self.drop_last and any(phase.batches == 1 for phase in phases))
        return rest if rest and short else min(n_samples, self.batch_size)

    def check_batch_size(self, method: Method, n_samples: int, client: str) -> None:
        """Raise if a client would train on a batch of one sample with a net whose BatchNorm needs two."""
        if self.smallest_batch(n_samples, (*method.phases(), *method.final_phases())) >= method.net.min_batch:
            return
        fix = "raise --batch-size" if self.batch_size == 1 else "set drop_last or another --batch-size"
        samples = pluralize(n_samples, "training sample")
        raise GpflError(
            f"client {client} has {samples}, which makes a batch of 1 at batch size {self.batch_size}; the BatchNorm of net "
            f"'{method.net.name}' needs 2: {fix if n_samples > 1 else 'add samples or leave it out'}"
        )

    def unshuffled_samples(self, samples: Indices) -> Indices:
        """Return the samples that an epoch without shuffling uses."""
        steps = self.batches(samples).ravel()
        return steps[steps >= 0]


def count_clients(fraction: float, clients: int) -> int:
    """Return fraction × clients rounded down, at least 1. 0.29 × 100 is 29, although binary floats give 28.99…."""
    return max(1, int(fraction * clients + 1e-9))


class ClientUpdate(NamedTuple):
    """The result of a client's round: its upload, its new private state and the mean loss terms of its steps."""

    upload: Tree
    private: Tree
    terms: LossTerms


class Score(NamedTuple):
    """Number of correct predictions and summed cross-entropy over some samples."""

    correct: Tensor
    loss: Tensor


@torch.no_grad()
def local_round(method: Method, shared: Tree, private: Tree, samples: Samples, plan: Plan, client: ClientInfo) -> ClientUpdate:
    """Run one client's round: download, every step of the plan, upload. The inputs are not modified."""
    local_state = method.download(shared, private, client)
    history: dict[str, list[Tensor]] = {}
    for phase, steps in zip(method.phases(), plan, strict=True):
        for batch in samples.batches(steps):
            local_state, terms = phase.step(shared, local_state, batch, client)
            for name, value in terms.items():
                history.setdefault(name, []).append(value.detach())
    upload, private = method.upload(shared, local_state, private, client)
    return ClientUpdate(upload, private, {name: torch.stack(values).mean() for name, values in history.items()})


def evaluate_client(
    method: Method, shared: Tree, private: Tree, adaptation_batch: Batch, client: ClientInfo, batch: Batch
) -> Score:
    """Return the score of a client's personal model on a batch; the method may adapt the model to `adaptation_batch`."""
    logits = predict_client(method, shared, private, adaptation_batch, client, batch)
    correct = (logits.argmax(-1) == batch.y) * batch.mask
    loss = F.cross_entropy(logits, batch.y, reduction="none") * batch.mask
    return Score(correct.sum(), loss.sum())


def predict_client(
    method: Method, shared: Tree, private: Tree, adaptation_batch: Batch, client: ClientInfo, batch: Batch
) -> Tensor:
    """Return the logits of a client's personal model on a batch, (batch, classes)."""
    weights = method.personal_weights(shared, private, adaptation_batch, client)
    return method.logits(Model(method.net, weights), batch.x)


# The final phases, run by engines like a local round that sends nothing.


@dataclass(frozen=True, kw_only=True)
class FinalRound(Method):
    """The final phases of a bound method as a local round, whose private state makes the personal model."""

    shares = ()

    method: Method

    @classmethod
    def of(cls, method: Method) -> Self:
        """Return the final phases of a bound method."""
        return cls(setup=method.setup, method=method)

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the method."""
        return self.method.name

    def replace(self, **values: object) -> Self:
        """Return the round for other values of the method's options or its setup."""
        method = self.method.replace(**values)
        return dataclasses.replace(self, method=method, setup=method.setup)

    def values(self) -> dict[str, object]:
        """Return what `replace` can change, by name, without the net."""
        return self.method.values()

    def phases(self) -> tuple[Phase, ...]:
        """Return the method's final phases."""
        return self.method.final_phases()

    def download(self, shared: Tree, private: Tree, client: ClientInfo) -> Tree:
        """Return the state in which the final phases start."""
        return self.method.start_final_phases(shared, private, client)

    def upload(self, shared: Tree, local_state: Tree, private: Tree, client: ClientInfo) -> tuple[Tree, Tree]:
        """Return nothing to send, and the state after the final phases."""
        return {}, local_state


def run_final_phases(
    method: Method,
    shared: Tree,
    private: Tree,
    samples: Samples,
    indices: Indices,
    schedule: Schedule,
    round: int,
    position: int,
    client: ClientInfo,
) -> Tree:
    """Return one client's private state after the final phases, which a client with too few training samples skips.

    `round` is the one after which the model is made; `position`, the client's in the federation, selects its batches.
    """
    final = FinalRound.of(method)
    if not final.phases():
        return private
    if len(indices) < schedule.min_samples(final.phases()):
        return final.download(shared, private, client)
    plan = schedule.for_final_phases().plan(final.phases(), indices, round, position)
    return local_round(final, shared, private, samples, plan, client).private
