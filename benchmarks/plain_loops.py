"""FedAvg and GPFL as hand-written loops, beside which `cpu.py` times our engines.

`PlainLoop` is written in the manner of the usual libraries: one client after another, each with a deep copy of the model, a
DataLoader, torch.optim.SGD, and an evaluation in batches of the training batch size. `TightLoop` computes the same with as few
calls as eager PyTorch allows: indexed batches, one `autograd.grad` and one `_foreach_add_` per step, one model for all clients,
one pass per client to evaluate. Both train GPFL's valve entry by entry.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


@dataclass(frozen=True)
class Problem:
    """The samples of all clients, the parts of a net, and the hyperparameters."""

    x: Tensor
    y: Tensor
    train: list[np.ndarray]  # indices by client
    test: list[np.ndarray]
    base: nn.Module
    head: nn.Module
    width: int
    classes: int
    method: str  # "fedavg" or "gpfl"
    lr: float
    batch_size: int
    lam: float = 0.0
    mu: float = 0.0

    def alpha(self, client: int) -> Tensor:
        """Return the fraction of each class in a client's training samples."""
        counts = torch.bincount(self.y[self.train[client]], minlength=self.classes).float()
        return counts / counts.sum()


class Branch(nn.Module):
    """One of the two functions of GPFL's valve."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, context: Tensor) -> Tensor:
        return self.norm(torch.relu(self.linear(context)))


class Valve(nn.Module):
    """GPFL's conditional valve."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = Branch(width), Branch(width)

    def forward(self, features: Tensor, context: Tensor) -> Tensor:
        return torch.relu((self.gamma(context) + 1) * features + self.beta(context))


