"""What is attacked: the cases of an attack, and the options that select them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpfl.core.net import Net
from gpfl.core.options import option
from gpfl.federation import Federation
from gpfl.privacy.reconstruction import ATTACKS, AttackConfig
from gpfl.privacy.uploads import ROUNDS, STEPS, AttackedBatch, check_batch_size, check_images, choose_batches

PSNR_FORMULAS = ("proper", "reference")  # peak 1 for pixels from 0 to 1, or the formula of the authors' code


@dataclass(frozen=True)
class AttackCase:
    """One attack on the uploads of one method."""

    method: str
    target: str
    kind: str  # one of reconstruction.ATTACKS
    round: str  # one of uploads.ROUNDS
    steps: str  # one of uploads.STEPS
    batch: int

    @property
    def file_name(self) -> str:
        """Name of the case's file."""
        return "-".join((self.method, self.target, self.kind, f"round-{self.round}", self.steps, f"batch-{self.batch}"))

    @property
    def training(self) -> str:
        """Length of the local training as text."""
        return "one step" if self.steps == "one" else "one epoch"

    @property
    def setting(self) -> str:
        """Round, local training and batch size as text."""
        return f"{'round 0' if self.round == '0' else 'best round'}, {self.training}, batch {self.batch}"

    @property
    def description(self) -> str:
        """The case as text."""
        return f"{self.method} {self.target}, {self.kind}, {self.setting}"


@dataclass(frozen=True, kw_only=True)
class AttackPlan(AttackConfig):
    """The attacks on each target of a method, and their effort. Commands have a flag for each option."""

    kind: tuple[str, ...] = option(("geiping",), "the paper's dlg, or geiping, which is stronger", choices=ATTACKS)
    batch: tuple[int, ...] = option((1,), "images in one upload, such as 1 or 1,4", min=1)
    steps: tuple[str, ...] = option(("one",), "local training: one step on these images, or an epoch", choices=STEPS)
    round: tuple[str, ...] = option(("0",), "untrained models (0) or those of the selected round (best)", choices=ROUNDS)
    psnr: str = option("proper", "with peak 1 (proper) or by the authors' formula (reference)", choices=PSNR_FORMULAS)
    images: int = option(20, "images to reconstruct", min=1)

    def cases(self, method: str, targets: Iterable[str], kind: str) -> list[AttackCase]:
        """Return the cases of one of the attacks on a method."""
        combinations = itertools.product(targets, self.round, self.batch, self.steps)
        return [AttackCase(method, target, kind, when, steps, batch) for target, when, batch, steps in combinations]

    def choose_batches(self, federation: Federation, net: Net, clients: Sequence[int]) -> dict[int, list[AttackedBatch]]:
        """Return the batches by size, the smallest of which is that of the ceiling. Raise if they cannot be attacked."""
        check_images(federation)
        batches = choose_batches(federation, clients, self.images, sorted({net.min_batch, *self.batch}), self.seed)
        if "one" in self.steps:
            check_batch_size(net, min(self.batch))
        return batches
