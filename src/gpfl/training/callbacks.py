"""Callbacks: user code at fixed points of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gpfl.training.run_dir import MetricsRecord


class RunInfo(NamedTuple):
    """What is known of a run when it starts."""

    method: str
    rounds: int
    start_round: int  # above 0 if the run is resumed
    path: Path | None
    notes: tuple[str, ...]  # what the defence guarantees and what weakens it, in sentences


class Callback:
    """Base class of callbacks, whose hooks do nothing. Override those you need.

    With several processes, the hooks run in each of them.

    Example:
        class PrintLoss(gpfl.Callback):
            def on_evaluate(self, record):
                print(record["round"], record["loss"])

        gpfl.fit("gpfl", federation, callbacks=[PrintLoss()])

    """

    def on_run_start(self, run: RunInfo) -> None:
        """Handle the start of a run, or of its resumption."""

    def on_round_end(self, round: int, losses: Mapping[str, float]) -> None:
        """Handle the end of a training round; `round` counts from 1, `losses` are means over the round's clients."""

    def on_evaluate(self, record: MetricsRecord) -> None:
        """Handle an evaluation, given as in metrics.jsonl. Round 0 is the evaluation before training."""

    def on_checkpoint(self, path: Path) -> None:
        """Handle a written checkpoint."""

    def on_run_end(self, summary: Mapping[str, object]) -> None:
        """Handle the end of a run that neither diverged nor was interrupted."""
