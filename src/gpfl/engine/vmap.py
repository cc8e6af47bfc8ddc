"""The engine that stacks clients: one vmapped step for all of them, run as a program with fixed buffers."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F

from gpfl.core import tree
from gpfl.core.local_round import Indices, Samples
from gpfl.core.method import Batch, ClientInfo, LossTerms, Method, Step
from gpfl.core.metrics import Evaluation
from gpfl.core.tree import Tree
from gpfl.engine.base import Engine, EvalRequest, RoundResult, RunSpec, TrainRequest, add_terms
from gpfl.engine.batched_evaluation import BatchedEvaluator, EvalGroup
from gpfl.engine.compiler.program import Buffers, Function, Program
from gpfl.engine.concurrent_round import ConcurrentRound
from gpfl.engine.slots import SEGMENT, ClientStore, Packing, SlotSwaps, batched, fastest_slot_count, load_segment, pack
from gpfl.errors import GpflError


class RoundClient(NamedTuple):
    """A client of one of the concurrent rounds: the index of the round and the client's position in its request."""

    round: int
    position: int


class Vmap(Engine):
    """Engine that trains many clients in one batched step; when a client finishes, the next one takes its slot."""

    name: ClassVar[str] = "vmap"
    supports_concurrent_trials: ClassVar[bool] = True

    max_slots: ClassVar[int] = 64  # clients that train at once; more gain little and cost memory
    chunk_size: ClassVar[int] = 128  # clients whose state is on the device at once
    min_calls_to_trace: ClassVar[int] = 100  # a program that runs less often is not worth tracing
    min_calls_to_compile: ClassVar[int] = 20_000  # the same for compiling, on a GPU

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._compile, self._tracing = spec.compile, True
        self._programs: dict[object, Program] = {}
        self._evaluator = BatchedEvaluator(self, self.max_slots, self._make_program)
        self._slot_counts: dict[int, int] = {}

    def check_vmappable(self) -> None:
        """Run a step of every phase and an evaluation for two copies of a client; raise torch's error if vmap fails."""
        self._tracing = False
        client = next(client for client in range(len(self.federation)) if self.can_train(client))
        shared, private = (tree.to(state, self.device) for state in self.method.init(self.schedule.seed))
        private, info = tree.repeat(private, 2), self.client_info([client, client], 0)
        self._check_steps(shared, private, client)
        if self.method.final_phases():
            private = self._final_engine._check_steps(shared, private, client)
        samples = torch.stack([self.adaptation_indices(client)] * 2)
        group = EvalGroup([0, 1], [0, 1], torch.tensor([0, 1], device=self.device), samples, samples[:, None])
        with torch.no_grad():
            self._evaluator.score_group(shared, private, group, info)

    def _check_steps(self, shared: Tree, private: Tree, client: int) -> Tree:
        """Run a step of every phase for two copies of a client and return their private state."""
        request = TrainRequest(shared, private, [client, client], 0, self.schedule, [client], self.method)
        trial = ConcurrentRound(self, request)
        trial.plans = [[steps[:1] for steps in plan] for plan in trial.plans]
        self._train_chunk([trial], {"state": shared, "hyperparameters": {}}, [RoundClient(0, 0), RoundClient(0, 1)])
        return trial.result().private

    def train_round(self, request: TrainRequest) -> RoundResult:
        """Run a round."""
        return self.train_rounds([request])[0]

    def train_rounds(self, requests: Sequence[TrainRequest], engines: Sequence[Engine] = ()) -> list[RoundResult]:
        """Run a round of each of several trials, whose clients share the slots."""
        engines = engines or [self] * len(requests)
        rounds = [ConcurrentRound(engine, request) for engine, request in zip(engines, requests, strict=True)]
        names = differing_floats([self.method, *(request.method for request in requests)])  # also when only one trial is left
        bundles: list[Tree] = [
            {
                "state": request.shared,
                "hyperparameters": {name: torch.tensor(request.method.values()[name], device=self.device) for name in names},
            }
            for request in requests
        ]
        shared = bundles[0] if len(rounds) == 1 else tree.stack(bundles)
        chunks = self._chunks(rounds)
        for chunk, next_chunk in zip(chunks, [*chunks[1:], []], strict=True):
            for index, positions in enumerate(positions_by_round(next_chunk, len(rounds))):
                rounds[index].prefetch(positions)
            self._train_chunk(rounds, shared, chunk)
        return [each.result() for each in rounds]

    def _client_weights(self, method: Method, clients: ClientInfo) -> Tensor:
        return vmap(method.aggregation_weight)(clients)

    def _chunks(self, rounds: Sequence[ConcurrentRound]) -> list[list[RoundClient]]:
        """Return the clients of all rounds in chunks, those with most steps first.

        Padding would shift BatchNorm statistics, so clients with a short batch form chunks of their own.
        """
        plans = {RoundClient(index, i): plan for index, each in enumerate(rounds) for i, plan in enumerate(each.plans)}
        single = [c for c, plan in plans.items() if self.method.net.has_batch_norm and any((s < 0).any() for s in plan)]
        stacked = sorted(plans.keys() - set(single), key=lambda c: ([-len(steps) for steps in plans[c]], c))
        return [*batched(stacked, self.chunk_size), *batched(single, 1)]

    def _train_chunk(self, rounds: Sequence[ConcurrentRound], shared: Tree, chunk: list[RoundClient]) -> None:
        """Train the clients of a chunk and add them to the results of their rounds."""
        if len(chunk) == 1:
            rounds[chunk[0].round].run_client(chunk[0].position)
            return
        by_round = positions_by_round(chunk, len(rounds))
        states, infos = zip(*(rounds[index].download(at) for index, at in enumerate(by_round) if at), strict=True)
        local_state = tree.concatenate(states)
        info = ClientInfo(*(torch.cat(fields) for fields in zip(*infos, strict=True)))
        clients = [RoundClient(index, i) for index, positions in enumerate(by_round) for i in positions]
        round_of = torch.tensor([client.round for client in clients], device=self.device) if len(rounds) > 1 else None
        plans = [rounds[client.round].plans[client.position] for client in clients]
        n_steps = torch.tensor([[float(len(steps)) for steps in plan] for plan in plans], device=self.device)
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for phase in range(len(self.method.phases())):
            # What clients receive is read-only: its rows may share memory. The results of a phase are overwritten by the next.
            end = local_state if phase else tree.map_leaves(torch.empty_like, local_state)
            store = ClientStore({"local_state": local_state}, {"local_state": end}, info, shared, round_of)
            local_state, terms = self._run_phase(phase, store, [plan[phase] for plan in plans])
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
                counts[name] = counts.get(name, torch.zeros_like(value)) + n_steps[:, phase]
        means = {name: sums[name] / counts[name] for name in sums}
        start = 0
        for index, positions in enumerate(by_round):
            entries = slice(start, start := start + len(positions))
            if positions:
                terms = {name: value[entries] for name, value in means.items()}
                rounds[index].upload(positions, tree.take(local_state, entries), terms)

    def _run_phase(self, phase: int, store: ClientStore, batches: list[Indices]) -> tuple[Tree, LossTerms]:
        """Run a phase for all clients of a store; return their local state and the sums of their loss terms."""
        lengths = [len(steps) for steps in batches]
        packing = pack(lengths, self._slot_count(lengths))
        plan = torch.from_numpy(packing.plan(batches)).to(self.device)
        program = self._step_program(phase, store, packing, plan)
        if store.rounds is None:
            program.load("shared", store.shared)
        terms = {name: value.new_zeros(len(lengths)) for name, value in program.state["terms"].items()}
        store.start["terms"] = store.end["terms"] = terms
        swaps = SlotSwaps(packing, self.device)
        segment = program.fixed["plan"].shape[1]
        times = sorted({*swaps.times, *range(0, packing.steps, segment), packing.steps})
        for now, until in zip(times, [*times[1:], packing.steps], strict=True):
            swaps.apply(now, program, store)
            if now % segment == 0 and now < packing.steps:
                load_segment(program, plan, now)
            for _ in range(until - now):
                program()
        return store.end["local_state"], store.end["terms"]

    def _slot_count(self, lengths: list[int]) -> int:
        """Return the number of slots for clients of these lengths: one of a few, since each number needs its own program."""
        n_trials = -(-len(lengths) // len(self.federation))
        full = self._full_slot_count(n_trials)
        if len(lengths) == min(self.chunk_size, n_trials * len(self.federation)):
            return full
        counts = [full]
        while counts[-1] > 1:
            counts.append((counts[-1] + 1) // 2)
        return fastest_slot_count(lengths, counts)

    def _full_slot_count(self, n_trials: int) -> int:
        """Return the number of slots for the first chunk of a round of all clients of some trials."""
        if n_trials not in self._slot_counts:
            steps = [max(1, len(shard.train) // self.schedule.batch_size) for shard in self.federation.shards]
            chunk = sorted(steps * n_trials, reverse=True)[: self.chunk_size]
            # With more slots, some would be idle while the longest client finishes.
            self._slot_counts[n_trials] = fastest_slot_count(chunk, range(1, min(self.max_slots, len(chunk)) + 1))
        return self._slot_counts[n_trials]

    def _step_program(self, phase: int, store: ClientStore, packing: Packing, plan: Tensor) -> Program:
        """Return the program of a phase's step for the slots of a packing; it is made once and reused."""
        (width, n_steps, batch_size), concurrent = plan.shape, store.rounds is not None
        key = (phase, width, batch_size, concurrent, *tree.branch(store.shared, "hyperparameters"))
        if key not in self._programs:
            table = self.federation.table
            step = vmap(self._step(phase), in_dims=(0 if concurrent else None, 0, 0, 0))

            def advance(state: Buffers, fixed: Buffers) -> Buffers:
                indices = fixed["plan"].index_select(1, state["step"]).squeeze(1)  # (slots, batch)
                batch = Samples(fixed["x"], fixed["y"], table.input_spec).batch(indices)
                local_state, terms = step(fixed["shared"], state["local_state"], batch, fixed["client"])
                return {"local_state": local_state, "terms": add_terms(state["terms"], terms), "step": state["step"] + 1}

            # A plan of all clients has the same length in every round; others differ.
            constant = len(packing.lengths) == width == len(self.federation)
            steps = min(SEGMENT, n_steps) if constant else SEGMENT
            state = {
                "local_state": empty_slots(store.start["local_state"], width),
                "terms": {},
                "step": torch.zeros(1, dtype=torch.int64, device=self.device),
            }
            fixed = {
                "shared": empty_slots(store.shared, width) if concurrent else tree.clone(store.shared),
                "client": ClientInfo(*(field.clone() for field in self.client_info([0] * width, 0))),
                "plan": F.pad(plan[:, :steps], (0, 0, 0, max(0, steps - n_steps))),  # real samples, for steps that are timed
                "x": table.x,
                "y": table.y,
            }
            state["terms"] = {name: torch.zeros_like(value) for name, value in advance(state, fixed)["terms"].items()}
            n_trials = 1 if store.rounds is None else int(store.rounds.max()) + 1
            calls = self.count_steps(self.method.phases()[phase]) * n_trials // width
            weights = {"local_state": True, "shared": concurrent}
            self._programs[key] = self._make_program(advance, state, fixed, calls, weights)
        return self._programs[key]

    def _step(self, phase: int) -> Step:
        """Return the step of a phase; its `shared` also holds the hyperparameters in which trials differ."""
        method = self.method

        def step(shared: Tree, local_state: Tree, batch: Batch, client: ClientInfo) -> tuple[Tree, LossTerms]:
            hyperparameters: dict[str, Any] = tree.branch(shared, "hyperparameters")
            trial = method.replace(**hyperparameters)
            return trial.phases()[phase].step(tree.branch(shared, "state"), local_state, batch, client)

        return step

    def _make_program(
        self, advance: Function, state: Buffers, fixed: Buffers, calls: int, weights: Mapping[str, bool] | None = None
    ) -> Program:
        """Return a program, traced and compiled if that pays for the number of calls."""
        required, on_cpu = self._tracing and self._compile == "on", self.device.type == "cpu"
        long = on_cpu or calls >= self.min_calls_to_compile  # on a CPU it depends on the operations as well
        compiled = required or (self._tracing and self._compile == "auto" and long)
        if on_cpu and weights is None:  # evaluation is as fast without
            required = compiled = False
        traced = required or (self._tracing and calls >= self.min_calls_to_trace)
        return Program(
            *(advance, state, fixed),
            traced=traced, compiled=compiled, compile_required=required, calls=calls, weights=weights,
        )  # fmt: skip

    def for_trial(self, spec: RunSpec) -> Self:
        """Return this engine for another trial, with its own programs if its hyperparameters differ."""
        out = super().for_trial(spec)
        if differing_floats([self.method, spec.method]):
            out._programs = {}
            out._evaluator = BatchedEvaluator(out, self.max_slots, out._make_program)
        else:
            out._evaluator = self._evaluator.for_engine(out)
        return out

    def evaluate_clients(self, request: EvalRequest) -> Evaluation:
        """Return the scores of the clients."""
        return self.to_evaluation(request, self._evaluator.scores(request))

    def predict_clients(self, request: EvalRequest) -> list[Tensor]:
        """Return the logits of the clients."""
        return self._evaluator.logits(request)


def positions_by_round(clients: Sequence[RoundClient], n_rounds: int) -> list[list[int]]:
    """Return the positions of the given clients in each of the concurrent rounds."""
    return [[client.position for client in clients if client.round == index] for index in range(n_rounds)]


def empty_slots(stacked: Tree, width: int) -> Tree:
    """Return zeros for `width` entries of a stacked tree."""
    return tree.map_leaves(lambda t: t.new_zeros((width, *t.shape[1:])), stacked)


def differing_floats(methods: Sequence[Method]) -> list[str]:
    """Return the names of the float hyperparameters in which methods differ; raise if anything else differs."""
    if len({(type(method), method.name) for method in methods}) > 1:
        raise GpflError("concurrent trials must have the same method")
    names = []
    for name in methods[0].values():
        values = [method.values()[name] for method in methods]
        if any(value != values[0] for value in values):
            if not all(isinstance(value, float) for value in values):
                raise GpflError(f"concurrent trials must have the same {name}, not {values[0]!r} and others")
            names.append(name)
    return names
