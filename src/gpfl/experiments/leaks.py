"""Label distribution and membership inference on finished runs, method by method."""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from gpfl.io import files
from gpfl.privacy.label_inference import LabelInference, infer_label_distributions
from gpfl.privacy.membership import MembershipInference, infer_memberships
from gpfl.privacy.uploads import ROUNDS, state_at
from gpfl.training.result import Result

_VERSION = 2  # version of saved findings; those of another are computed again


@dataclass(frozen=True)
class InferenceFindings:
    """What the uploads and personal models of one run reveal of all its clients."""

    method: str
    round: int  # the selected round
    selected_by: str
    accuracy: float  # test accuracy at that round
    clients: int
    labels: Mapping[str, Sequence[LabelInference]]  # by round
    members: Sequence[MembershipInference]  # at the selected round


def infer_from_runs(
    runs: Mapping[Path, Callable[[], Result]], folder: Path, on_result: Callable[[InferenceFindings], None]
) -> list[InferenceFindings]:
    """Return the findings of run folders; those that `folder` holds of the same runs are reused."""
    results = []
    for run, load in runs.items():
        path, run_id = folder / "cache" / f"{run.parent.name}-{run.name}.json", _run_id(run)
        findings = _read_saved(path, run_id)
        if findings is None:
            findings = _infer(load())
            files.write_text(path, json.dumps({"run_id": run_id, **asdict(findings)}, allow_nan=False))
        on_result(findings)
        results.append(findings)
    return results


def _infer(result: Result) -> InferenceFindings:
    engine, clients, summary = result.engine, range(len(result.federation)), result.summary
    return InferenceFindings(
        method=engine.method.name,
        round=cast(int, summary["selected_round"]),
        selected_by=str(summary["selected_by"]),
        accuracy=cast(float, summary["selected_accuracy"]),
        clients=len(clients),
        labels={round_: infer_label_distributions(engine, state_at(result, round_), clients) for round_ in ROUNDS},
        members=infer_memberships(engine, state_at(result, "best"), clients),
    )


def _run_id(run: Path) -> str:
    """Return an identifier that changes when another run takes the folder."""
    return f"{_VERSION}-{zlib.crc32((run / 'summary.json').read_bytes()):08x}"


def _read_saved(path: Path, run_id: str) -> InferenceFindings | None:
    values = files.read_json(path, "delete it to infer again") if path.exists() else {}
    return parse_findings(values) if values.pop("run_id", "") == run_id else None


def parse_findings(values: Mapping[str, object]) -> InferenceFindings:
    """Return findings from the values of a JSON object."""
    content = cast(Mapping[str, Any], values)
    labels = {round_: [LabelInference(**each) for each in clients] for round_, clients in content["labels"].items()}
    members = [MembershipInference(**each) for each in content["members"]]
    return InferenceFindings(**{**content, "labels": labels, "members": members})
