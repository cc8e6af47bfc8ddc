"""The defence of a run: the defended method and its privacy guarantee."""

from __future__ import annotations

from dataclasses import replace

from gpfl.core.local_round import Schedule
from gpfl.core.method import Method
from gpfl.defences.accounting import AccountingInputs, Guarantee, privacy_guarantee
from gpfl.defences.config import DefenceConfig
from gpfl.defences.coupling import check_coupling
from gpfl.defences.defended import Defended, defend
from gpfl.federation import Federation


def apply_defence(method: Method, defence: DefenceConfig, federation: Federation, schedule: Schedule) -> Method:
    """Return a bound method under a defence. Raise if the guarantee would be false."""
    fewest, _ = accounting_inputs(method, federation, schedule).clients_per_round
    method = defend(method, defence, seed=schedule.seed, min_clients=fewest)
    if isinstance(method, Defended) and defence.example_clip:
        check_coupling(method, federation.table, probe_samples(federation))
    return method


def run_guarantee(method: Method, federation: Federation, schedule: Schedule) -> Guarantee:
    """Return the guarantee of the method's defence; empty without a defence or without noise."""
    if not isinstance(method, Defended) or not method.shares:
        return {}
    inputs = accounting_inputs(method, federation, schedule)
    if method.defence.example_noise:
        inputs = replace(inputs, coupling=check_coupling(method, federation.table, probe_samples(federation)))
    return privacy_guarantee(method.defence, inputs)


def accounting_inputs(method: Method, federation: Federation, schedule: Schedule) -> AccountingInputs:
    """Return the inputs of privacy accounting besides the defence."""
    n_samples, phases = tuple(int(size) for size in federation.n_samples("train")), method.phases()
    needed = schedule.min_samples(phases)
    return AccountingInputs(schedule, phases, n_samples, sum(size < needed for size in n_samples))


def probe_samples(federation: Federation) -> list[int]:
    """Return training samples of the largest client, on which `check_coupling` tries a method."""
    largest = max(federation.shards, key=lambda shard: len(shard.train))
    return [int(index) for index in largest.train[:64]]
