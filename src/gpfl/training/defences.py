"""A defence in its federation: the method that is run under it, and what it promises there."""

from __future__ import annotations

from gpfl.core.local_round import Schedule
from gpfl.core.method import Method
from gpfl.defences.accounting import AccountingInputs, Facts, statement
from gpfl.defences.config import DefenceConfig
from gpfl.defences.coupling import tried
from gpfl.defences.defended import Defended, defended
from gpfl.federation.federation import Federation


def guarded(method: Method, defence: DefenceConfig, federation: Federation, schedule: Schedule) -> Method:
    """Gives a bound method under a defence; refuses what would make its promise false."""
    fewest = crowd_of(method, federation, schedule).joining[0]
    method = defended(method, defence, seed=schedule.seed, crowd=fewest)
    if isinstance(method, Defended) and defence.example_clip:
        tried(method, federation.table, rows_to_try(federation))
    return method


def promised(method: Method, federation: Federation, schedule: Schedule) -> Facts:
    """Gives what a method's defence promises; nothing where it has none, or no noise."""
    if not isinstance(method, Defended) or not method.shares:
        return {}
    crowd = crowd_of(method, federation, schedule)
    if method.defence.example_noise:
        found = tried(method, federation.table, rows_to_try(federation))
        crowd = AccountingInputs(crowd.schedule, crowd.phases, crowd.rows, crowd.idle, found)
    return statement(method.defence, crowd)


def crowd_of(method: Method, federation: Federation, schedule: Schedule) -> AccountingInputs:
    """Gives what a promise depends on besides the defence."""
    rows, phases = tuple(int(size) for size in federation.n_samples("train")), method.phases()
    needed = schedule.min_samples(phases)
    return AccountingInputs(schedule, phases, rows, sum(size < needed for size in rows))


def rows_to_try(federation: Federation) -> list[int]:
    """Gives training rows of the largest client."""
    largest = max(federation.shards, key=lambda shard: len(shard.train))
    return [int(row) for row in largest.train[:64]]
