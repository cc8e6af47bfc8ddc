"""Many clients at once: their states stacked on a first axis, one vmapped step for all, run as a program on fixed memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.func import vmap

from gpfl.core import tree
from gpfl.core.local_round import Indices
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Step
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, EvalRequest, RoundResult, RunSpec, TrainRequest
from gpfl.engine.batched_evaluation import BatchedEvaluator, Group
from gpfl.engine.compiler.program import Buffers, Function, Program
from gpfl.engine.packing import OVERHEAD, Packing, best_width, blocks, pack
from gpfl.engine.round_state import Member, Round
from gpfl.engine.slots import Changes, Stock, like
from gpfl.errors import GpflError

SEGMENT = 512
"""Steps whose rows lie on the device at once."""


class Vmap(Engine):
    """Runs clients in slots; a slot whose client has finished goes to the next client."""

    name: ClassVar[str] = "vmap"
    supports_concurrent_trials: ClassVar[bool] = True

    slots: ClassVar[int] = 64  # clients that train at once; more gain little and cost memory
    chunk: ClassVar[int] = 128  # clients whose state is on the device at once
    trace_from: ClassVar[int] = 100  # calls of a program from which tracing it pays
    compile_from: ClassVar[int] = 20_000  # calls from which compiling it pays, on a GPU

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._compile, self._traces = spec.compile, True
        self._programs: dict[object, Program] = {}
        self._judging = BatchedEvaluator(self, self.slots, self._program)
        self._usual: dict[int, int] = {}

    def check_vmappable(self) -> None:
        """Runs a step of every phase and a judgement for a client and its double: what torch cannot vmap fails here."""
        self._traces = False
        client = next(client for client in range(len(self.federation)) if self.can_train(client))
        shared, private = (tree.to(state, self.device) for state in self.method.init(self.schedule.seed))
        private, facts = tree.repeat(private, 2), self.client_info([client, client], 0)
        double = Round(self, TrainRequest(shared, private, [client, client], 0, self.schedule, [client], self.method))
        double.plans = [[steps[:1] for steps in plan] for plan in double.plans]
        self._train_members([double], {"state": shared, "values": {}}, [Member(0, 0), Member(0, 1)])
        rows = torch.stack([self.adaptation_indices(client)] * 2)
        group = Group([0, 1], [0, 1], torch.tensor([0, 1], device=self.device), rows, rows[:, None])
        with torch.no_grad():
            self._judging.judge_group(shared, private, group, facts)

    # Training.

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Gives a round."""
        return self.train_rounds([request])[0]

    def train_rounds(self, request: Sequence[TrainRequest]) -> list[RoundResult]:
        """Gives the rounds of several trials, whose clients train in the same slots, results in the order of their clients."""
        rounds = [Round(self, each) for each in request]
        names = differing([self.method, *(each.method for each in request)])  # also where one trial of several is left
        values = [{name: torch.tensor(each.method.values()[name], device=self.device) for name in names} for each in request]
        bundles: list[Tree] = [{"state": one.shared, "values": dict(own)} for one, own in zip(rounds, values, strict=True)]
        shared = bundles[0] if len(rounds) == 1 else tree.stack(bundles)
        chunks = self._arrange(rounds)
        for members, following in zip(chunks, [*chunks[1:], []], strict=True):
            for number, each in enumerate(rounds):
                each.fetch([member.place for member in following if member.round == number])
            self._train_members(rounds, shared, members)
        return [each.cohort() for each in rounds]

    def _client_weights(self, method: Method, clients: ClientInfo) -> Tensor:
        """Gives the weights of stacked clients, all at once."""
        return vmap(method.aggregation_weight)(clients)

    def _arrange(self, rounds: Sequence[Round]) -> list[list[Member]]:
        """Gives the clients of all rounds in chunks, those with most steps first.

        Short batches would shift BatchNorm statistics, so clients that have one run alone.
        """
        everyone = [Member(number, place) for number, each in enumerate(rounds) for place in range(len(each.plans))]
        plans = {member: rounds[member.round].plans[member.place] for member in everyone}
        alone = {m for m, plan in plans.items() if self.method.net.has_batch_norm and any((s < 0).any() for s in plan)}
        rest = sorted((m for m in everyone if m not in alone), key=lambda m: [-len(steps) for steps in plans[m]])
        return [*blocks(rest, self.chunk), *blocks(sorted(alone), 1)]

    def _train_members(self, rounds: Sequence[Round], shared: Tree, members: list[Member]) -> None:
        """Runs a chunk of clients and gives each round what its clients send and keep."""
        if len(members) == 1:
            rounds[members[0].round].run_alone(members[0].place)
            return
        of_round = [(number, [m.place for m in members if m.round == number]) for number in range(len(rounds))]
        parts = [rounds[number].enter(places) for number, places in of_round if places]
        # Rounds one after the other, and clients in each as they are in `members`.
        order = [member for number, _ in of_round for member in members if member.round == number]
        local_state = tree.concatenate([part.local_state for part in parts])
        client = ClientInfo(*(torch.cat(fields) for fields in zip(*(part.client for part in parts), strict=True)))
        groups = torch.tensor([member.round for member in order], device=self.device) if len(rounds) > 1 else None
        plans = [rounds[member.round].plans[member.place] for member in order]
        counts = torch.tensor([[float(len(steps)) for steps in plan] for plan in plans], device=self.device)
        sums: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}
        for number in range(len(self.method.phases())):
            steps = [plan[number] for plan in plans]
            local_state, terms = self._run_phase(number, shared, groups, local_state, steps, client)
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
                seen[name] = seen.get(name, torch.zeros_like(value)) + counts[:, number]
        means = {name: sums[name] / seen[name] for name in sums}
        start = 0
        for number, places in of_round:
            own = slice(start, start := start + len(places))
            if places:
                rounds[number].leave(places, tree.take(local_state, own), {name: value[own] for name, value in means.items()})

    def _run_phase(
        self,
        number: int,
        shared: Tree,
        groups: Tensor | None,
        local_state: Tree,
        steps: list[Indices],
        client: ClientInfo,
    ) -> tuple[Tree, LossTerms]:
        """Gives all members after a phase, and the sums of its terms."""
        lengths = [len(part) for part in steps]
        packing = pack(lengths, self._width(lengths))
        program = self._step_program(number, shared, groups, local_state, packing, steps[0].shape[1])
        if groups is None:
            tree.copy_(program.fixed["shared"], shared)
        store = {
            "work": local_state,
            "terms": {name: value.new_zeros(len(lengths)) for name, value in program.state["terms"].items()},
        }
        stock = Stock(store, client, shared, groups)
        plan = torch.from_numpy(packing.plan(steps)).to(self.device)
        changes = Changes(packing, self.device)
        segment = program.fixed["plan"].shape[1]
        times = sorted({*changes.times, *range(0, packing.steps, segment), packing.steps})
        for now, until in zip(times, [*times[1:], packing.steps], strict=True):
            changes.apply(now, program, stock)
            if now % segment == 0 and now < packing.steps:
                program.state["step"].zero_()
                part = plan[:, now : now + segment]
                program.fixed["plan"][:, : part.shape[1]].copy_(part)
            for _ in range(until - now):
                program()
        return store["work"], store["terms"]

    def _width(self, lengths: list[int]) -> int:
        """Gives the number of slots for clients of these lengths: one of few, since each has a program of its own."""
        times = -(-len(lengths) // len(self.federation))
        usual = self._usual_width(times)
        if len(lengths) == min(self.chunk, times * len(self.federation)):
            return usual
        ladder = [usual]
        while ladder[-1] > 1:
            ladder.append((ladder[-1] + 1) // 2)
        return min(ladder, key=lambda width: pack(lengths, width).steps * (OVERHEAD + width))

    def _usual_width(self, times: int) -> int:
        """Gives the number of slots for the first chunk of all clients, so many times over."""
        if times not in self._usual:
            steps = [max(1, len(shard.train) // self.schedule.batch_size) for shard in self.federation.shards]
            chunk = sorted(steps * times, reverse=True)[: self.chunk]
            self._usual[times] = best_width(chunk, self.slots)
        return self._usual[times]

    def _step_program(
        self,
        number: int,
        shared: Tree,
        groups: Tensor | None,
        local_state: Tree,
        packing: Packing,
        rows: int,
    ) -> Program:
        """Gives the program of a phase's step for as many slots, made once."""
        width = len(packing.slots)
        key = (number, width, rows, groups is None, *tree.branch(shared, "values"))
        if key not in self._programs:
            table = self.federation.table
            step = vmap(self._step(number), in_dims=(None if groups is None else 0, 0, 0, 0))

            def advance(state: Buffers, fixed: Buffers) -> Buffers:
                own = fixed["plan"].index_select(1, state["step"]).squeeze(1)  # (slots, rows)
                batch = table.with_tensors(fixed["x"], fixed["y"]).batch(own)
                after, terms = step(fixed["shared"], state["work"], batch, fixed["client"])
                sums = {name: state["terms"][name] + value for name, value in terms.items()} if state["terms"] else terms
                return {"work": after, "terms": sums, "step": state["step"] + 1}

            facts = self.client_info([0] * width, 0)
            state = {
                "work": like(local_state, width),
                "terms": {},
                "step": torch.zeros(1, dtype=torch.int64, device=self.device),
            }
            fixed = {
                "shared": tree.clone(shared) if groups is None else like(shared, width),
                "client": ClientInfo(*(field.clone() for field in facts)),
                "plan": torch.zeros(width, min(SEGMENT, self._longest(packing)), rows, dtype=torch.int64, device=self.device),
                "x": table.x,
                "y": table.y,
            }
            state["terms"] = {name: torch.zeros_like(value) for name, value in advance(state, fixed)["terms"].items()}
            calls = packing.steps * self.schedule.rounds
            self._programs[key] = self._program(advance, state, fixed, calls, {"work": True, "shared": groups is not None})
        return self._programs[key]

    def _step(self, number: int) -> Step:
        """Gives the step of a phase; what comes as shared state also holds the values in which trials differ."""
        method = self.method

        def step(shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
            values: dict[str, Any] = tree.branch(shared, "values")
            own = method.replace(**values)
            return own.phases()[number].step(tree.branch(shared, "state"), local_state, batch, client)

        return step

    def _program(
        self, advance: Function, state: Buffers, fixed: Buffers, calls: int, weights: Mapping[str, bool] | None = None
    ) -> Program:
        """Gives a program that is traced and compiled as far as so many calls pay for it."""
        compiled = self._traces and (self._compile == "on" or (self._compile == "auto" and calls >= self.compile_from))
        traced, needed = compiled or (self._traces and calls >= self.trace_from), self._compile == "on"
        return Program(advance, state, fixed, traced=traced, compiled=compiled, needed=needed, weights=weights)

    def _longest(self, packing: Packing) -> int:
        """Gives the most steps that a plan of as many slots may have in this run, where that is under a segment."""
        everyone = len(packing.lengths) == len(packing.slots) == len(self.federation)
        return packing.steps if everyone else SEGMENT

    def for_trial(self, spec: RunSpec) -> Self:
        """Gives the engine for another trial; other numbers in its method are judged by programs of their own."""
        out = super().for_trial(spec)
        if differing([self.method, spec.method]):
            out._judging = BatchedEvaluator(out, self.slots, self._program)
        return out

    def evaluate_clients(self, request: EvalRequest) -> Evaluation:
        """Gives the scores of all clients."""
        return self._judging.scores(request)


def differing(methods: Sequence[Method]) -> list[str]:
    """Gives the names of numbers in which methods differ; all else must be equal, or they could not be run at once."""
    if len({(type(method), method.name) for method in methods}) > 1:
        raise GpflError("trials that run at once must be of one method")
    names = []
    for name in methods[0].values():
        values = [method.values()[name] for method in methods]
        if any(value != values[0] for value in values):
            if not all(isinstance(value, float) for value in values):
                raise GpflError(f"trials that run at once must have the same {name}, not {values[0]!r} and others")
            names.append(name)
    return names
