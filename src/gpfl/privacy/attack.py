"""Attacks on uploads: what is rebuilt of victims' images, measured beside what needs no attack, and kept case by case."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.local_round import Schedule
from gpfl.core.method import Setup
from gpfl.core.options import option_values
from gpfl.core.randomness import MAX_SEED
from gpfl.defences import Defended, undefended
from gpfl.engine import Engine, matmul_precision
from gpfl.engine.base import RunSpec
from gpfl.engine.loop import Loop
from gpfl.errors import GpflError, did_you_mean
from gpfl.io.tensors import checksum, read_tensors, write_tensors
from gpfl.methods import METHODS
from gpfl.privacy import dlg, geiping, measures
from gpfl.privacy.gradient_targets import GradientTarget
from gpfl.privacy.label_inference import guess_labels
from gpfl.privacy.matching import Key, Matching, cotangent, cross_entropy, gradients_of, squares, start_images, start_outputs
from gpfl.privacy.server_view import ServerView, view_of
from gpfl.privacy.victims import Victim, images_of, mean_image, uploads_of
from gpfl.training.run_dir import RunState

KINDS = ("dlg", "geiping")
CPU = torch.device("cpu")
COPIES = 16
"""Gradients of one victim that an attack holds at once, about."""

FORM = 3
"""The form of a kept case. Those of another are attacked again: they lack measures, or were made by another attack."""

Record = dict[str, object]
"""What is known of one rebuilt image."""


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """How hard an attack tries."""

    iterations: int = 2000
    restarts: int = 2
    seed: int = 0
    at_once: int = 0  # victims times restarts that are attacked at once; 0 = as many as fit
    graph: bool = False  # on a GPU: steps as a captured graph

    def __post_init__(self) -> None:
        for name, least, most in (
            ("iterations", 1, None),
            ("restarts", 1, None),
            ("seed", 0, MAX_SEED),
            ("at_once", 0, None),
        ):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                raise GpflError(
                    f"--{name.replace('_', '-')} is {value}; it must be at least {least}{f', at most {most}' if most else ''}"
                )


@dataclass(frozen=True)
class Case:
    """One attack: on what of which method, made how, at which round, from what."""

    method: str
    target: str
    kind: str
    round: str  # one of victim.ROUNDS
    steps: str  # one of victim.STEPS
    batch: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return "-".join((self.method, self.target, self.kind, f"round-{self.round}", self.steps, f"batch-{self.batch}"))

    @property
    def words(self) -> str:
        """The case in words."""
        training = "one step" if self.steps == "one" else "one epoch"
        when = "round 0" if self.round == "0" else "best round"
        return f"{self.method} {self.target}, {self.kind}, {when}, {training}, batch {self.batch}"


class Rebuilt(NamedTuple):
    """What an attack gives for each victim: images, how far their gradients are from the upload's, and where it started."""

    images: Tensor  # (victims, rows, channels, height, width)
    far: Tensor  # (victims,)
    logits: Tensor  # of the images at the start of the restart that was kept


class Kept(NamedTuple):
    """A finished case: its records, and its images in pixels from 0 to 1, (images, channels, height, width)."""

    records: list[Record]
    true: Tensor
    found: Tensor  # as they are measured under either sign: those whose record says "turned" as their negative


# The attack itself: it is given what the server sees, and nothing else.


