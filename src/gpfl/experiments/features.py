"""Features of a finished run's personal models: collecting them, metrics of how classes and clients separate, and t-SNE.

The projection of a run, its metrics and t-SNE points, is saved in its folder, so that its weights can be deleted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from gpfl.core.local_round import Indices
from gpfl.core.net import Model
from gpfl.core.randomness import generator
from gpfl.data.table import SPLITS
from gpfl.errors import GpflError, pluralize
from gpfl.experiments.definitions import display_name
from gpfl.experiments.stored_runs import StoredRun, Trials
from gpfl.federation import Federation, Shard
from gpfl.inference import load_model
from gpfl.inference.client_model import PREDICT_BATCH_SIZE, ClientModel, model_file_name
from gpfl.io import files
from gpfl.training.execute import load_run_config
from gpfl.training.run_dir import RunDir, file_digest

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

PERPLEXITY = 30
NEIGHBOURS = 10
MIN_SAMPLES = 5  # samples that t-SNE needs

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


@dataclass(frozen=True, kw_only=True)
class FeatureInfo:
    """Where features come from."""

    method: str = ""
    round: int = 0  # of the models
    selected_by: str = ""
    data: str = ""
    clients: Sequence[str] = ()
    classes: Sequence[str] = ()
    class_counts: Integers | None = None  # (clients, classes), samples of all splits

    def info(self) -> dict[str, Any]:
        """Return these values by name."""
        return {each.name: getattr(self, each.name) for each in fields(FeatureInfo)}


@dataclass(frozen=True)
class Features(FeatureInfo):
    """Feature vectors of samples, each computed by the personal model of its client."""

    x: Floats  # (samples, width)
    label: Integers  # (samples,)
    client: Integers  # (samples,), indices

    def __len__(self) -> int:
        return len(self.x)


def collect_features(
    run_folder: Path, split: str = "test", max_samples: int = 500, seed: int = 0, *, federation: Federation | None = None
) -> Features:
    """Return the features of each client's samples of a split, or of "all", computed by its personal model of a finished run.

    Of more than `max_samples` of a client and class, some are drawn. A federation that was made in Python must be given.
    """
    if split not in (*SPLITS, "all"):
        raise GpflError(f"split is '{split}'; it must be one of {', '.join(SPLITS)} or all")
    if max_samples < 1:
        raise GpflError(f"max_samples is {max_samples}; it must be at least 1")
    folder = RunDir.open(run_folder)
    if not folder.finished:
        raise GpflError(f"the run in {folder.path} has not finished: gpfl resume {folder.path}")
    summary = folder.read_summary()
    _, federation = load_run_config(folder, federation, custom_net=False)
    vectors: list[Floats] = []
    samples: list[Indices] = []
    for index, shard in enumerate(federation.shards):
        drawn = _draw_samples(federation, shard, split, max_samples, seed, index)
        path = folder.path / "models" / model_file_name(shard.name)
        if not path.is_file():
            raise GpflError(f"the model of client {shard.name} is missing ({path}): {folder.restart_hint}")
        vectors.append(_compute_features(load_model(path), federation, drawn))
        samples.append(drawn)
    everything = [np.concatenate([shard.split(name) for name in SPLITS]) for shard in federation.shards]
    return Features(
        np.concatenate(vectors),
        federation.table.y[torch.from_numpy(np.concatenate(samples))].numpy(),
        np.repeat(np.arange(len(federation)), [len(drawn) for drawn in samples]),
        method=str(summary["method"]),
        round=cast(int, summary["selected_round"]),
        selected_by=str(summary.get("selected_by", "")),
        data=federation.table.name,
        clients=[shard.name for shard in federation.shards],
        classes=federation.class_names,
        class_counts=federation.count_labels(everything).astype(np.int64),
    )


def _draw_samples(federation: Federation, shard: Shard, split: str, max_samples: int, seed: int, index: int) -> Indices:
    """Return a client's samples of a split in ascending order, at most `max_samples` of each class."""
    samples = np.concatenate([shard.split(name) for name in (SPLITS if split == "all" else (split,))])
    labels = federation.table.y[torch.from_numpy(samples)].numpy()
    drawn = [samples[:0]]
    for label in np.unique(labels):
        of_class = samples[labels == label]
        if len(of_class) > max_samples:
            of_class = generator(seed, "subset", index, int(label)).permutation(of_class)[:max_samples]
        drawn.append(of_class)
    return np.sort(np.concatenate(drawn))


