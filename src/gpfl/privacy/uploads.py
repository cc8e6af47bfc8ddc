"""The images that an attack reconstructs, and what the server observes when clients train on them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.local_round import Indices, Plan, local_round
from gpfl.core.method import ClientInfo, Method
from gpfl.core.net import Net
from gpfl.core.randomness import generator
from gpfl.core.tree import Tree
from gpfl.defences import Defended, undefended
from gpfl.engine import Engine
from gpfl.engine.base import TrainRequest
from gpfl.errors import GpflError, pluralize
from gpfl.federation import Federation
from gpfl.methods.gpfl import GPFL, embeddings_of
from gpfl.methods.gpfl_variants import GPFLVariant
from gpfl.privacy.server_view import ServerView
from gpfl.training.result import Result
from gpfl.training.run_dir import RunState

STEPS = ("one", "epoch")  # one step on the attacked batch alone, or the client's local round, whose samples include the batch

ROUNDS = ("0", "best")  # before training, or the round whose models the run keeps


class AttackedBatch(NamedTuple):
    """Training samples of one client that an attack reconstructs from its upload."""

    client: int
    samples: tuple[int, ...]


def choose_batches(
    federation: Federation, clients: Sequence[int], images: int, batch_sizes: Sequence[int], seed: int
) -> dict[int, list[AttackedBatch]]:
    """Return batches by size: the same images for every size, each batch of one client, clients in turn."""
    group_size = math.lcm(*batch_sizes)
    if images % group_size:
        sizes = " and ".join(str(size) for size in batch_sizes if size > 1)
        raise GpflError(f"--images is {images}; for batches of {sizes} it must be a multiple of {group_size}")
    indices = range(images // group_size)
    for position, client in enumerate(clients[: len(indices)]):
        _check_samples(federation, client, len(indices[position :: len(clients)]) * group_size, group_size)
    orders = {client: generator(seed, "victims", client).permutation(federation.shards[client].train) for client in clients}
    groups = []
    for index in indices:
        client, turn = clients[index % len(clients)], index // len(clients)
        groups.append((client, [int(sample) for sample in orders[client][turn * group_size : (turn + 1) * group_size]]))
    return {
        size: [
            AttackedBatch(client, tuple(samples[first : first + size]))
            for client, samples in groups
            for first in range(0, group_size, size)
        ]
        for size in batch_sizes
    }


def _check_samples(federation: Federation, client: int, needed: int, group_size: int) -> None:
    shard = federation.shards[client]
    if len(shard.train) >= needed:
        return
    fix = "lower --images or name more clients"
    if len(shard.train) < group_size:
        fix = f"{'lower --batch' if group_size > 1 else 'give it samples'} or choose other clients"
    raise GpflError(
        f"client {shard.name} has {pluralize(len(shard.train), 'training sample')}; the attack needs {needed}: {fix}"
    )


def initial_state(engine: Engine) -> RunState:
    """Return the state of a run before round 0."""
    shared, private = engine.method.init(engine.schedule.seed)
    stacked = tree.repeat(private, len(engine.federation))
    return RunState(0, tree.to(shared, engine.device), tree.to(stacked, engine.device))


def state_at(result: Result, round: str) -> RunState:
    """Return the state of a run at one of `ROUNDS`."""
    return result.outcome.selected if round == "best" else initial_state(result.engine)


def observe_uploads(
    engine: Engine, state: RunState, batches: Sequence[AttackedBatch], steps: str, rounds: dict[int, ServerView] | None = None
) -> list[ServerView]:
    """Return what the server sees of the round of each batch's client; `steps` is one of `STEPS`.

    A client's local round runs once for all its batches; `rounds` keeps the views by client for later calls. Under a secure
    sum the server sees the mean over the client and the others of its round.
    """
    rounds = {} if rounds is None else rounds
    views = []
    for batch in batches:
        if steps == "one":
            check_batch_size(engine.method.net, len(batch.samples))
            samples: Indices = np.array([batch.samples], dtype=np.int64)
            plan = [np.tile(samples, (1, phase.batches)) for phase in engine.method.phases()]  # one step in each phase
            views.append(_observe(engine, state, batch.client, plan, len(batch.samples), one_step=True))
            continue
        if batch.client not in rounds:
            check_can_train(engine, batch.client)
            plan = engine.plan(batch.client, state.round)
            rounds[batch.client] = _observe(engine, state, batch.client, plan, len(batch.samples))
        views.append(dataclasses.replace(rounds[batch.client], n_images=len(batch.samples)))
    return views


def _observe(engine: Engine, state: RunState, client: int, plan: Plan, n_images: int, *, one_step: bool = False) -> ServerView:
    method, device = engine.method, engine.device
    shared = tree.to(state.shared, device)
    private = tree.to(tree.take(state.private, client), device)
    info = engine.client_info([client], state.round).select(0)
    upload = _upload(engine, state, client, plan)
    if engine.aggregation.secure_sum:
        cohort, _ = cohort_of(engine, state.round, client)
        uploads = engine.new_aggregator(TrainRequest(shared, {}, cohort, state.round, engine.schedule, cohort, method))
        for i, other in enumerate(cohort):
            others = [each[:1] if one_step else each for each in engine.plan(other, state.round)]
            uploads.add(i, upload if other == client else _upload(engine, state, other, others))
        upload = uploads.result()
    upload = method.decode_upload(shared, upload)
    public: Tree = {}
    if method.net.has_batch_norm and "batch_norm_stats" not in shared:
        public = tree.to(tree.pick(method.net.init(engine.schedule.seed), ("batch_norm_stats",)), device)
    return ServerView(
        method.replace(salt=0.0) if isinstance(method, Defended) else method,  # the salt selects the clients' noise
        shared,
        upload,
        n_images,
        len(plan[-1]),
        public,
        int(info.label_counts.sum()),
        _context_embeddings(method, shared, private, info),
    )


def _upload(engine: Engine, state: RunState, client: int, plan: Plan) -> Tree:
    shared, private = (tree.to(each, engine.device) for each in (state.shared, tree.take(state.private, client)))
    info = engine.client_info([client], state.round).select(0)
    return local_round(engine.method, shared, private, engine.federation.table, plan, info).upload


def cohort_of(engine: Engine, round: int, client: int) -> tuple[list[int], int]:
    """Return the clients of a round, a given one among them, and its position."""
    sampled = engine.schedule.sample_clients(round, len(engine.federation))
    cohort = sorted({client, *(each for each in sampled if engine.can_train(each))})
    return cohort, cohort.index(client)


def _context_embeddings(method: Method, shared: Tree, private: Tree, info: ClientInfo) -> Tensor | None:
    """Return the embeddings behind the contexts of GPFL as far as the server knows them; None if they are constants.

    Stale contexts come from the embeddings that the client uploaded in the round before, or those that the server sent
    before. They are zero in round 0, and a defence of uploads hides them.
    """
    plain = undefended(method)
    if not isinstance(plain, GPFL) or not {"cov", "gce"} <= set(plain.shared_parts) or "pci" in plain.without:
        return None
    if not (isinstance(plain, GPFLVariant) and plain.has_stale_contexts):
        return embeddings_of(shared)
    if isinstance(method, Defended) and method.defence.transforms_uploads:
        return None
    return plain.stale_embeddings(shared, private, info) if info.round else None


def check_can_train(engine: Engine, client: int) -> None:
    """Raise if a client has too few samples for a local round."""
    if not engine.can_train(client):
        raise GpflError(f"client {engine.federation.shards[client].name} has too few samples to train: choose another")


def check_batch_size(net: Net, size: int) -> None:
    """Raise if a net cannot train on a batch of this size."""
    if size < net.min_batch:
        raise GpflError(f"net '{net.name}' trains on batches of at least {net.min_batch} samples: raise --batch")


def load_images(federation: Federation, batches: Sequence[AttackedBatch]) -> Tensor:
    """Return the images of batches with pixels from 0 to 1, (batches, batch, channels, height, width)."""
    check_images(federation)
    table = federation.table
    samples = torch.tensor([batch.samples for batch in batches], device=table.y.device)
    return table.x[samples].to(torch.float32) / table.input_spec.pixel_max


def mean_image(federation: Federation) -> Tensor:
    """Return the mean of all images of the dataset, (channels, height, width): a guess that needs no upload."""
    table = federation.table
    blocks = torch.split(table.x, 4096)
    total = torch.stack([block.to(torch.float64).sum(0) for block in blocks]).sum(0)
    return (total / len(table) / table.input_spec.pixel_max).to(torch.float32)


def check_images(federation: Federation) -> None:
    """Raise if the samples of a dataset are not images."""
    spec = federation.table.input_spec
    if spec.kind != "pixels" or len(spec.shape) != 3:
        raise GpflError(
            f"data '{federation.table.name}' holds {spec.kind} of shape {spec.shape}; attacks reconstruct images "
            "(pixels of channels × height × width): use --labels or --membership"
        )
