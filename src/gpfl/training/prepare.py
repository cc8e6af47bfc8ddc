"""Prepare a run for the engine, with its defence and privacy guarantee, from a config and a federation."""

import dataclasses
import math

import torch

from gpfl.core.local_round import Schedule
from gpfl.core.method import Method
from gpfl.defences.accounting import AccountingInputs, Guarantee, privacy_guarantee
from gpfl.defences.aggregation import Aggregation
from gpfl.defences.coupling import check_coupling
from gpfl.defences.defended import Defended, defend
from gpfl.engine import RunSpec
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError
from gpfl.federation import Federation
from gpfl.models.architectures import Architecture
from gpfl.models.custom import CustomNet, build_net
from gpfl.training.config import Config
from gpfl.training.devices import find_device


def prepare(
    config: Config, federation: Federation, net: CustomNet | None = None, head: str | None = None
) -> tuple[Config, RunSpec]:
    """Return the config with all values that depend on the net or the data, and the run it describes.

    `net` is a custom network, for which the config has no section.
    """
    if config.run.select == "validation" and not federation.has_validation:
        raise GpflError(
            "run.select is 'validation', but no client has validation samples: set --validation-fraction, such as 0.1"
        )
    if (
        config.run.private_state == "disk"
        and config.run.select != "last"
        and (config.run.select != "auto" or federation.has_validation)
    ):
        raise GpflError("run.private_state is 'disk', which keeps the private state of one round only: add --select last")
    if config.run.private_state == "disk" and process_group().world_size > 1:
        raise GpflError("run.private_state is 'disk', which works in one process only: leave out torchrun, or the option")
    device = find_device(config.run.device, config.run.precision)
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
    fewest, _ = accounting_inputs(method, federation, schedule).clients_per_round
    defended = defend(method, config.defence, seed=schedule.seed, min_clients=fewest)
    if isinstance(defended, Defended) and config.defence.example_clip:
        check_coupling(defended, federation.table, probe_samples(federation))  # the guarantee might be false
    aggregation = Aggregation(
        rule=train.aggregation, trim_fraction=train.trim_fraction, byzantine=train.krum_byzantine, secure_sum=train.secure_sum
    )
    aggregation.check(method, config.defence, fewest, device)
    spec = RunSpec(defended, federation, schedule, train.class_counts, config.run.compile, config.run.precision, aggregation)
    architecture = net if isinstance(net, Architecture) else None
    return dataclasses.replace(config, net=architecture, train=train, method=method), spec


def run_guarantee(method: Method, federation: Federation, schedule: Schedule, uploads: int = 0) -> Guarantee:
    """Return the guarantee of the method's defence; empty without a defence or without noise.

    `uploads` is the number that the busiest client made, if rounds were repeated.
    """
    if not isinstance(method, Defended) or not method.shares:
        return {}
    return privacy_guarantee(
        method.defence, dataclasses.replace(accounting_inputs(method, federation, schedule), uploads=uploads)
    )


def accounting_inputs(method: Method, federation: Federation, schedule: Schedule) -> AccountingInputs:
    """Return the inputs of privacy accounting besides the defence."""
    n_samples, phases = tuple(federation.n_samples("train").tolist()), method.phases()
    needed, coupling = schedule.min_samples(phases), None
    if isinstance(method, Defended) and method.defence.example_noise:
        coupling = check_coupling(method, federation.table, probe_samples(federation))
    return AccountingInputs(schedule, phases, n_samples, sum(size < needed for size in n_samples), coupling)


def probe_samples(federation: Federation) -> list[int]:
    """Return training samples of the largest client, on which `check_coupling` tries a method."""
    largest = max(federation.shards, key=lambda shard: len(shard.train))
    return [int(index) for index in largest.train[:64]]
