"""What a run gives: curves, numbers, and a model for each client, also for one that was not there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gpfl.core import options, tree
from gpfl.core.local_round import local_round
from gpfl.core.method import NET_PARTS, Method
from gpfl.core.net import InputSpec, Model, Net
from gpfl.core.tree import Tree
from gpfl.data.arrays import ArrayLike, read_samples
from gpfl.data.table import Table
from gpfl.defences import undefended
from gpfl.engine import Engine, matmul_precision
from gpfl.errors import GpflError
from gpfl.federation.federation import Federation
from gpfl.io.tensors import write_tensors
from gpfl.training.round_loop import RunOutcome
from gpfl.training.run_dir import MetricsRecord

BLOCK = 1024
"""Rows predicted at once."""


class ClientModel:
    """One client's own model. Rows are given in the form the data has them: floats, or whole-numbered pixels."""

    def __init__(self, method: Method, weights: Tree, name: str, form: InputSpec) -> None:
        self.method, self.weights, self.name, self.input_spec = method, weights, name, form

    def __repr__(self) -> str:
        net = self.method.net
        return f"ClientModel '{self.name}' ({self.method.name}, {net.name}, {net.classes} classes)"

    def logits(self, x: ArrayLike) -> npt.NDArray[np.float32]:
        """Gives the scores (rows, classes)."""
        rows = read_samples(x, self.input_spec, "x")
        device = next(tree.leaves(self.weights)).device
        model = Model(self.method.net, self.weights)
        with torch.no_grad(), matmul_precision("float32"):
            blocks = [self.method.logits(model, self.input_spec.to_net(part.to(device))) for part in torch.split(rows, BLOCK)]
        return torch.cat(blocks).cpu().numpy()

    def predict(self, x: ArrayLike) -> npt.NDArray[np.int64]:
        """Gives the class of each row."""
        classes: npt.NDArray[np.int64] = np.argmax(self.logits(x), axis=1)
        return classes

    def accuracy(self, x: ArrayLike, y: ArrayLike) -> float:
        """Gives the share of rows that it classifies rightly."""
        labels, decisions = np.asarray(y), self.predict(x)
        if labels.shape != decisions.shape:
            raise GpflError(f"x has {len(decisions)} rows, y has shape {labels.shape}; give one label a row")
        return float((decisions == labels).mean())

    def module(self) -> nn.Module:
        """Gives a plain module on the CPU with this client's weights: inputs as the net takes them in, scores out."""
        return PersonalModule(self.method, tree.to(self.weights, torch.device("cpu"))).eval()

    def probe(self) -> list[list[float]]:
        """Gives the scores of the form's probe, by which `gpfl.load_model` knows a net that is not this model's."""
        with torch.no_grad():
            scores: list[list[float]] = self.module()(self.input_spec.probe()).tolist()
        return scores

    def save(self, path: str | Path) -> None:
        """Writes the model as one safetensors file, which `gpfl.load_model` reads."""
        net = self.method.net
        facts = {
            "client": self.name,
            "method": {"name": self.method.name, **options.option_values(self.method)},
            "net": {"name": net.name, **net.options},
            "classes": net.classes,
            "form": dataclasses.asdict(self.input_spec),
            "branches": list(self.weights),
            "probe": self.probe(),
        }
        write_tensors(Path(path), tree.flatten(self.weights), facts)