class Parts(nn.Module):
    """What a client trains: base and head, for GPFL also the valve and the category embeddings."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.base, self.head = copy.deepcopy(problem.base), copy.deepcopy(problem.head)
        if problem.method == "gpfl":
            self.valve = Valve(problem.width)
            self.embeddings = nn.Embedding(problem.classes, problem.width)

    def loss(self, x: Tensor, y: Tensor, problem: Problem, contexts: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        """Return the loss of a batch; `contexts` are GPFL's received embeddings, g and p."""
        features = self.base(x)
        if contexts is None:
            return F.cross_entropy(self.head(features), y)
        received, g, p = contexts
        general = self.valve(features, g)
        cosine = F.normalize(general) @ F.normalize(self.embeddings.weight).T
        distance = torch.norm(general - received[y])
        return F.cross_entropy(self.head(self.valve(features, p)), y) + F.cross_entropy(cosine, y) + problem.lam * distance

    def forward(self, x: Tensor, p: Tensor | None) -> Tensor:
        """Return the logits of the personal model."""
        features = self.base(x)
        return self.head(features if p is None else self.valve(features, p))

    def shared(self) -> list[nn.Parameter]:
        """Return the parameters that clients upload: with GPFL all but the head."""
        return [p for name, p in self.named_parameters() if not (hasattr(self, "valve") and name.startswith("head."))]

    def contexts(self, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return GPFL's embeddings as they are now with the contexts g and p; None for FedAvg."""
        if not hasattr(self, "valve"):
            return None
        received = self.embeddings.weight.detach().clone()
        return received, received.mean(0), alpha @ received


class PlainLoop:
    """One client after another, each with its own model, DataLoader and optimizers."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.server = Parts(problem)
        self.clients = [PlainClient(problem, self.server, index) for index in range(len(problem.train))]

    def run_round(self) -> float:
        """Train every client, average, and return the accuracy of the personal models."""
        for client in self.clients:
            client.receive(self.server)
            client.train()
        total = sum(client.n_train for client in self.clients)
        for parameter in self.server.shared():
            parameter.data.zero_()
        for client in self.clients:
            for parameter, own in zip(self.server.shared(), client.model.shared(), strict=True):
                parameter.data += own.data.clone() * (client.n_train / total)
        for client in self.clients:
            client.receive(self.server)
        correct, count = zip(*(client.evaluate() for client in self.clients), strict=True)
        return sum(correct) / sum(count)


class PlainClient:
    """A client with a copy of the model."""

    def __init__(self, problem: Problem, server: Parts, index: int) -> None:
        self.problem, self.alpha = problem, problem.alpha(index)
        self.model = copy.deepcopy(server)
        train, test = problem.train[index], problem.test[index]
        self.n_train = len(train)
        self.train_set = TensorDataset(problem.x[train], problem.y[train])
        self.test_set = TensorDataset(problem.x[test], problem.y[test])
        net = [*self.model.base.parameters(), *self.model.head.parameters()]
        self.optimizers = [torch.optim.SGD(net, lr=problem.lr)]
        if problem.method == "gpfl":
            self.optimizers += [
                torch.optim.SGD(part.parameters(), lr=problem.lr, weight_decay=problem.mu)
                for part in (self.model.valve, self.model.embeddings)
            ]
        self.contexts: tuple[Tensor, Tensor, Tensor] | None = None

    def receive(self, server: Parts) -> None:
        for own, parameter in zip(self.model.shared(), server.shared(), strict=True):
            own.data = parameter.data.clone()
        self.contexts = self.model.contexts(self.alpha)

    def train(self) -> None:
        self.model.train()
        drop_last = self.n_train >= self.problem.batch_size
        for x, y in DataLoader(self.train_set, self.problem.batch_size, shuffle=True, drop_last=drop_last):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.model.loss(x, y, self.problem, self.contexts).backward()
            for optimizer in self.optimizers:
                optimizer.step()

    @torch.no_grad()
    def evaluate(self) -> tuple[int, int]:
        self.model.eval()
        correct = count = 0
        for x, y in DataLoader(self.test_set, self.problem.batch_size):
            output = self.model(x, None if self.contexts is None else self.contexts[2])
            correct += int((output.argmax(1) == y).sum().item())
            count += len(y)
        return correct, count


class TightLoop:
    """One client after another in one model, with as few calls as eager PyTorch allows."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.model = problem, Parts(problem)
        self.parameters = list(self.model.parameters())
        decayed = [*self.model.valve.parameters(), *self.model.embeddings.parameters()] if problem.method == "gpfl" else []
        self.decayed = [i for i, p in enumerate(self.parameters) if any(p is each for each in decayed)]
        self.alphas = [problem.alpha(client) for client in range(len(problem.train))]
        self.server = [p.detach().clone() for p in self.model.shared()]
        self.head = list(self.model.head.parameters()) if problem.method == "gpfl" else []
        self.heads = [[p.detach().clone() for p in self.head] for _ in self.alphas]
        sizes = [len(each) for each in problem.train]
        self.weights = [size / sum(sizes) for size in sizes]
        self._rng = np.random.default_rng(0)

    def run_round(self) -> float:
        """Train every client, average, and return the accuracy of the personal models."""
        shared, mean = self.model.shared(), [torch.zeros_like(p) for p in self.server]
        for client, weight in enumerate(self.weights):
            contexts = self._load(client, shared)
            self._train(client, contexts)
            with torch.no_grad():
                torch._foreach_add_(mean, [p.detach() for p in shared], alpha=weight)
                if self.head:
                    torch._foreach_copy_(self.heads[client], self.head)
        self.server = mean
        return sum(self._correct(client, shared) for client in range(len(self.alphas))) / sum(map(len, self.problem.test))

    def _load(self, client: int, shared: list[nn.Parameter]) -> tuple[Tensor, Tensor, Tensor] | None:
        with torch.no_grad():
            torch._foreach_copy_(shared, self.server)
            if self.head:
                torch._foreach_copy_(self.head, self.heads[client])
        return self.model.contexts(self.alphas[client])

    def _train(self, client: int, contexts: tuple[Tensor, Tensor, Tensor] | None) -> None:
        problem, indices = self.problem, torch.from_numpy(self._rng.permutation(self.problem.train[client]))
        for batch in indices.split(problem.batch_size):
            if len(batch) < problem.batch_size <= len(indices):
                break
            loss = self.model.loss(problem.x[batch], problem.y[batch], problem, contexts)
            gradients = list(torch.autograd.grad(loss, self.parameters))
            with torch.no_grad():
                if self.decayed:
                    decayed = [self.parameters[i] for i in self.decayed]
                    torch._foreach_add_([gradients[i] for i in self.decayed], decayed, alpha=problem.mu)
                torch._foreach_add_(self.parameters, gradients, alpha=-problem.lr)

    @torch.no_grad()
    def _correct(self, client: int, shared: list[nn.Parameter]) -> int:
        contexts, test = self._load(client, shared), torch.from_numpy(self.problem.test[client])
        output = self.model(self.problem.x[test], None if contexts is None else contexts[2])
        return int((output.argmax(1) == self.problem.y[test]).sum())
