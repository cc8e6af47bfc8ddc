"""Features of a finished run's personal models: collecting them, t-SNE, and metrics of how classes and clients separate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from gpfl.core.local_round import Indices
from gpfl.core.net import Model
from gpfl.core.randomness import generator
from gpfl.data.table import SPLITS
from gpfl.errors import GpflError, pluralize
from gpfl.federation import Federation, Shard
from gpfl.inference import load_model
from gpfl.inference.client_model import PREDICT_BATCH_SIZE, ClientModel, model_file_name
from gpfl.training.execute import load_run_config
from gpfl.training.run_dir import RunDir

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

PERPLEXITY = 30
NEIGHBOURS = 10
MIN_SAMPLES = 5  # samples that t-SNE needs


@dataclass(frozen=True, kw_only=True)
class FeatureInfo:
    """Where features come from."""

    method: str = ""
    round: int = 0  # of the models
    selected_by: str = ""
    clients: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    data: str = ""
    class_counts: Integers | None = None  # (clients, classes), samples of all splits


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
    """Return the features that the personal models of a finished run compute of their clients' samples of a split or of "all".

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
        clients=tuple(shard.name for shard in federation.shards),
        classes=tuple(federation.class_names[label] for label in range(federation.table.classes)),
        data=federation.table.name,
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
    """Return the features of samples, (samples, width)."""
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
