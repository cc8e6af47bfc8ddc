"""Learned features: what clients' own models make of rows, drawn into a plane and measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
from gpfl.models.custom import CustomNet
from gpfl.training.execute import load_run_config
from gpfl.training.run_dir import RunDir

Floats = npt.NDArray[np.float32]
Whole = npt.NDArray[np.int64]

PERPLEXITY = 30
NEIGHBOURS = 10
FEWEST = 5
"""Rows without which there is nothing to embed."""


@dataclass(frozen=True, kw_only=True)
class FeatureInfo:
    """What is known of a run's features besides themselves."""

    method: str = ""
    round: int = 0  # after which the models were kept
    selected_by: str = ""
    clients: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    data: str = ""
    held: Whole | None = None  # (clients, classes) rows of all parts, of which features are some


@dataclass(frozen=True)
class Features(FeatureInfo):
    """Feature vectors of rows, each made by the own model of the client that holds the row."""

    x: Floats  # (rows, width)
    label: Whole  # (rows,)
    client: Whole  # (rows,) places in `clients`

    def __len__(self) -> int:
        return len(self.x)


def collect_features(
    run_folder: str | Path,
    part: str = "test",
    most: int = 500,
    seed: int = 0,
    *,
    label: str = "",
    federation: Federation | None = None,
    net: CustomNet | None = None,
    head: str | None = None,
) -> Features:
    """Gives the features of a finished run: every client's rows of `part` (or "all") through that client's own model.

    Features are what the method decides by: GPFL's are the personal route f^P. Of every client and class at most `most` rows
    are taken, drawn by `seed`; `label` names the features where the method's name does not do. The models are those that
    the run kept: run.select = "test" keeps the best round's. Data and nets that were given in Python must be given again.
    """
    if part not in (*SPLITS, "all"):
        raise GpflError(f"part is '{part}'; it must be one of {', '.join(SPLITS)} or all")
    if most < 1:
        raise GpflError(f"most is {most}; it must be at least 1")
    folder = RunDir.open(run_folder)
    if not folder.finished:
        raise GpflError(f"the run in {folder.path} has not finished: gpfl resume {folder.path}")
    summary = folder.read_summary()
    _, divided = load_run_config(folder, federation, custom_net=net is not None)
    vectors: list[Floats] = []
    rows: list[Indices] = []
    for place, shard in enumerate(divided.shards):
        chosen = sample(divided, shard, part, most, seed, place)
        model = load_model(model_file(folder, shard.name), net=net, head=head)
        vectors.append(features_of(model, divided, chosen))
        rows.append(chosen)
    return Features(
        np.concatenate(vectors),
        divided.table.y[torch.from_numpy(np.concatenate(rows))].numpy(),
        np.repeat(np.arange(len(divided)), [len(chosen) for chosen in rows]),
        method=label or str(summary["method"]),
        round=cast(int, summary["selected_round"]),
        selected_by=str(summary.get("selected_by", "")),
        clients=tuple(shard.name for shard in divided.shards),
        classes=tuple(divided.class_name(label) for label in range(divided.table.classes)),
        data=divided.table.name,
        held=divided.count_labels([np.concatenate([s.split(name) for name in SPLITS]) for s in divided.shards]).astype(
            np.int64
        ),
    )


def model_file(folder: RunDir, client: str) -> Path:
    """Gives the file of a client's model in a run folder."""
    path = folder.path / "models" / model_file_name(client)
    if not path.is_file():
        raise GpflError(f"the model of client {client} is gone ({path}): {folder.restart_hint}")
    return path


def sample(federation: Federation, shard: Shard, part: str, most: int, seed: int, place: int) -> Indices:
    """Gives a client's rows of a part, in their order, at most `most` of each class."""
    rows = np.concatenate([shard.split(name) for name in (SPLITS if part == "all" else (part,))])
    labels = federation.table.y[torch.from_numpy(rows)].numpy()
    kept: list[Indices] = []
    for label in np.unique(labels):
        held = rows[labels == label]
        draw = generator(seed, "subset", place, int(label))
        kept.append(held if len(held) <= most else draw.permutation(held)[:most])
    return np.sort(np.concatenate(kept)) if kept else rows


