"""The final phases of a method, run by engines like a local round that sends nothing."""

import dataclasses
from dataclasses import dataclass
from typing import Self

from gpfl.core.local_round import Indices, Samples, Schedule, local_round
from gpfl.core.method import ClientInfo, Method, Phase
from gpfl.core.tree import Tree


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
