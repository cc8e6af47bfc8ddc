"""Maps: a run's features as points of a plane with their measures, kept beside the run, so that its weights may go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
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
    Whole,
    collect_features,
    embed_tsne,
    measure_features,
)
from gpfl.experiments.stored_runs import Trials
from gpfl.io import files
from gpfl.training.run_dir import RunDir, file_digest

FILE = "features.json"
"""The file of a run's folder that holds its map."""

PART, MOST_ROWS, SEED = "test", 500, 0
"""Rows that maps are made of: their part, the most of each client and class, and the seed that draws them and begins t-SNE."""

HOW: Mapping[str, object] = {
    "format": 1,
    "part": PART,
    "most": MOST_ROWS,
    "seed": SEED,
    "neighbours": NEIGHBOURS,
    "perplexity": PERPLEXITY,
}
"""How maps are made and kept: one that was made otherwise is none."""

DIGITS = 2
"""Digits of points behind the point: t-SNE spreads them over a hundred or more."""


@dataclass(frozen=True)
class FeatureMap(FeatureInfo):
    """The features of a run: where rows lie in a plane, and what was measured of them."""

    measures: FeatureMetrics
    width: int
    label: Whole  # (rows,)
    client: Whole  # (rows,) places in `clients`
    points: Floats  # (rows, 2); no rows where features were measured alone
    run: str = ""  # the folder's name, with that of the cell

    @property
    def has_points(self) -> bool:
        """Tells whether it has points."""
        return len(self.points) > 0


def make_map(features: Features, seed: int = SEED, *, points: bool = True) -> FeatureMap:
    """Gives the map of features, client by client and class by class; without points it takes seconds and not minutes."""
    order = np.lexsort((features.label, features.client)) if points else np.zeros(0, dtype=np.int64)
    plane = np.round(embed_tsne(features, seed), DIGITS)[order] if points else np.zeros((0, 2), dtype=np.float32)
    return FeatureMap(
        *(measure_features(features), int(features.x.shape[1]), features.label[order], features.client[order], plane),
        **{known.name: getattr(features, known.name) for known in fields(FeatureInfo)},
    )


def get_map(run: Path, label: str, *, points: bool) -> FeatureMap:
    """Gives the map of a run: the one that is kept beside it, else one made of its models, which is kept.

    Where points are asked for and neither kept nor to be had of models, what was measured is given alone.
    """
    found, here = read_map(run), (run / "models").is_dir()
    if found is None and not here:
        raise GpflError(
            f"the models of {named(run)} are gone, and no whole {FILE} of them was kept beside the run: "
            f"copy it from where the models were, or {RunDir(run).restart_hint}"
        )
    if found is None or (points and not found.has_points and here):
        found = make_map(collect_features(run, PART, MOST_ROWS, SEED), points=points)
        write_map(run, found)
    return replace(found, method=label, run=named(run))


def named(run: Path) -> str:
    """Gives the name of a run's folder with that of its cell, which ends in a digest of its content."""
    return f"{run.parent.name}/{run.name}"


def measure_trials(trials: Trials, log: Callable[[str], None]) -> None:
    """Measure the features of all trials, with points for the first trial of which they can be had."""
    name, has_points = display_name(trials.method), False
    for run in trials.runs:
        try:
            has_points |= get_map(run.path, trials.method, points=not has_points).has_points
        except GpflError as error:
            log(f"{name}, {run.path.name}: {error}")
    if not has_points:
        log(f"{name} is left out of the figure: no points of these trials were kept")


def is_measured(trials: Trials) -> bool:
    """Return whether measures of all trials, and points of the first, are kept, as far as models are there to measure."""
    maps = [(read_map(run.path), run) for run in trials.runs if (run.path / "models").is_dir()]
    return all(one is not None and (one.has_points or run is not trials.runs[0]) for one, run in maps)


def first_map(trials: Trials) -> FeatureMap | None:
    """Return the map that is kept of the first trial that has points."""
    maps = (get_map(run.path, trials.method, points=False) for run in trials.runs if read_map(run.path) is not None)
    return next((one for one in maps if one.has_points), None)


# Keeping.


def write_map(run: Path, one: FeatureMap) -> None:
    """Writes a map beside its run, with the digests that tell whose it is; a line for each client's share of a class."""
    facts: dict[str, object] = {
        "run": named(run),
        "of": digests(run),
        "how": HOW,
        "method": one.method,
        "round": one.round,
        "selected_by": one.selected_by,
        "width": one.width,
        "measures": one.measures.record(),
        "data": one.data,
        "clients": one.clients,
        "classes": one.classes,
        "rows": None if one.held is None else one.held.tolist(),
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in facts.items()]
    shares = ",".join(f"\n    {json.dumps(share)}" for share in shares_of(one))
    files.write_text(run / FILE, "{\n" + "".join(lines) + f'  "points": [{shares}]\n}}\n')


def shares_of(one: FeatureMap) -> list[dict[str, object]]:
    """Gives the points of each client's share of each class."""
    found: list[dict[str, object]] = []
    for c in map(int, np.unique(one.client)):
        for k in map(int, np.unique(one.label[one.client == c])):
            x, y = one.points[(one.client == c) & (one.label == k)].T.tolist()
            found.append(
                {"client": c, "class": k, "x": [round(v, DIGITS) for v in x], "y": [round(v, DIGITS) for v in y]},
            )
    return found


def digests(run: Path) -> dict[str, str]:
    """Gives what tells a run from all others: digests of its config, but for the device, and of its summary."""
    return {name: file_digest(run / f"{name}{ending}") for name, ending in (("config", ".toml"), ("summary", ".json"))}


def read_map(run: Path) -> FeatureMap | None:
    """Gives the map that is kept beside a run; None where there is none, it is damaged, or of a run that was there before."""
    try:
        facts = json.loads((run / FILE).read_text(encoding="utf-8"))
        return from_facts(facts) if facts["of"] == digests(run) and facts["how"] == HOW else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def from_facts(facts: Mapping[str, Any]) -> FeatureMap:
    """Gives a map as it was written; a ValueError where its parts do not fit together."""
    shares = facts["points"]
    sizes = [len(share["x"]) for share in shares]
    plane = [np.array([share["x"], share["y"]], dtype=np.float32).T for share in shares]
    found = FeatureMap(
        measures=FeatureMetrics(**facts["measures"]),
        width=int(facts["width"]),
        label=np.repeat(np.array([share["class"] for share in shares], dtype=np.int64), sizes),
        client=np.repeat(np.array([share["client"] for share in shares], dtype=np.int64), sizes),
        points=np.concatenate([np.zeros((0, 2), dtype=np.float32), *plane]),
        method=str(facts["method"]),
        round=int(facts["round"]),
        selected_by=str(facts["selected_by"]),
        clients=tuple(facts["clients"]),
        classes=tuple(facts["classes"]),
        data=str(facts["data"]),
        held=None if facts["rows"] is None else np.array(facts["rows"], dtype=np.int64),
    )
    numbers = all(value is None or isinstance(value, int | float) for value in found.measures.record().values())
    places = len(found.clients), len(found.classes)
    whole = (not places[0] or (found.client < places[0]).all()) and (not places[1] or (found.label < places[1]).all())
    if not numbers or not whole or (found.held is not None and found.held.ndim != 2):
        raise ValueError("its parts do not fit together")
    return found
