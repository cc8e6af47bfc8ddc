"""All clients of a cohort at once: their states stacked on a first axis, one vmapped step for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from gpfl import tree
from gpfl.data.table import Rows
from gpfl.engine.base import Cohort, Engine, one
from gpfl.evaluate import Evaluation
from gpfl.method import Batch, Client, Phase, Terms
from gpfl.rounds import Score, judge, local_round
from gpfl.tree import Tree

BLOCK = 256
"""Rows of each client evaluated at once."""


class Stack(NamedTuple):
    """Clients that run together, those with most rows first: a client that has finished is at the end and is cut off."""

    order: list[int]  # places in the cohort
    alone: list[int]  # places that cannot be stacked


class Vmap(Engine):
    """Runs the cohort in step; clients with fewer rows leave it when they have finished."""

    name: ClassVar[str] = "vmap"

    def rehearse(self) -> None:
        """Runs a step of every phase and a judgement for a client and its double: what torch cannot vmap fails here."""
        client = next(client for client in range(len(self.federation)) if self.trains(client))
        shared, private = (tree.to(state, self.device) for state in self.method.init(self.schedule.seed))
        private, facts = tree.repeat(private, 2), self.facts([client, client], 0)
        first = [steps[:1] for steps in self.plan(client, 0)]
        self._train_stack(shared, private, [first, first], facts, [0, 1])
        batch = self.federation.table.batch(torch.stack([self.adaptation_rows(client)] * 2))
        with torch.no_grad():
            vmap(self._judge(), in_dims=(None, 0, 0, 0, 0))(shared, private, batch, facts, batch)

    def train(self, shared: Tree, private: Tree, clients: Sequence[int], round: int) -> Cohort:
        """Gives the cohort's round, results in the order of `clients`."""
        plans = [self.plan(client, round) for client in clients]
        facts = self.facts(clients, round)
        stack = self._arrange(plans)
        uploads: list[Tree] = []
        kept: list[Tree] = []
        terms: list[Terms] = []
        if stack.order:
            together = self._train_stack(shared, private, [plans[p] for p in stack.order], facts, stack.order)
            uploads.append(together[0])
            kept.append(together[1])
            terms.append(together[2])
        for place in stack.alone:
            own = tree.take(private, place)
            update = local_round(self.method, shared, own, self.federation.table, plans[place], one(facts, place))
            uploads.append(tree.repeat(update.upload, 1))
            kept.append(tree.repeat(update.private, 1))
            terms.append({name: value.unsqueeze(0) for name, value in update.terms.items()})
        back = torch.as_tensor(np.argsort([*stack.order, *stack.alone]), device=self.device)
        joined = tree.take(tree.concatenate(uploads), back)
        weights = vmap(self.method.weight)(facts)
        named = {name: torch.cat([t[name] for t in terms])[back] for name in terms[0]}
        return Cohort(tree.weighted_mean(joined, weights), tree.take(tree.concatenate(kept), back), named)

    def _arrange(self, plans: Sequence[list[Rows]]) -> Stack:
        """Gives clients by falling number of steps; short batches would shift BatchNorm statistics, so those run alone."""
        short = [any((steps < 0).any() for steps in plan) for plan in plans]
        alone = [place for place in range(len(plans)) if short[place] and self.method.net.keeps_statistics]
        rest = [place for place in range(len(plans)) if place not in alone]
        return Stack(sorted(rest, key=lambda place: [-len(steps) for steps in plans[place]]), alone)

    def _train_stack(
        self, shared: Tree, private: Tree, plans: list[list[Rows]], facts: Client, order: list[int]
    ) -> tuple[Tree, Tree, Terms]:
        index = torch.as_tensor(order, device=self.device)
        private, client = tree.take(private, index), Client(*(field[index] for field in facts))
        work = vmap(self.method.download, in_dims=(None, 0, 0))(shared, private, client)
        sums: dict[str, Tensor] = {}
        steps_seen: dict[str, Tensor] = {}
        for number, phase in enumerate(self.method.phases()):
            steps = [plan[number] for plan in plans]
            work, terms = self._run_phase(phase, shared, work, steps, client)
            taken = torch.tensor([float(len(part)) for part in steps], device=self.device)
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
                steps_seen[name] = steps_seen.get(name, torch.zeros_like(value)) + taken
        upload, kept = vmap(self.method.upload, in_dims=(None, 0, 0, 0))(shared, work, private, client)
        return upload, kept, {name: sums[name] / steps_seen[name] for name in sums}

    def _run_phase(self, phase: Phase, shared: Tree, work: Tree, steps: list[Rows], client: Client) -> tuple[Tree, Terms]:
        """Gives the stack after a phase, and the sums of its terms. Steps are shared by all clients that still have some."""
        step = vmap(phase.step, in_dims=(None, 0, 0, 0))
        lengths = [len(part) for part in steps]
        finished: list[Tree] = []
        sums: Terms = {}
        start, active = 0, len(lengths)
        while active:
            until = lengths[active - 1]
            block = np.stack([part[start:until] for part in steps[:active]])  # (clients, steps, width)
            rows = torch.from_numpy(block).to(self.device)
            present = Client(*(field[:active] for field in client))
            for number in range(until - start):
                work, terms = step(shared, work, self.federation.table.batch(rows[:, number]), present)
                for name, value in terms.items():
                    sums.setdefault(name, torch.zeros(len(lengths), device=self.device))[:active] += value
            left = sum(length > until for length in lengths)
            finished.append(tree.take(work, slice(left, active)))
            work = tree.take(work, slice(0, left))
            start, active = until, left
        return tree.concatenate(finished[::-1]), sums

    def evaluate(self, shared: Tree, private: Tree, round: int, part: str) -> Evaluation:
        """Gives the scores, a block of rows of every client at a time; clients without rows left are cut off."""
        sizes = self.federation.rows(part)
        everyone = range(len(sizes))
        short = [bool((self.adaptation_rows(client) < 0).any()) for client in everyone]
        alone = [client for client in everyone if short[client] and self.method.net.keeps_statistics]
        order = [client for client in np.argsort(-sizes, kind="stable").tolist() if client not in alone]
        facts = self.facts(everyone, round)
        totals = torch.zeros(len(sizes), 2, device=self.device)
        with torch.no_grad():
            if order:
                totals[order] = self._judge_stack(shared, private, order, facts, part)
            for client in alone:
                own = tree.take(private, client)
                totals[client] = self.judge_alone(shared, own, client, one(facts, client), part)
        correct, loss = totals.T.cpu().double().numpy()
        return Evaluation(correct, loss, sizes.astype(np.float64))

    def _judge_stack(self, shared: Tree, private: Tree, order: list[int], facts: Client, part: str) -> Tensor:
        """Gives (correct decisions, summed loss) of the clients of `order`, most rows first."""
        table = self.federation.table
        rows = [self.federation.shards[client].part(part) for client in order]
        index = torch.as_tensor(order, device=self.device)
        private, facts = tree.take(private, index), Client(*(field[index] for field in facts))
        adapt = table.batch(torch.stack([self.adaptation_rows(client) for client in order]))
        scored = vmap(self._judge(), in_dims=(None, 0, 0, 0, 0))
        totals = torch.zeros(len(order), 2, device=self.device)
        width = min(BLOCK, len(rows[0]))
        for start in range(0, len(rows[0]), width):
            active = sum(len(own) > start for own in rows)
            block = pad([own[start : start + width] for own in rows[:active]], width)
            score = scored(
                shared,
                tree.take(private, slice(0, active)),
                Batch(*(field[:active] for field in adapt)),
                Client(*(field[:active] for field in facts)),
                table.batch(block.to(self.device)),
            )
            totals[:active] += torch.stack(score, dim=1)
        return totals

    def _judge(self) -> Callable[[Tree, Tree, Batch, Client, Batch], Score]:
        method = self.method
        return lambda shared, private, adapt, client, batch: judge(method, shared, private, adapt, client, batch)


def pad(rows: Sequence[Rows], width: int) -> Tensor:
    """Gives rows of unequal number as one block (clients, width), padded with -1."""
    block = np.full((len(rows), width), -1, dtype=np.int64)
    for place, part in enumerate(rows):
        block[place, : len(part)] = part
    return torch.from_numpy(block)
