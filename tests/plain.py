"""The methods as plain imperative PyTorch with torch.optim, to check the library against.

Nothing here uses trees, vmap or the method interface; only the schedule (which client trains on which samples when) is
shared. Written from the methods' formulas, not from the library.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpfl
from gpfl.core.local_round import Schedule

LR = 0.05

State = dict[str, nn.Module | Tensor]
"""Modules and tensors by the library's names."""


class Split(nn.Module):
    """A net as base and head."""

    def __init__(self, base: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


class Valve(nn.Module):
    """GPFL's conditional valve."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("gamma", "beta"):
            branch = nn.Module()
            branch.linear, branch.norm = nn.Linear(width, width), nn.LayerNorm(width)
            self.add_module(name, branch)

    def forward(self, f: Tensor, context: Tensor) -> Tensor:
        gamma = self.gamma.norm(torch.relu(self.gamma.linear(context)))
        beta = self.beta.norm(torch.relu(self.beta.linear(context)))
        return torch.relu((gamma + 1) * f + beta)


class Outcome(NamedTuple):
    """The result of a run: the shared state, each client's private state, and the logits of each personal model."""

    shared: State
    private: list[State]
    logits: list[Callable[[Tensor], Tensor]]


class World:
    """The federation, its schedule, and what all methods use."""

    def __init__(self, federation: gpfl.Federation, schedule: Schedule, epochs: int = 1) -> None:
        self.federation, self.schedule, self.epochs = federation, schedule, epochs
        self.n_samples = federation.n_samples("train")

    def batches(self, client: int, round: int, *, epochs: int | None = None, size: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's batches of a round."""
        from gpfl.core.method import Phase

        phase = Phase(step=None, epochs=self.epochs if epochs is None else epochs, batches=size)  # type: ignore[arg-type]
        for indices in self.schedule.plan([phase], self.federation.shards[client].train, round, client)[0]:
            yield self.samples(indices[indices >= 0])

    def first_batch(self, client: int) -> tuple[Tensor, Tensor]:
        """Return a client's first batch without shuffling."""
        return self.samples(self.federation.shards[client].train[: self.schedule.batch_size])

    def samples(self, indices) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(indices)
        return self.federation.table.inputs(index), self.federation.table.y[index]

    def counts(self, client: int) -> Tensor:
        """Return the number of a client's training samples of each class."""
        _, labels = self.samples(self.federation.shards[client].train)
        return torch.bincount(labels, minlength=self.federation.table.classes).float()

    def cohorts(self, rounds: int, min_samples: int = 1) -> Iterator[tuple[int, list[int]]]:
        for number in range(rounds):
            sampled = self.schedule.sample_clients(number, len(self.federation))
            yield number, [client for client in sampled if self.n_samples[client] >= min_samples]

    def average(self, into: nn.Module, models: list[nn.Module], clients: list[int]) -> None:
        """Average parameters, weighted by the number of training samples."""
        total = sum(self.n_samples[c] for c in clients)
        with torch.no_grad():
            for name, target in into.named_parameters():
                target.zero_()
                for model, client in zip(models, clients, strict=True):
                    target += float(self.n_samples[client] / total) * dict(model.named_parameters())[name]

    def copies(self, module: nn.Module) -> list[nn.Module]:
        return [copy.deepcopy(module) for _ in self.federation.shards]

    def train(self, model: nn.Module, client: int, round: int) -> None:
        """Train a model on cross-entropy."""
        optimiser = torch.optim.SGD(model.parameters(), lr=LR)
        for x, y in self.batches(client, round):
            sgd(F.cross_entropy(model(x), y), optimiser)


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for a, b in zip(source.parameters(), target.parameters(), strict=True):
            b.copy_(a)


def mix_parameters(a: nn.Module, b: nn.Module, weight: float) -> nn.Module:
    """Return a new module with parameters (1 - weight) a + weight b."""
    out = copy.deepcopy(a)
    with torch.no_grad():
        for target, p, q in zip(out.parameters(), a.parameters(), b.parameters(), strict=True):
            target.copy_((1 - weight) * p + weight * q)
    return out


def squared_distance(a: nn.Module, b: nn.Module) -> Tensor:
    """Return the squared distance of all weights, with b constant."""
    return sum(((p - q.detach()) ** 2).sum() for p, q in zip(a.parameters(), b.parameters(), strict=True))


def sgd(loss: Tensor, *optimisers: torch.optim.Optimizer) -> None:
    for optimiser in optimisers:
        optimiser.zero_grad()
    loss.backward()
    for optimiser in optimisers:
        optimiser.step()


def parts_of(net: Split) -> State:
    return {"base": net.base, "head": net.head}


def global_only(world: World, net: Split) -> Outcome:
    """Return the outcome of a method that shares everything."""
    clients = world.federation.shards
    return Outcome(parts_of(net), [{} for _ in clients], [net for _ in clients])


def fedavg(world: World, net: Split, rounds: int) -> Outcome:
    for number, clients in world.cohorts(rounds):
        models = [copy.deepcopy(net) for _ in clients]
        for model, client in zip(models, clients, strict=True):
            world.train(model, client, number)
        world.average(net, models, clients)
    return global_only(world, net)


def fedavg_ft(world: World, net: Split, rounds: int, ft_epochs: int, ft_parts: str = "all", ft_lr: float = LR) -> Outcome:
    """Return FedAvg's outcome with a fine-tuned copy of the global model for each client."""
    outcome = fedavg(world, net, rounds)
    final = World(world.federation, world.schedule.for_final_phases())
    models = world.copies(net)
    for client, model in enumerate(models):
        optimiser = torch.optim.SGD((model if ft_parts == "all" else getattr(model, ft_parts)).parameters(), lr=ft_lr)
        for x, y in final.batches(client, rounds, epochs=ft_epochs):
            model.zero_grad()
            sgd(F.cross_entropy(model(x), y), optimiser)
    return outcome._replace(logits=models)


def local(world: World, net: Split, rounds: int) -> Outcome:
    models = world.copies(net)
    for number, clients in world.cohorts(rounds):
        for client in clients:
            world.train(models[client], client, number)
    return Outcome({}, [parts_of(m) for m in models], models)


def fedprox(world: World, net: Split, rounds: int, mu: float) -> Outcome:
    for number, clients in world.cohorts(rounds):
        models = [copy.deepcopy(net) for _ in clients]
        for model, client in zip(models, clients, strict=True):
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in world.batches(client, number):
                sgd(F.cross_entropy(model(x), y) + mu / 2 * squared_distance(model, net), optimiser)
        world.average(net, models, clients)
    return global_only(world, net)


def perfedavg(world: World, net: Split, rounds: int, alpha: float = LR, beta: float = LR) -> Outcome:
    """Return the outcome of first-order Per-FedAvg: the gradient after the inner step updates the weights before it."""
    half = world.schedule.batch_size
    for number, clients in world.cohorts(rounds, min_samples=2 * half):
        models = [copy.deepcopy(net) for _ in clients]
        for model, client in zip(models, clients, strict=True):
            for x, y in world.batches(client, number, epochs=2 * world.epochs, size=2):
                inner = after_step(model, x[:half], y[:half], alpha)
                gradient = torch.autograd.grad(F.cross_entropy(inner(x[half:]), y[half:]), list(inner.parameters()))
                with torch.no_grad():
                    for p, g in zip(model.parameters(), gradient, strict=True):
                        p -= beta * g
        world.average(net, models, clients)
    clients = range(len(world.federation))
    return Outcome(parts_of(net), [{} for _ in clients], [after_step(net, *world.first_batch(c), alpha) for c in clients])


def after_step(model: nn.Module, x: Tensor, y: Tensor, lr: float) -> nn.Module:
    """Return a copy of the model after one step."""
    out = copy.deepcopy(model)
    sgd(F.cross_entropy(out(x), y), torch.optim.SGD(out.parameters(), lr=lr))
    return out


def pfedme(
    world: World,
    net: Split,
    rounds: int,
    lam: float = 15,
    p_lr: float = 0.01,
    beta: float = 1,
    steps: int = 5,
    theta_decay: float = 0.001,
    eval_model: str = "theta",
) -> Outcome:
    thetas, trained = world.copies(net), world.copies(net)
    for number, clients in world.cohorts(rounds):
        for client in clients:
            w, theta = copy.deepcopy(net), copy.deepcopy(net)
            thetas[client], trained[client] = theta, w
            optimiser = torch.optim.SGD(theta.parameters(), lr=p_lr, weight_decay=theta_decay)
            for x, y in world.batches(client, number):
                for _ in range(steps):
                    sgd(F.cross_entropy(theta(x), y) + lam / 2 * squared_distance(theta, w), optimiser)
                copy_parameters(mix_parameters(w, theta, LR * lam), w)
        mean = copy.deepcopy(net)
        world.average(mean, [trained[c] for c in clients], clients)
        net = mix_parameters(net, mean, beta)
    models = {"theta": thetas, "local_w": trained}[eval_model]
    return Outcome(parts_of(net), [{"personal": m} for m in models], models)


def ditto(world: World, net: Split, rounds: int, lam: float, personal_epochs: int) -> Outcome:
    personal = world.copies(net)
    for number, clients in world.cohorts(rounds):
        models = [copy.deepcopy(net) for _ in clients]
        for model, client in zip(models, clients, strict=True):
            optimiser = torch.optim.SGD(personal[client].parameters(), lr=LR)
            for x, y in world.batches(client, number, epochs=personal_epochs):
                sgd(F.cross_entropy(personal[client](x), y) + lam / 2 * squared_distance(personal[client], net), optimiser)
            world.train(model, client, number)
        world.average(net, models, clients)
    return Outcome(parts_of(net), [{"personal": m} for m in personal], personal)


def personal_heads(world: World, models: list[Split], base: nn.Module) -> Outcome:
    """Return the outcome of a method whose heads are private."""
    for model in models:
        copy_parameters(base, model.base)
    return Outcome({"base": base}, [{"head": m.head} for m in models], models)


def fedper(world: World, net: Split, rounds: int) -> Outcome:
    models = world.copies(net)
    for number, clients in world.cohorts(rounds):
        for client in clients:
            copy_parameters(net.base, models[client].base)
            world.train(models[client], client, number)
        world.average(net.base, [models[c].base for c in clients], clients)
    return personal_heads(world, models, net.base)


def fedrep(world: World, net: Split, rounds: int, head_epochs: int) -> Outcome:
    models = world.copies(net)
    for number, clients in world.cohorts(rounds):
        for client in clients:
            model = models[client]
            copy_parameters(net.base, model.base)
            for part, epochs in ((model.head, head_epochs), (model.base, world.epochs)):
                optimiser = torch.optim.SGD(part.parameters(), lr=LR)
                for x, y in world.batches(client, number, epochs=epochs):
                    sgd(F.cross_entropy(model(x), y), optimiser)
        world.average(net.base, [models[c].base for c in clients], clients)
    return personal_heads(world, models, net.base)


def fedrod(world: World, net: Split, rounds: int) -> Outcome:
    heads = world.copies(net.head)
    for number, clients in world.cohorts(rounds):
        models = [copy.deepcopy(net) for _ in clients]
        for model, client in zip(models, clients, strict=True):
            generic = torch.optim.SGD(model.parameters(), lr=LR)
            personal = torch.optim.SGD(heads[client].parameters(), lr=LR)
            log_counts = world.counts(client).log()  # -inf for a class the client lacks
            for x, y in world.batches(client, number):
                r = model.base(x)
                logits = model.head(r)
                sgd(F.cross_entropy(logits + log_counts, y), generic)
                sgd(F.cross_entropy(logits.detach() + heads[client](r.detach()), y), personal)
        world.average(net, models, clients)

    def logits_of(head: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: net.head(net.base(x)) + head(net.base(x))

    return Outcome(parts_of(net), [{"personal_head": head} for head in heads], [logits_of(head) for head in heads])


def mmd(a: Tensor, b: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy: means over all pairs, also of a row with itself."""

    def kernel(u: Tensor, v: Tensor) -> Tensor:
        squared = ((u[:, None] - v[None]) ** 2).sum(-1)  # (batch, batch)
        return sum(torch.exp(-squared / (2 * scale)) for scale in (10, 15, 20, 50)).mean()

    return kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)


def fedphp(world: World, net: Split, rounds: int, mu: float, lam: float, variant: str = "mix") -> Outcome:
    """Return the outcome of FedPHP. The teacher is the global model under "mix", the personal one under "inherit"."""
    personal = world.copies(net)
    for number, clients in world.cohorts(rounds):
        momentum = mu * number / world.schedule.rounds
        models = []
        for client in clients:
            model = mix_parameters(net, personal[client], momentum) if variant == "mix" else copy.deepcopy(net)
            teacher = net if variant == "mix" else personal[client]
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in world.batches(client, number):
                f = model.base(x)
                loss = (1 - lam) * F.cross_entropy(model.head(f), y) + lam * mmd(f, teacher.base(x).detach())
                sgd(loss, optimiser)
            models.append(model)
            personal[client] = model if variant == "mix" else mix_parameters(model, personal[client], momentum)
        world.average(net, models, clients)
    momentum = mu * rounds / world.schedule.rounds
    used = [mix_parameters(net, m, momentum) for m in personal] if variant == "mix" else personal
    return Outcome(parts_of(net), [{"personal": m} for m in personal], used)


@dataclass
class Prototypes:
    """Sums of features by class."""

    total: Tensor  # (classes, width)
    count: Tensor  # (classes,)

    def add(self, features: Tensor, labels: Tensor) -> None:
        for f, y in zip(features.detach(), labels, strict=True):
            self.total[y] += f
            self.count[y] += 1


def fedproto(world: World, net: Split, rounds: int, lam: float, prototypes: str = "running") -> Outcome:
    models = world.copies(net)
    classes, width = net.head.weight.shape
    known: dict[int, Tensor] = {}
    for number, clients in world.cohorts(rounds):
        sent: dict[int, list[Tensor]] = {}
        for client in clients:
            model, sums = models[client], Prototypes(torch.zeros(classes, width), torch.zeros(classes))
            optimiser = torch.optim.SGD(model.parameters(), lr=LR)
            for x, y in world.batches(client, number):
                f = model.base(x)
                if prototypes == "running":
                    sums.add(f, y)
                targets = torch.stack([known.get(int(u), f[k].detach()) for k, u in enumerate(y)])
                sgd(F.cross_entropy(model.head(f), y) + lam * F.mse_loss(f, targets), optimiser)
            if prototypes == "after":
                for x, y in world.batches(client, number, epochs=1):
                    sums.add(model.base(x), y)
            for u in range(classes):
                if sums.count[u]:
                    sent.setdefault(u, []).append(sums.total[u] / sums.count[u])
        known |= {u: torch.stack(means).mean(0) for u, means in sent.items()}
    mean = torch.stack([known.get(u, torch.zeros(width)) for u in range(classes)])
    seen = torch.tensor([float(u in known) for u in range(classes)])

    def prototype_logits(model: Split) -> Callable[[Tensor], Tensor]:
        def logits(x: Tensor) -> Tensor:
            distance = ((model.base(x)[:, None] - mean) ** 2).mean(-1)  # (batch, classes)
            return torch.where(seen > 0, -distance, -torch.inf)

        return logits

    shared: State = {"prototypes.mean": mean, "prototypes.seen": seen}
    return Outcome(shared, [parts_of(m) for m in models], [prototype_logits(m) for m in models])


class GPFLNet(nn.Module):
    """All modules that a GPFL client trains."""

    def __init__(self, net: Split, valve: Valve, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.base, self.head, self.cov, self.gce = net.base, net.head, valve, embeddings


def gpfl_(
    world: World,
    model: GPFLNet,
    rounds: int,
    lam: float,
    mu: float,
    without: Collection[str] = (),
    constants: Mapping[str, Tensor] | None = None,
    guidance: str = "features",
    valve_gradient: str = "both",
    share_valve: bool = True,
    alpha_levels: int = 0,
    alpha_noise: float = 0.0,
    noise: list[Tensor] | None = None,
) -> Outcome:
    """Return the outcome of GPFL at its defaults, or of one of its variants; `noise` is each client's on its class weights."""
    left_out = {*without} if share_valve else {*without, "cov"}
    shared_parts = ["base", *(part for part in ("cov", "gce") if part not in left_out)]
    trained = ["base", *(part for part in ("cov", "gce") if part not in without)]
    models = world.copies(model)
    shared = module_dict(model, shared_parts)

    def contexts(table: Tensor, client: int) -> tuple[Tensor, Tensor]:
        if constants is not None:
            return constants["g"], constants["p"]
        weights = world.counts(client) / world.counts(client).sum()
        if alpha_levels:
            weights = torch.tensor([math.ceil(round(float(share) * alpha_levels, 3)) for share in weights]).float()
            weights = weights / weights.sum()
        if noise is not None:
            weights = torch.clamp(weights + alpha_noise * noise[client], min=1e-4)
            weights = weights / weights.sum()
        return table.mean(0), weights @ table

    def route(m: GPFLNet, f: Tensor, context: Tensor, constant: bool = False) -> Tensor:
        if "cov" in without:
            return f
        if not constant:
            return m.cov(f, context)
        for parameter in m.cov.parameters():
            parameter.requires_grad_(False)
        out = m.cov(f, context)
        for parameter in m.cov.parameters():
            parameter.requires_grad_(True)
        return out

    for number, clients in world.cohorts(rounds):
        for client in clients:
            m = models[client]
            copy_parameters(shared, module_dict(m, shared_parts))
            received = copy.deepcopy(m.gce.weight.detach())
            g, p = contexts(received, client)
            plain = torch.optim.SGD([*m.base.parameters(), *m.head.parameters()], lr=LR)
            decayed = [torch.optim.SGD(getattr(m, part).parameters(), lr=LR, weight_decay=mu) for part in trained[1:]]
            for x, y in world.batches(client, number):
                f = m.base(x)
                loss = F.cross_entropy(m.head(route(m, f, p, valve_gradient == "global")), y)
                if "gce" not in without:
                    f_g = route(m, f, g) if guidance == "features" else route(m, f, g).detach()
                    loss = loss + F.cross_entropy(F.cosine_similarity(f_g[:, None], m.gce.weight[None], dim=-1, eps=1e-12), y)
                    if "mlg" not in without:
                        loss = loss + lam * torch.norm(f_g - received[y], 2)
                sgd(loss, plain, *decayed)
        world.average(shared, [module_dict(models[c], shared_parts) for c in clients], clients)

    def logits_of(client: int) -> Callable[[Tensor], Tensor]:
        _, p = contexts(model.gce.weight.detach(), client)
        valve = model if share_valve else models[client]
        return lambda x: models[client].head(route(valve, model.base(x), p))

    fixed: State = {} if constants is None else {"constants.g": constants["g"], "constants.p": constants["p"]}
    private: list[State] = [{"head": m.head, **fixed, **({} if share_valve else {"cov": m.cov})} for m in models]
    return Outcome({name: getattr(model, name) for name in shared_parts}, private, [logits_of(c) for c in range(len(models))])


def module_dict(model: GPFLNet, names: list[str]) -> nn.ModuleDict:
    return nn.ModuleDict({name: getattr(model, name) for name in names})
