"""t-SNE points and metrics of a run's features, saved in its folder so that its weights can be deleted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpfl.errors import GpflError
from gpfl.experiments.definitions import display_name
from gpfl.experiments.features import (
    NEIGHBOURS,
    PERPLEXITY,
    FeatureInfo,
    FeatureMetrics,
    Features,
    Floats,
    Integers,
    collect_features,
    embed_tsne,
    measure_features,
)
from gpfl.experiments.stored_runs import StoredRun, Trials
from gpfl.io import files
from gpfl.training.run_dir import RunDir, file_digest

FILE_NAME = "features.json"

SPLIT, MAX_SAMPLES, SEED = "test", 500, 0
"""Samples of a projection: their split, the maximum of each client and class, and the seed of the draw and of t-SNE."""

SETTINGS: Mapping[str, object] = {
    "format": 1,
    "part": SPLIT,
    "most": MAX_SAMPLES,
    "seed": SEED,
    "neighbours": NEIGHBOURS,
    "perplexity": PERPLEXITY,
}
"""Settings of saved projections; projections with others are computed again."""

_DIGITS = 2  # decimals of points, which t-SNE spreads over a hundred or more


@dataclass(frozen=True)
class FeatureProjection(FeatureInfo):
    """The features of a run: metrics, and points in the plane unless only the metrics were computed."""

    metrics: FeatureMetrics
    width: int
    label: Integers  # (samples,)
    client: Integers  # (samples,), indices
    points: Floats  # (samples, 2)
    run: str = ""  # name of the run's folder with the one above it

    @property
    def has_points(self) -> bool:
        """Whether the points were computed."""
        return len(self.points) > 0


def compute_projection(features: Features, *, points: bool = True) -> FeatureProjection:
    """Return the projection of features, sorted by client and class; the points take minutes, the metrics seconds."""
    order = np.lexsort((features.label, features.client)) if points else np.zeros(0, dtype=np.int64)
    plane = np.round(embed_tsne(features, SEED), _DIGITS)[order] if points else np.zeros((0, 2), dtype=np.float32)
    return FeatureProjection(
        *(measure_features(features), int(features.x.shape[1]), features.label[order], features.client[order], plane),
        **{each.name: getattr(features, each.name) for each in fields(FeatureInfo)},
    )


def get_projection(run: Path, label: str, *, points: bool) -> FeatureProjection:
    """Return the saved projection of a run, or compute and save it; without models a saved projection may lack its points."""
    saved, has_models = read_projection(run), (run / "models").is_dir()
    if saved is None and not has_models:
        raise GpflError(
            f"{_run_name(run)} has neither its models nor a valid {FILE_NAME}: copy {FILE_NAME} from where the run was made, "
            f"or {RunDir(run).restart_hint}"
        )
    if saved is None or (points and not saved.has_points and has_models):
        saved = compute_projection(collect_features(run, SPLIT, MAX_SAMPLES, SEED), points=points)
        write_projection(run, saved)
    return replace(saved, method=label, run=_run_name(run))


def measure_trials(trials: Trials, log: Callable[[str], None]) -> None:
    """Compute the missing projections of all trials, with points for the first trial that can have them."""
    name, has_points = display_name(trials.method), False
    for run in trials.runs:
        try:
            saved = _archived_projection(run) or get_projection(run.path, trials.method, points=not has_points)
            has_points |= saved.has_points
        except GpflError as error:
            log(f"{name}, {run.path.name}: {error}")
    if not has_points:
        log(f"{name} is missing from the figure: no trial has t-SNE points")


def is_measured(trials: Trials) -> bool:
    """Return whether every trial that has its models has a saved projection, and the first trial one with points."""
    projections = [(read_projection(run.path), run) for run in trials.runs if (run.path / "models").is_dir()]
    return all(saved is not None and (saved.has_points or run is not trials.runs[0]) for saved, run in projections)


def read_metrics(trials: Trials) -> list[FeatureMetrics]:
    """Return the saved metrics of the trials that have some."""
    return [saved.metrics for run in trials.runs if (saved := _saved_projection(run)) is not None]


def first_projection(trials: Trials) -> FeatureProjection | None:
    """Return the saved projection of the first trial that has points."""
    for run in trials.runs:
        saved = _saved_projection(run)
        if saved is not None and saved.has_points:
            return replace(saved, method=trials.method, run=_run_name(run.path))
    return None


def _saved_projection(run: StoredRun) -> FeatureProjection | None:
    return _archived_projection(run) or read_projection(run.path)


def _archived_projection(run: StoredRun) -> FeatureProjection | None:
    record = (run.archived or {}).get("features")
    return None if record is None else _parse_projection(record)


# The file.


def write_projection(run: Path, projection: FeatureProjection) -> None:
    """Write a projection into its run's folder, with digests that identify the run."""
    counts = projection.class_counts
    content = {
        "run": _run_name(run),
        "of": _digests(run),
        "how": SETTINGS,
        **{name: getattr(projection, name) for name in ("method", "round", "selected_by", "width")},
        "measures": asdict(projection.metrics),
        **{name: getattr(projection, name) for name in ("data", "clients", "classes")},
        "rows": None if counts is None else counts.tolist(),
        "points": _group_points(projection),
    }
    files.write_text(run / FILE_NAME, json.dumps(content) + "\n")


def _group_points(projection: FeatureProjection) -> list[dict[str, object]]:
    groups: list[dict[str, object]] = []
    for client, label in np.unique(np.stack([projection.client, projection.label], 1), axis=0).tolist():
        points = projection.points[(projection.client == client) & (projection.label == label)]
        x, y = ([round(value, _DIGITS) for value in values] for values in points.T.tolist())
        groups.append({"client": client, "class": label, "x": x, "y": y})
    return groups


def read_projection(run: Path) -> FeatureProjection | None:
    """Return the saved projection of a run; None if there is none, or if it is of another run or other settings."""
    content = read_projection_record(run)
    return None if content is None else _parse_projection(content)


def read_projection_record(run: Path) -> Mapping[str, object] | None:
    """Return the content of a run's saved projection; None if there is none, or if it is of another run or other settings."""
    if not (run / FILE_NAME).exists():
        return None
    content = files.read_json(run / FILE_NAME, "delete it to compute it again")
    return content if (content.get("of"), content.get("how")) == (_digests(run), SETTINGS) else None


def _parse_projection(content: Mapping[str, Any]) -> FeatureProjection:
    groups, counts = content["points"], content["rows"]
    sizes = [len(group["x"]) for group in groups]
    points = [np.array([group["x"], group["y"]], dtype=np.float32).T for group in groups]
    return FeatureProjection(
        metrics=FeatureMetrics(**content["measures"]),
        width=int(content["width"]),
        label=np.repeat(np.array([group["class"] for group in groups], dtype=np.int64), sizes),
        client=np.repeat(np.array([group["client"] for group in groups], dtype=np.int64), sizes),
        points=np.concatenate([np.zeros((0, 2), dtype=np.float32), *points]),
        method=str(content["method"]),
        round=int(content["round"]),
        selected_by=str(content["selected_by"]),
        clients=tuple(content["clients"]),
        classes=tuple(content["classes"]),
        data=str(content["data"]),
        class_counts=None if counts is None else np.array(counts, dtype=np.int64),
    )


def _run_name(run: Path) -> str:
    return f"{run.parent.name}/{run.name}"


def _digests(run: Path) -> dict[str, str]:
    """Return digests of a run's config, apart from the device, and of its summary, which identify the run."""
    return {name: file_digest(run / f"{name}{ending}") for name, ending in (("config", ".toml"), ("summary", ".json"))}
