"""From a config and a federation to a run that an engine can execute."""

from __future__ import annotations

import dataclasses
import math

import torch

from gpfl.core.local_round import Schedule
from gpfl.engine import RunSpec
from gpfl.errors import GpflError
from gpfl.federation import Federation
from gpfl.models.architecture import Architecture
from gpfl.models.custom import CustomNet, build_net
from gpfl.training.config import Config
from gpfl.training.defences import apply_defence
from gpfl.training.devices import find_device


def prepare(
    config: Config, federation: Federation, net: CustomNet | None = None, head: str | None = None
) -> tuple[Config, RunSpec]:
    """Return the config with all values that depend on the net or the data, and the run it describes.

    `net` is given if the config has none.
    """
    if config.run.select == "validation" and not federation.has_validation:
        raise GpflError(
            "run.select is 'validation', but no client has validation samples: set --validation-fraction, such as 0.1"
        )
    device = find_device(config.run.device)
    if config.run.precision != "float32" and device.type != "cuda":
        raise GpflError(f"run.precision is '{config.run.precision}', which needs a GPU; run.device is '{device}': leave it out")
    net = config.net if net is None else net
    if net is None:
        raise TypeError("neither the config nor the caller has a net")
    if isinstance(net, Architecture):
        net = net.fit_input(federation.table.input_spec)
    example = federation.table.inputs(torch.arange(min(2, len(federation.table)))).cpu()  # nets are made on the CPU
    built = build_net(net, example, federation.table.classes, head=head)
    lr = built.lr if math.isnan(config.train.lr) else config.train.lr
    train = dataclasses.replace(config.train, lr=lr)
    method = config.method.bind(built.to(device), lr=lr, epochs=train.epochs, batch_norm=train.batch_norm)
    schedule = Schedule(
        seed=config.run.seed,
        rounds=train.rounds,
        batch_size=train.batch_size,
        client_fraction=train.client_fraction,
        shuffle=train.shuffle,
        drop_last=train.drop_last,
    )
    largest, needed = int(federation.n_samples("train").max()), schedule.min_samples(method.phases())
    if largest < needed:
        raise GpflError(
            f"the largest client has {largest} training samples; {method.name} needs {needed} at batch size "
            f"{train.batch_size}: lower --batch-size"
        )
    for shard in federation.shards:
        schedule.check_batch_size(method, len(shard.train), shard.name)
    federation = federation.to(device)
    defended = apply_defence(method, config.defence, federation, schedule)
    spec = RunSpec(defended, federation, schedule, train.class_counts, config.run.compile, config.run.precision)
    architecture = net if isinstance(net, Architecture) else None
    return dataclasses.replace(config, net=architecture, train=train, method=method), spec