def features_of(model: ClientModel, federation: Federation, rows: Indices) -> Floats:
    """Gives the features (rows, width) that a client's model makes of rows of the table."""
    own, width = Model(model.method.net, model.weights), model.method.net.width
    vectors = [np.zeros((0, width), dtype=np.float32)]
    with torch.no_grad():
        for block in torch.split(torch.from_numpy(rows), PREDICT_BATCH_SIZE):
            made = model.method.features(own, federation.table.inputs(block))
            vectors.append(made.flatten(1).numpy())
    return np.concatenate(vectors)


def embed_tsne(features: Features, seed: int = 0) -> Floats:
    """Gives all rows together as points of a plane (rows, 2) by t-SNE, as scikit-learn has it, begun from the main axes.

    It shows who lies with whom, and neither distances nor densities: `measure` judges the features themselves.
    """
    from sklearn.manifold import TSNE

    if len(features) < FEWEST:
        raise GpflError(f"there are {pluralize(len(features), 'row')} of {features.method}; t-SNE needs at least {FEWEST}")
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    how = TSNE(perplexity=perplexity, init="pca" if features.x.shape[1] > 1 else "random", random_state=seed)
    points: Floats = how.fit_transform(features.x).astype(np.float32)
    return points


@dataclass(frozen=True)
class FeatureMetrics:
    """Numbers about features, taken in their own space and not in a picture of it; None where they say nothing."""

    rows: int
    neighbours: int
    silhouette: float | None
    """By class, all clients' rows together: 1 for tight classes far apart, 0 for classes that touch, below for mixed ones."""
    silhouette_within: float | None
    """By class among a client's own rows, the mean over clients with several classes: what its head has to tell apart."""
    silhouette_islands: float | None
    """By client and class: high where every client's share of a class is an island of its own."""
    purity: float | None
    """The share of a row's nearest neighbours that have its class."""
    purity_by_chance: float | None
    """What purity would be if neighbours were drawn at random."""
    purity_across: float | None
    """The same among other clients' rows alone, for rows whose class another client has: features that clients share."""

    def record(self) -> dict[str, float | int | None]:
        """Gives the numbers by name."""
        return asdict(self)


def measure_features(features: Features, neighbours: int = NEIGHBOURS) -> FeatureMetrics:
    """Gives silhouettes and the purity of neighbourhoods."""
    x, label, client = features.x, features.label, features.client
    shares = np.unique(label, return_counts=True)[1]
    total = len(label)
    return FeatureMetrics(
        rows=total,
        neighbours=neighbours,
        silhouette=silhouette(x, label),
        silhouette_within=mean_of([silhouette(x[own], label[own]) for own in (client == c for c in np.unique(client))]),
        silhouette_islands=silhouette(x, client * (int(label.max(initial=0)) + 1) + label),
        purity=purity(x, label, neighbours),
        purity_by_chance=float((shares * (shares - 1)).sum() / (total * (total - 1))) if total > 1 else None,
        purity_across=purity_across(features, neighbours),
    )


def silhouette(x: Floats, groups: Whole) -> float | None:
    """Gives the mean silhouette of groups; None where there is one group, or none has two rows."""
    from sklearn.metrics import silhouette_score

    if not 2 <= len(np.unique(groups)) < len(groups):
        return None
    return float(silhouette_score(x, groups))


def purity(x: Floats, label: Whole, neighbours: int) -> float | None:
    """Gives the mean share of each row's nearest other rows that have its class."""
    from sklearn.neighbors import NearestNeighbors

    count = min(neighbours, len(x) - 1)
    if count < 1:
        return None
    near = NearestNeighbors(n_neighbors=count).fit(x).kneighbors(return_distance=False)  # (rows, count), never the row itself
    return float((label[near] == label[:, None]).mean())


def purity_across(features: Features, neighbours: int) -> float | None:
    """Gives the mean share of each row's nearest rows of other clients that have its class, where others have the class."""
    from sklearn.neighbors import NearestNeighbors

    x, label, client = features.x, features.label, features.client
    found: list[npt.NDArray[np.bool_]] = []
    for place in np.unique(client):
        others = client != place
        asked = ~others & np.isin(label, label[others])
        if asked.any():
            near = NearestNeighbors(n_neighbors=min(neighbours, int(others.sum()))).fit(x[others])
            places = near.kneighbors(x[asked], return_distance=False)
            found.append((label[others][places] == label[asked][:, None]).ravel())
    return float(np.concatenate(found).mean()) if found else None


def mean_of(values: list[float | None]) -> float | None:
    """Gives the mean of the values that are there."""
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None