class PersonalModule(nn.Module):
    """A client's model as a module: the net's parts are submodules, what else the method needs are buffers."""

    def __init__(self, method: Method, weights: Tree) -> None:
        super().__init__()
        mismatch = method.net.mismatch(weights)
        if mismatch:
            raise GpflError(f"the weights are not those of net '{method.net.name}': {mismatch}")
        stats = tree.branch(weights, "batch_norm_stats") if "batch_norm_stats" in weights else {}
        parts = {part: method.net.make_module(part) for part in NET_PARTS}
        for part, module in parts.items():
            state = {**tree.branch(weights, part), **(tree.branch(stats, part) if part in stats else {})}
            # The names are right; those that are missing are constants, which the copy has.
            module.load_state_dict(cast(dict[str, Tensor], state), strict=False)
            self.add_module(part, module)
        self._method = method.replace(net=method.net.with_parts(parts))
        others = tree.drop(weights, (*NET_PARTS, "batch_norm_stats"))
        extra = tree.flatten(others)
        self._branches = tuple(others)  # one without a tensor leaves no trace in buffers
        self._buffer_names = {path: path.replace(tree.SEPARATOR, "_").replace(".", "_") for path in extra}
        for path, value in extra.items():
            self.register_buffer(self._buffer_names[path], value.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Gives the scores (rows, classes)."""
        extra = tree.unflatten({path: self.get_buffer(name) for path, name in self._buffer_names.items()})
        weights: Tree = {**{branch: {} for branch in self._branches}, **extra}
        return self._method.logits(LiveModel(self._method.net, weights, self), x)


class LiveModel(Model):
    """A model whose parts are a module's own submodules, so that gradients, hooks and exporters see them."""

    def __init__(self, net: Net, weights: Tree, owner: nn.Module) -> None:
        super().__init__(net, weights)
        self.owner = owner

    def __call__(self, part: str, x: Tensor, weights: Tree | None = None) -> Tensor:
        """Gives the output of a part."""
        if weights is not None:
            return super().__call__(part, x, weights)
        out: Tensor = self.owner.get_submodule(part)(x)
        return out


@dataclass(frozen=True)
class Result:
    """A finished run."""

    engine: Engine
    outcome: RunOutcome

    def __repr__(self) -> str:
        s = self.summary
        return f"Result of {s['method']} on {s['data']}: {self.accuracy:.2%} after round {s['selected_round']} of {s['rounds']}"

    @property
    def summary(self) -> dict[str, object]:
        """The content of summary.json."""
        return self.outcome.summary

    @property
    def history(self) -> list[MetricsRecord]:
        """The evaluated rounds, as in metrics.jsonl."""
        return self.outcome.lines

    @property
    def accuracy(self) -> float:
        """The test accuracy of the models in `clients`: of the last round, or of the one that validation rows selected."""
        return cast(float, self.summary["selected_accuracy"])

    @property
    def best_accuracy(self) -> float:
        """The best test accuracy of any round, as papers report it: chosen by looking at the test rows."""
        return cast(float, self.summary["best_accuracy"])

    @property
    def federation(self) -> Federation:
        """The federation it was trained on."""
        return self.engine.federation

    @cached_property
    @matmul_precision("float32")
    def clients(self) -> list[ClientModel]:
        """Each client's own model."""
        engine, state = self.engine, self.outcome.selected
        facts = engine.client_info(range(len(engine.federation)), state.round)
        models = []
        for place, shard in enumerate(engine.federation.shards):
            rows = engine.adaptation_indices(place)
            adapt = engine.federation.table.batch(rows[rows >= 0])
            own = tree.to(tree.take(state.private, place), engine.device)
            models.append(
                self._model(engine.method.personal_weights(state.shared, own, adapt, facts.select(place)), shard.name)
            )
        return models

    def export(self, folder: str | Path) -> list[Path]:
        """Writes every client's model and gives the files."""
        paths = []
        for client in self.clients:
            path = Path(folder) / f"client-{safe_name(client.name)}.safetensors"
            client.save(path)
            paths.append(path)
        return paths

    @matmul_precision("float32")
    def personalize(self, x: ArrayLike, y: ArrayLike, *, rounds: int = 20, name: str = "new") -> ClientModel:
        """Gives a client that was not in training its own model.

        It starts from the shared state and the common private start, and runs `rounds` local rounds whose uploads
        nobody averages: what is shared stays as the others made it, what is private becomes its own.
        """
        if not isinstance(rounds, int) or rounds < 0:
            raise GpflError(f"rounds is {rounds}; it must be a whole number, at least 0")
        engine, state = self.engine, self.outcome.selected
        method, schedule, known = engine.method, engine.schedule, engine.federation.table
        form = known.input_spec
        table = Table(
            read_samples(x, form, f"client {name}"),
            y,
            classes=known.classes,
            name=f"client {name}",
            kind=form.kind,
            pixel_max=form.pixel_max,
            vocabulary=form.vocabulary,
        ).to(engine.device)
        rows = np.arange(len(table))
        schedule.check_batch_size(method, len(rows), name)
        private = tree.to(method.init(schedule.seed)[1], engine.device)
        for number in range(state.round, state.round + rounds):
            plan = schedule.plan(method.phases(), rows, number, len(engine.federation))
            update = local_round(method, state.shared, private, table, plan, engine.unseen_client_info(table, number))
            if not all(bool(torch.isfinite(value)) for value in update.terms.values()):
                raise GpflError(
                    f"the loss of client {name} is not a number after {number - state.round} rounds: check the rows"
                )
            private = update.private
        first = torch.from_numpy(schedule.batches(rows)[0]).to(engine.device)
        client = engine.unseen_client_info(table, state.round + rounds)
        return self._model(method.personal_weights(state.shared, private, table.batch(first[first >= 0]), client), name)

    def _model(self, weights: Tree, name: str) -> ClientModel:
        return ClientModel(undefended(self.engine.method), weights, name, self.engine.federation.table.input_spec)


def safe_name(name: str) -> str:
    """Gives a client's name as part of a file's name; other names give other files."""
    return quote(name, safe="")
