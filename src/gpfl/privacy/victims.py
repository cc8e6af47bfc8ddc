"""Victims: rows of clients, and the uploads that training on them gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.local_round import Indices, Plan, local_round
from gpfl.core.method import Method
from gpfl.core.net import Net
from gpfl.core.randomness import generator
from gpfl.defences import Defended
from gpfl.engine import Engine
from gpfl.errors import GpflError, pluralize
from gpfl.federation.federation import Federation
from gpfl.privacy.server_view import ServerView
from gpfl.training.result import Result
from gpfl.training.run_dir import RunState

STEPS = ("one", "epoch")
"""One step on the victim's rows alone, or a whole local round of the client, whose rows they are among."""

ROUNDS = ("0", "best")
"""Before training, and the round whose models the run keeps."""


class Victim(NamedTuple):
    """Training rows of one client that are looked for in its upload."""

    client: int
    rows: tuple[int, ...]


def choose_victims(
    federation: Federation, clients: Sequence[int], images: int, batches: Sequence[int], seed: int
) -> dict[int, list[Victim]]:
    """Gives for each size of batch the victims: the same images for all, each batch of one client, clients in turn."""
    group = math.lcm(*batches)
    if images < 1:
        raise GpflError(f"--images is {images}; it must be at least 1")
    if images % group:
        sizes = " and ".join(str(batch) for batch in batches if batch > 1)
        raise GpflError(f"--images is {images}; for batches of {sizes} it must be a multiple of {group}")
    places = range(images // group)
    for number, client in enumerate(clients[: len(places)]):
        refuse_few_rows(federation, client, len(places[number :: len(clients)]) * group, group)
    orders = {client: generator(seed, "victims", client).permutation(federation.shards[client].train) for client in clients}
    groups = []
    for place in places:
        client, turn = clients[place % len(clients)], place // len(clients)
        groups.append((client, [int(row) for row in orders[client][turn * group : (turn + 1) * group]]))
    return {
        batch: [
            Victim(client, tuple(rows[first : first + batch])) for client, rows in groups for first in range(0, group, batch)
        ]
        for batch in batches
    }


def refuse_few_rows(federation: Federation, client: int, wanted: int, group: int) -> None:
    """Refuses a client that has not the rows of its victims, which come in groups of so many."""
    shard = federation.shards[client]
    if len(shard.train) >= wanted:
        return
    few = len(shard.train) < group
    way = f"{'lower --batch' if group > 1 else 'give it rows'} or choose other clients"
    raise GpflError(
        f"client {shard.name} has {pluralize(len(shard.train), 'training row')}; {wanted} of them are asked for: "
        f"{way if few else 'lower --images or name more clients'}"
    )


def state_at(result: Result, which: str) -> RunState:
    """Gives the state of a run before round 0, or of the round that it keeps."""
    if which == "best":
        return result.outcome.selected
    engine = result.engine
    shared, private = engine.method.init(engine.schedule.seed)
    everyone = tree.repeat(private, len(engine.federation))
    return RunState(0, tree.to(shared, engine.device), tree.to(everyone, engine.device))


def uploads_of(
    engine: Engine, state: RunState, victims: Sequence[Victim], steps: str, rounds: dict[int, ServerView] | None = None
) -> list[ServerView]:
    """Gives what the server sees of each victim's round.

    A client's whole round is trained once for all its victims; `rounds` keeps such rounds by client for later calls.
    """
    rounds = {} if rounds is None else rounds
    out = []
    for victim in victims:
        if steps == "one":
            out.append(upload_of(engine, state, victim.client, one_step(engine, victim), len(victim.rows)))
            continue
        if victim.client not in rounds:
            refuse_idle(engine, victim.client)
            plan = engine.plan(victim.client, state.round)
            rounds[victim.client] = upload_of(engine, state, victim.client, plan, len(victim.rows))
        out.append(dataclasses.replace(rounds[victim.client], rows=len(victim.rows)))
    return out


def upload_of(engine: Engine, state: RunState, client: int, plan: Plan, rows: int) -> ServerView:
    """Gives what the server sees of a client's round along a plan."""
    method, device = engine.method, engine.device
    shared = tree.to(state.shared, device)
    private = tree.to(tree.take(state.private, client), device)
    facts = engine.client_info([client], state.round).select(0)
    update = local_round(method, shared, private, engine.federation.table, plan, facts)
    public: tree.Tree = {}
    if method.net.has_batch_norm and "batch_norm_stats" not in shared:
        public = tree.to(tree.pick(method.net.init(engine.schedule.seed), ("batch_norm_stats",)), device)
    return ServerView(unsalted(method), shared, update.upload, rows, len(plan[-1]), public)


def unsalted(method: Method) -> Method:
    """Gives a method as a server knows it: what a client's own noise is drawn from is not its to have."""
    return dataclasses.replace(method, salt=0.0) if isinstance(method, Defended) else method


def one_step(engine: Engine, victim: Victim) -> Plan:
    """Gives a plan of one step a phase on the victim's rows; a step that takes several batches gets them several times."""
    refuse_small_batch(engine.method.net, len(victim.rows))
    rows: Indices = np.array([victim.rows], dtype=np.int64)
    return [np.tile(rows, (1, phase.batches)) for phase in engine.method.phases()]


def refuse_idle(engine: Engine, client: int) -> None:
    """Refuses a client that has no local round."""
    if not engine.can_train(client):
        raise GpflError(f"client {engine.federation.shards[client].name} has too few rows to train: name another")


def refuse_small_batch(net: Net, rows: int) -> None:
    """Refuses a step on fewer rows than a net trains on."""
    if rows < net.min_batch:
        raise GpflError(f"net '{net.name}' trains on batches of at least {net.min_batch} rows: raise --batch")


def images_of(federation: Federation, victims: Sequence[Victim]) -> Tensor:
    """Gives the victims' images in pixels from 0 to 1, (victims, batch, channels, height, width)."""
    refuse_other_than_images(federation)
    table = federation.table
    rows = torch.tensor([victim.rows for victim in victims], device=table.y.device)
    return table.x[rows].to(torch.float32) / table.input_spec.pixel_max


def mean_image(federation: Federation) -> Tensor:
    """Gives the mean of all images of the data, (channels, height, width): what a guess without any upload may know."""
    table = federation.table
    blocks = torch.split(table.x, 4096)
    total = torch.stack([block.to(torch.float64).sum(0) for block in blocks]).sum(0)
    return (total / len(table) / table.input_spec.pixel_max).to(torch.float32)


def refuse_other_than_images(federation: Federation) -> None:
    """Refuses data whose rows are no images: pixel measures say nothing of them."""
    form = federation.table.input_spec
    if form.kind != "pixels" or len(form.shape) != 3:
        raise GpflError(
            f"data '{federation.table.name}' holds {form.kind} of shape {form.shape}; attacks rebuild images "
            "(pixels of channels × height × width): use --labels or --membership"
        )