def _compute_features(model: ClientModel, federation: Federation, samples: Indices) -> Floats:
    weights, width = Model(model.method.net, model.weights), model.method.net.width
    blocks = [np.zeros((0, width), dtype=np.float32)]
    with torch.no_grad():
        for block in torch.split(torch.from_numpy(samples), PREDICT_BATCH_SIZE):
            blocks.append(model.method.features(weights, federation.table.inputs(block)).flatten(1).numpy())
    return np.concatenate(blocks)


def embed_tsne(features: Features, seed: int = 0) -> Floats:
    """Return all samples as points in the plane by t-SNE, (samples, 2)."""
    from sklearn.manifold import TSNE

    if len(features) < MIN_SAMPLES:
        count = pluralize(len(features), "sample")
        raise GpflError(f"there are {count} of {features.method}; t-SNE needs at least {MIN_SAMPLES}")
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init="pca" if features.x.shape[1] > 1 else "random", random_state=seed)
    points: Floats = tsne.fit_transform(features.x).astype(np.float32)
    return points


@dataclass(frozen=True)
class FeatureMetrics:
    """Metrics computed on features, not on points of t-SNE; None if they are undefined."""

    rows: int
    neighbours: int
    silhouette: float | None  # by class, over all clients
    silhouette_within: float | None  # by class among the samples of a client, mean over clients with several classes
    silhouette_islands: float | None  # by client and class: high if the same class lies apart on different clients
    purity: float | None  # fraction of a sample's nearest neighbours that have its class
    purity_by_chance: float | None  # the same for random neighbours
    purity_across: float | None  # purity among other clients' samples, for classes that other clients have


def measure_features(features: Features, neighbours: int = NEIGHBOURS) -> FeatureMetrics:
    """Return silhouettes and the purity of neighbourhoods."""
    x, label, client = features.x, features.label, features.client
    of_class = np.unique(label, return_counts=True)[1]
    total = len(label)
    within = [silhouette(x[client == c], label[client == c]) for c in np.unique(client)]
    defined = [value for value in within if value is not None]
    return FeatureMetrics(
        rows=total,
        neighbours=neighbours,
        silhouette=silhouette(x, label),
        silhouette_within=float(np.mean(defined)) if defined else None,
        silhouette_islands=silhouette(x, client * (int(label.max(initial=0)) + 1) + label),
        purity=purity(x, label, neighbours),
        purity_by_chance=float((of_class * (of_class - 1)).sum() / (total * (total - 1))) if total > 1 else None,
        purity_across=purity_across(features, neighbours),
    )


def silhouette(x: Floats, groups: Integers) -> float | None:
    """Return the mean silhouette of groups; None for one group, or if every sample is its own group."""
    from sklearn.metrics import silhouette_score

    if not 2 <= len(np.unique(groups)) < len(groups):
        return None
    return float(silhouette_score(x, groups))


def purity(x: Floats, label: Integers, neighbours: int) -> float | None:
    """Return the mean fraction of each sample's nearest neighbours that have its class."""
    from sklearn.neighbors import NearestNeighbors

    count = min(neighbours, len(x) - 1)
    if count < 1:
        return None
    nearest = NearestNeighbors(n_neighbors=count).fit(x).kneighbors(return_distance=False)  # (samples, count), without itself
    return float((label[nearest] == label[:, None]).mean())


