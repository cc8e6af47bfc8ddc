"""Check whether a method can guarantee privacy of examples, by probing it on a few before the run.

Two conditions must hold. The loss of a batch is the mean of its examples' losses; otherwise clipping examples silently changes
the method. And the upload depends on examples only through their clipped, noisy gradients; otherwise the noise does not cover
it.
"""

from dataclasses import dataclass, replace

import torch

from gpfl.core import tree
from gpfl.core.method import Batch, ClientInfo, GradientResult, Method, Objective
from gpfl.core.net import Model, Net
from gpfl.core.randomness import torch_generator
from gpfl.core.tree import Tree
from gpfl.data.table import Table
from gpfl.defences.config import DefenceConfig
from gpfl.defences.defended import Defended
from gpfl.defences.per_example import PerExampleGradient
from gpfl.errors import GpflError
from gpfl.methods.gpfl import GPFL

_BATCH_SIZE = 4
_TOLERANCE = 1e-3
"""Largest relative difference between the loss of a batch and the mean of its examples' that counts as rounding."""
_NO_CLIPPING = 1e30
_NOISE_ONLY = DefenceConfig(example_clip=1e-30, example_noise=1e27)
"""A bound that removes every example's gradient, with noise of 0.001."""


@dataclass(frozen=True)
class CouplingCheck:
    """How an upload depends on examples."""

    gradients: tuple[int, ...]  # noisy gradients of an example in a step of each phase
    uses_label_counts: bool


def check_coupling(method: Defended, table: Table, samples: list[int]) -> CouplingCheck:
    """Return how an upload depends on samples of a table. Raise if the method cannot guarantee privacy of examples."""
    device = table.y.device
    shared, private = (_perturb(tree.to(state, device), index) for index, state in enumerate(method.init(0)))
    counts = torch.arange(1, table.classes + 1, dtype=torch.float32, device=device)
    one, half, zero = torch.ones((), device=device), torch.full((), 0.5, device=device), torch.zeros((), device=device)
    client = ClientInfo(counts.sum(), counts, half, one, zero)
    batches, others = (_batches(method, table, samples, start) for start in (0, _BATCH_SIZE))

    probes = [_CouplingProbe() for _ in batches]
    plain = method.method
    local_state = plain.download(shared, private, client)
    for index, (probe, batch) in enumerate(zip(probes, batches, strict=True)):
        local_state, _ = plain.replace(gradient=probe).phases()[index].step(shared, local_state, batch, client)
    differences = ((name, difference) for probe in probes for name, difference in probe.differences.items())
    if coupled := next((name for name, difference in differences if difference > _TOLERANCE), None):
        fix = "use --mlg-norm sample_mean" if isinstance(method.method, GPFL) else "leave out --example-clip"
        raise GpflError(
            f"defence.example_clip is {method.defence.example_clip:g}, but the loss term '{coupled}' of {method.name} is "
            f"not a mean over examples, so clipping their gradients would change the method: {fix}"
        )
    noise_only = replace(method, defence=_NOISE_ONLY)
    if not _same(*(_upload(noise_only, shared, private, client, each) for each in (batches, others))):
        raise GpflError(
            f"defence.example_clip is {method.defence.example_clip:g}, but {method.name} uploads more about its examples than "
            "gradients, which noise on gradients does not cover: leave out --example-clip and --example-noise"
        )
    unclipped = replace(method, defence=DefenceConfig(example_clip=_NO_CLIPPING))
    flipped = client._replace(label_counts=counts.flip(0))
    uploads = [_upload(unclipped, shared, private, each, batches) for each in (client, flipped)]
    return CouplingCheck(tuple(probe.gradient.calls for probe in probes), not _same(*uploads))


class _CouplingProbe:
    """Gradient function that records how far the loss of a batch is from the mean of its examples' losses."""

    def __init__(self) -> None:
        self.gradient = PerExampleGradient(torch.zeros(2), bound=_NO_CLIPPING, std=0.0)
        self.differences: dict[str, float] = {}  # by loss term, relative

    def __call__(self, net: Net, state: Tree, weights: Tree, objective: Objective, batch: Batch) -> GradientResult:
        """Return the mean of the examples' gradients."""
        result = self.gradient(net, state, weights, objective, batch)
        for name, value in objective(Model(net, {**state, **weights}, training=True), batch).items():
            mean = result.terms[name]
            difference = float((value - mean).abs() / (value.abs() + mean.abs()).clamp_min(1e-12))
            self.differences[name] = max(difference, self.differences.get(name, 0.0))
        return result


def _upload(method: Method, shared: Tree, private: Tree, client: ClientInfo, batches: list[Batch]) -> Tree:
    local_state = method.download(shared, private, client)
    for phase, batch in zip(method.phases(), batches, strict=True):
        local_state, _ = phase.step(shared, local_state, batch, client)
    return method.upload(shared, local_state, private, client)[0]


def _batches(method: Method, table: Table, samples: list[int], start: int) -> list[Batch]:
    """Return a batch for a step of every phase; few samples are repeated."""
    batches = []
    for phase in method.phases():
        indices = [samples[(start + index) % len(samples)] for index in range(_BATCH_SIZE * phase.batches)]
        batches.append(table.batch(torch.tensor(indices, device=table.y.device)))
    return batches


def _perturb(state: Tree, index: int) -> Tree:
    """Return a perturbed state, since some loss terms are zero if all states are equal."""
    rng = torch_generator(0, "defence", index)
    return tree.map_leaves(lambda t: t + 0.1 * (0.1 + t.abs()) * torch.randn(t.shape, generator=rng).to(t), state)


def _same(a: Tree, b: Tree) -> bool:
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in tree.zip_leaves(a, b))