def rebuild(
    seen: Sequence[ServerView], target: str, kind: str, shape: Sequence[int], keys: Sequence[Key], effort: AttackConfig
) -> Rebuilt:
    """Gives what an attack rebuilds of each upload; all must have been sent the same. Of the restarts the gradient decides.

    `shape` is that of one victim's images, `keys` name the starts.
    """
    if kind not in KINDS:
        raise GpflError(f"unknown attack '{kind}'; {did_you_mean(kind, KINDS)}")
    method = seen[0].method
    view = view_of(method, target)
    wanted = gradients_of(seen, view)
    matching = Matching(method.net, view, seen[0].known, squares)
    labels = labels_of(seen, view) if kind == "geiping" else None
    tries = [(victim, restart) for victim in range(len(seen)) for restart in range(effort.restarts)]
    width = effort.at_once or fitting(wanted, matching.known)
    parts = []
    for first in range(0, len(tries), width):
        chosen = tries[first : first + width]
        places = torch.tensor([victim for victim, _ in chosen], device=next(tree.leaves(wanted)).device)
        names = [(*keys[victim], restart) for victim, restart in chosen]
        logits = start_images(shape, names, effort.seed).to(places.device)
        told = None if labels is None else labels[places]
        parts.append((*tried(matching, kind, tree.take(wanted, places), logits, names, told, effort), logits))
    images, far, logits = (torch.cat(values) for values in zip(*parts, strict=True))
    far = torch.nan_to_num(far, nan=torch.inf).reshape(len(seen), effort.restarts)
    best = far.argmin(1)
    places = torch.arange(len(seen), device=far.device)

    def pick(values: Tensor) -> Tensor:
        return values.reshape(len(seen), effort.restarts, *shape)[places, best]

    images, far = pick(images), far[places, best]
    if kind == "geiping" and labels is None and shape[0] == 1:  # in batches each image has a sign of its own, and none is found
        images, far = settled(matching, wanted, images, far, width, effort)
    return Rebuilt(images, far, pick(logits))


def labels_of(seen: Sequence[ServerView], view: GradientTarget) -> Tensor | None:
    """Gives the labels that uploads tell (victims, rows), where the loss on the view's output is known and they tell them."""
    told = [guess_labels(one) for one in seen] if view.knows_loss else [None]
    known = [labels for labels in told if labels is not None]
    return torch.stack(known) if len(known) == len(told) else None


def tried(
    matching: Matching,
    kind: str,
    wanted: tree.Tree,
    logits: Tensor,
    names: Sequence[Key],
    labels: Tensor | None,
    effort: AttackConfig,
) -> tuple[Tensor, Tensor]:
    """Gives images and distances of tries that run at once."""
    images = torch.sigmoid(logits)
    with torch.no_grad():
        outputs = torch.func.vmap(matching.output_like)(images)
    if kind == "dlg":
        drawn = start_outputs(outputs.shape[1:], names, effort.seed).to(logits.device)
        return dlg.invert(matching, wanted, logits, drawn, dlg.DLG(iterations=effort.iterations, graph=effort.graph))
    how = geiping.Geiping(iterations=effort.iterations, graph=effort.graph)
    if labels is None:
        return geiping.invert_freely(dataclasses.replace(matching, pairing=cotangent), wanted, images, how)
    shares = (labels[..., None] == torch.arange(outputs.shape[-1], device=logits.device)).to(logits.dtype)
    return geiping.invert(dataclasses.replace(matching, pairing=cross_entropy), wanted, images, shares, False, how)


def settled(
    matching: Matching, wanted: tree.Tree, images: Tensor, far: Tensor, width: int, effort: AttackConfig
) -> tuple[Tensor, Tensor]:
    """Gives found images and their distances once the negative of each has been tried too, so many at once."""
    free = dataclasses.replace(matching, pairing=cotangent)
    how = geiping.Geiping(iterations=effort.iterations, graph=effort.graph)
    spans = torch.split(torch.arange(len(images), device=images.device), width)
    parts = [geiping.settle_sign(free, tree.take(wanted, span), images[span], far[span], how) for span in spans]
    found, away = zip(*parts, strict=True)
    return torch.cat(found), torch.cat(away)