def purity_across(features: Features, neighbours: int) -> float | None:
    """Return the mean fraction of each sample's nearest neighbours on other clients that have its class."""
    from sklearn.neighbors import NearestNeighbors

    x, label, client = features.x, features.label, features.client
    matches: list[npt.NDArray[np.bool_]] = []
    for index in np.unique(client):
        others = client != index
        queries = ~others & np.isin(label, label[others])
        if queries.any():
            search = NearestNeighbors(n_neighbors=min(neighbours, int(others.sum()))).fit(x[others])
            nearest = search.kneighbors(x[queries], return_distance=False)
            matches.append((label[others][nearest] == label[queries][:, None]).ravel())
    return float(np.concatenate(matches).mean()) if matches else None


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
        **features.info(),
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
            saved = read_projection(run.path, run) if run.archived else None
            saved = saved or get_projection(run.path, trials.method, points=not has_points)
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
    return [saved.metrics for run in trials.runs if (saved := read_projection(run.path, run)) is not None]


def first_projection(trials: Trials) -> FeatureProjection | None:
    """Return the saved projection of the first trial that has points."""
    for run in trials.runs:
        saved = read_projection(run.path, run)
        if saved is not None and saved.has_points:
            return replace(saved, method=trials.method, run=_run_name(run.path))
    return None


def write_projection(run: Path, projection: FeatureProjection) -> None:
    """Write a projection into its run's folder, with digests that identify the run."""
    info, groups = projection.info(), []
    counts = info.pop("class_counts")
    for client, label in np.unique(np.stack([projection.client, projection.label], 1), axis=0).tolist():
        points = projection.points[(projection.client == client) & (projection.label == label)]
        x, y = ([round(value, _DIGITS) for value in values] for values in points.T.tolist())
        groups.append({"client": client, "class": label, "x": x, "y": y})
    content = {
        "run": _run_name(run),
        "of": _digests(run),
        "how": SETTINGS,
        **info,
        "width": projection.width,
        "measures": asdict(projection.metrics),
        "rows": None if counts is None else counts.tolist(),
        "points": groups,
    }
    files.write_text(run / FILE_NAME, json.dumps(content) + "\n")


def read_projection_record(run: Path) -> Mapping[str, Any] | None:
    """Return the content of a run's saved projection; None if there is none, or if it is of another run or other settings."""
    if not (run / FILE_NAME).exists():
        return None
    content = files.read_json(run / FILE_NAME, "delete it to compute it again")
    return content if (content.get("of"), content.get("how")) == (_digests(run), SETTINGS) else None


def read_projection(run: Path, stored: StoredRun | None = None) -> FeatureProjection | None:
    """Return the projection that is saved in a run's folder or, of an archived run, in the archive; None if there is none."""
    content = (stored.archived or {}).get("features") if stored else None
    content = content or read_projection_record(run)
    if content is None:
        return None
    groups, counts = content["points"], content["rows"]
    sizes = [len(group["x"]) for group in groups]
    points = [np.array([group["x"], group["y"]], dtype=np.float32).T for group in groups]
    return FeatureProjection(
        metrics=FeatureMetrics(**content["measures"]),
        width=int(content["width"]),
        label=np.repeat(np.array([group["class"] for group in groups], dtype=np.int64), sizes),
        client=np.repeat(np.array([group["client"] for group in groups], dtype=np.int64), sizes),
        points=np.concatenate([np.zeros((0, 2), dtype=np.float32), *points]),
        class_counts=None if counts is None else np.array(counts, dtype=np.int64),
        **{name: content[name] for name in ("method", "round", "selected_by", "data", "clients", "classes")},
    )


def _run_name(run: Path) -> str:
    return f"{run.parent.name}/{run.name}"


def _digests(run: Path) -> dict[str, str]:
    """Return digests of a run's config, apart from the device, and of its summary, which identify the run."""
    return {name: file_digest(run / f"{name}{ending}") for name, ending in (("config", ".toml"), ("summary", ".json"))}