def fitting(wanted: tree.Tree, known: tree.Tree) -> int:
    """Gives how many tries run at once: on a GPU as many as half of its free memory holds, else a few."""
    device = tree.device_of(known) or torch.device("cpu")
    if device.type != "cuda":
        return 16
    each = tree.count_bytes(tree.take(wanted, 0)) * COPIES + (64 << 20)
    free, _ = torch.cuda.mem_get_info(device)
    return int(max(1, min(1024, free // 2 // each)))


# Cases: victims are trained, attacked, measured and kept.


class AttackRunner:
    """Victims of one run, attacked in cases; finished cases of a folder are not attacked again."""

    def __init__(
        self, engine: Engine, states: Mapping[str, RunState], victims: Mapping[int, list[Victim]], effort: AttackConfig
    ) -> None:
        self.engine, self.states, self.victims, self.effort = engine, states, victims, effort
        self.sent = {which: checksum(tree.flatten(tree.to(state.shared, CPU)), {}) for which, state in states.items()}
        self.rounds: dict[str, dict[int, ServerView]] = {which: {} for which in states}  # whole rounds of clients
        self.setting = RunSpec(engine.method, engine.federation, engine.schedule)  # in float32, whatever the run was in

    def attack(self, cases: Sequence[Case], folder: Path | None, tell: Callable[[Case, Kept], None]) -> dict[Case, Kept]:
        """Gives all cases; those that differ only in their steps are attacked at once."""
        done: dict[Case, Kept] = {}
        for case in cases:
            if case in done:
                continue
            twins = [other for other in cases if dataclasses.replace(other, steps=case.steps) == case]
            held = {twin: self.held(twin, folder) for twin in twins}
            left = [twin for twin in twins if held[twin] is None]
            fresh = self.run(left) if left else {}
            for twin in twins:
                kept = held[twin] or fresh[twin]
                done[twin] = kept
                if twin in fresh and folder is not None:
                    keep(folder, twin, kept, self.settings(twin))
                tell(twin, kept)
        return done

    def run(self, cases: Sequence[Case]) -> dict[Case, Kept]:
        """Gives cases that differ in their steps alone."""
        first = cases[0]
        victims, state = self.victims[first.batch], self.states[first.round]
        true = images_of(self.engine.federation, victims)
        trained = self.rounds[first.round]
        with matmul_precision(self.setting.precision):
            seen = [one for case in cases for one in uploads_of(self.engine, state, victims, case.steps, trained)]
        keys = [(victim.rows[0], len(victim.rows)) for _ in cases for victim in victims]
        began = time.perf_counter()
        with matmul_precision(self.setting.precision):
            rebuilt = rebuild(seen, first.target, first.kind, true.shape[1:], keys, self.effort)
        if true.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / len(seen)
        out = {}
        for place, case in enumerate(cases):
            span = slice(place * len(victims), (place + 1) * len(victims))
            out[case] = self.measured(case, Rebuilt(*(values[span] for values in rebuilt)), true, seconds)
        return out

    def measured(self, case: Case, rebuilt: Rebuilt, true: Tensor, seconds: float) -> Kept:
        """Gives the records of a case, each true image beside the rebuilt one that it is assigned.

        All is measured as found and under either sign, what was rebuilt and the floors by the same rule.
        """
        truth = true.flatten(0, 1)
        guesses = {"": rebuilt.images, "start_": torch.sigmoid(rebuilt.logits), "mean_": self.blank.expand_as(true)}
        plain = {name: measures.matched(true, images) for name, images in guesses.items()}
        either = {f"either_{name}": measures.matched(true, images, either=True) for name, images in guesses.items()}
        found, turned = either["either_"]
        numbers = {
            f"{name}{measure.__name__}": measure(truth, shown.images)
            for name, shown in {**plain, **either}.items()
            for measure in (measures.psnr, measures.ssim)
        }
        numbers |= {
            "reference_psnr": measures.reference_psnr(truth, plain[""].images),
            "reference_start": measures.untouched_reference(truth, rebuilt.logits.flatten(0, 1)),
            "gradient_distance": rebuilt.far.repeat_interleave(case.batch),
        }
        columns = {name: values.double().cpu().tolist() for name, values in numbers.items()}
        rows = [(victim.client, row) for victim in self.victims[case.batch] for row in victim.rows]
        labels = self.engine.federation.table.y
        records: list[Record] = [
            {
                **dataclasses.asdict(case),
                "client": self.engine.federation.shards[client].name,
                "row": row,
                "label": int(labels[row]),
                **{name: values[place] for name, values in columns.items()},
                "turned": bool(turned[place]),
                "seconds": seconds,
            }
            for place, (client, row) in enumerate(rows)
        ]
        return Kept(records, truth.cpu(), found.cpu())

    @functools.cached_property
    def blank(self) -> Tensor:
        """The mean image of the data."""
        return mean_image(self.engine.federation)

    def settings(self, case: Case) -> dict[str, object]:
        """Gives what a case depends on, by which a kept one is known to be the same."""
        facts, method = {"form": FORM, **dataclasses.asdict(self.effort)}, self.engine.method
        for name in ("at_once", "graph"):
            facts.pop(name)
        rows = [list(victim.rows) for victim in self.victims[case.batch]]
        known = {**dataclasses.asdict(case), **facts, "sent": self.sent[case.round], "rows": rows, "lr": method.lr}
        known |= {"options": option_values(undefended(method)), "data": self.engine.federation.table.digest}
        if isinstance(method, Defended):
            known["defence"] = {**option_values(method.defence), "salt": method.salt, "crowd": method.min_clients}
        return {**known, **self.unusual(case)}

    def unusual(self, case: Case) -> dict[str, object]:
        """Gives what else changes an upload, as far as it is not as usual: cases of usual runs are found as they were kept."""
        method, schedule = self.engine.method, self.engine.schedule
        facts: dict[str, tuple[object, object]] = {"batch_norm": (method.batch_norm, Setup.batch_norm)}
        if case.steps == "epoch":
            facts["epochs"] = (method.epochs, Setup.epochs)
            for name in ("batch_size", "shuffle", "drop_last"):
                facts[name] = (getattr(schedule, name), getattr(Schedule, name))
        return {name: value for name, (value, usual) in facts.items() if value != usual}

    def held(self, case: Case, folder: Path | None) -> Kept | None:
        """Gives a case that a folder holds, if it was attacked under the same settings."""
        path = None if folder is None else case_file(folder, case)
        if path is None or not path.is_file():
            return None
        flat, facts = read_tensors(path)
        if facts.get("settings") != json.loads(json.dumps(self.settings(case))):
            return None
        records = cast(list[Record], facts["records"])
        return Kept(records, flat["true"].to(torch.float32) / 255, flat["found"].to(torch.float32) / 255)


def keep(folder: Path, case: Case, kept: Kept, settings: Mapping[str, object]) -> None:
    """Writes a finished case: records as they are, images in bytes."""
    pictures = {"true": kept.true, "found": kept.found}
    flat = {name: (values.clamp(0, 1) * 255).round().to(torch.uint8) for name, values in pictures.items()}
    write_tensors(case_file(folder, case), flat, {"settings": dict(settings), "records": kept.records})


def case_file(folder: Path, case: Case) -> Path:
    """Gives the file of a case."""
    return folder / "cases" / f"{case.name}.safetensors"


def ceiling_of(
    engine: Engine, victims: Mapping[int, list[Victim]], kind: str, effort: AttackConfig
) -> tuple[AttackRunner, Case]:
    """Gives what an attack can reach at best: FedAvg's untrained net, one step on the smallest batch, whole model.

    It has the run's net, data, seed and learning rate, whatever its method.
    """
    method = engine.method
    plain = METHODS["fedavg"]().bind(method.net, lr=method.lr, epochs=method.epochs, batch_norm=method.batch_norm)
    other = Loop(RunSpec(plain, engine.federation, engine.schedule, engine.class_counts))
    shared, private = plain.init(engine.schedule.seed)
    everyone = tree.repeat(private, len(engine.federation))
    state = RunState(0, tree.to(shared, engine.device), tree.to(everyone, engine.device))
    return AttackRunner(other, {"0": state}, victims, effort), Case("fedavg", "model", kind, "0", "one", min(victims))
