"""What GPFL's valve tells of label distributions: all of it, unless noise or an option prevents it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

import gpfl
from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.methods import METHODS
from gpfl.methods.gpfl import embeddings_of
from gpfl.models.architectures import MLP, net_from_architecture
from gpfl.privacy.label_inference import LabelInference, infer_label_distributions
from gpfl.privacy.server_view import ServerView
from gpfl.privacy.uploads import AttackedBatch, observe_uploads, state_at
from gpfl.privacy.valve_inference import counts_in_mean, infer_from_valve


@cache
def digits(**settings: object) -> gpfl.Federation:
    return gpfl.federate("digits", clients=20, seed=0, **settings)


def infer(federation: gpfl.Federation, rounds: int, round_: str = "last", **settings: object) -> list[LabelInference]:
    result = gpfl.fit("gpfl", federation, **{"net": "mlp", "lr": 0.05, "device": "cpu", "rounds": rounds, **settings})
    state = result.outcome.last if round_ == "last" else state_at(result, round_)
    return infer_label_distributions(result.engine, state, range(4))


def worst(labels: Sequence[LabelInference]) -> float:
    return max(float(each.guess) for each in labels if each.guess is not None)


FOUR_CLASSES = {"partition": "pathological", "classes_per_client": 4}
ALL_CLASSES = {"partition": "dirichlet", "beta": 10.0}


@pytest.mark.parametrize("partition", [FOUR_CLASSES, ALL_CLASSES], ids=["four classes", "all classes"])
@pytest.mark.parametrize(("rounds", "round_"), [(1, "0"), (5, "last")])
def test_the_valve_tells_label_proportions_exactly(partition: dict, rounds: int, round_: str) -> None:
    federation = digits(**partition)
    labels = infer(federation, rounds, round_)
    assert worst(labels) < 1e-6
    assert all(each.is_exact and each.interval is None for each in labels)
    has_all_classes = (federation.label_counts[:4] > 0).all(1)
    assert has_all_classes.sum() == (0 if partition == FOUR_CLASSES else 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"protocol": "paper"},
        {"protocol": "reference"},
        {"reg": "norm", "mu": 1.0},
        {"without": "mlg"},
        {"valve": "full"},
        {"valve_upload": "low_rank"},
        {"clip": 0.5},
        {"bits": 8},
    ],
    ids=str,
)
def test_every_form_of_gpfl_with_personal_contexts_tells_them(settings: dict[str, object]) -> None:
    assert worst(infer(digits(**FOUR_CLASSES), 2, **settings)) < 1e-6


@pytest.mark.parametrize("settings", [{"without": "pci"}, {"without": "cov"}, {"protocol": "reference"}], ids=str)
def test_a_valve_without_personal_contexts_tells_nothing(settings: dict[str, object]) -> None:
    labels = infer(digits(**FOUR_CLASSES), 1, "0", **settings)  # the authors' contexts are zero in round 0
    assert all(each.interval is not None and each.interval[1] > 0.9 and not each.is_exact for each in labels)


def test_two_classes_are_told_by_the_rows_of_the_valve_alone() -> None:
    """With two classes all rows lie in the known plane, and any whole number fits."""
    view = make_view(torch.tensor([30, 70]), is_off=0.3)
    estimate = infer_from_valve(view)
    assert estimate is not None
    assert estimate.is_exact
    assert estimate.guess.tolist() == pytest.approx([0.3, 0.7])


@pytest.mark.parametrize(
    ("settings", "closest", "farthest"),
    [
        ({"valve_gradient": "global"}, 0.0, 0.9),
        ({"share_valve": False}, 0.0, 0.9),
        ({"alpha_levels": 1}, 0.01, 0.7),
        ({"alpha_levels": 4}, 0.001, 0.2),
        ({"alpha_noise": 0.1}, 0.05, 0.9),
    ],
    ids=str,
)
def test_variants_of_the_valve_leave_proportions_open(settings: dict[str, object], closest: float, farthest: float) -> None:
    labels = infer(digits(partition="dirichlet", beta=0.5), 2, **settings)
    for each in labels:
        assert not each.is_exact
        assert each.guess is not None
        assert each.guess > closest
        assert each.interval is not None
        assert each.interval[0] < 1e-6
        assert each.interval[1] > farthest


# Where it stays open.


def make_view(counts: Tensor, is_off: float, noise: float = 0.0, seed: int = 0) -> ServerView:
    """Return the view of a round that moved the valve at random; the ReLU is off for g in a fraction of the rows."""
    rng = torch.Generator().manual_seed(seed)
    width, classes = 40, len(counts)
    embeddings = torch.randn(classes, width, generator=rng)
    g, p = embeddings.mean(0), counts.float() / counts.sum() @ embeddings
    sent: Tree = {"gce": {"weight": embeddings}, "cov": {}}
    upload: Tree = {"gce": {"weight": embeddings}, "cov": {}}
    for name in ("gamma", "beta"):
        off = torch.arange(width) < is_off * width
        weight, a, b = torch.randn(width, width, generator=rng) / 6, *torch.randn(2, width, generator=rng)
        bias = torch.where(off, -9.0, 9.0)
        moved = 0.9 * weight + (a * ~off)[:, None] * g / 10 + b[:, None] * p / 10
        moved = moved + noise * torch.randn(width, width, generator=rng)
        tree.branch(sent, "cov").update({f"{name}.linear.weight": weight, f"{name}.linear.bias": bias})
        tree.branch(upload, "cov").update({f"{name}.linear.weight": moved, f"{name}.linear.bias": bias})
    net = net_from_architecture(MLP(hidden=(width,)), "mlp", torch.zeros(2, 6), classes)
    method = METHODS["gpfl"]().bind(net, lr=0.05, epochs=1)
    return ServerView(method, sent, upload, 1, n_samples=int(counts.sum()), context_embeddings=embeddings)


@pytest.mark.parametrize("counts", [[24, 24, 12, 36, 24], [20, 20, 0, 40, 20], [13, 17, 9, 41, 20]])
@pytest.mark.parametrize("seed", range(3))
def test_an_interval_contains_the_truth_where_no_row_and_no_whole_number_decides(counts: list[int], seed: int) -> None:
    truth = torch.tensor(counts) / sum(counts)
    view = make_view(torch.tensor(counts), is_off=0.0, seed=seed)
    estimate = infer_from_valve(view)
    assert estimate is not None
    assert bool(((estimate.low <= truth + 1e-6) & (truth <= estimate.high + 1e-6)).all())
    if counts[0] == 13:  # differences of 4, 8, 28 and so on: whole numbers at one point of the line only
        assert estimate.is_exact
    else:
        assert not estimate.is_exact
        assert float((estimate.high - estimate.low).max()) > 0.1
    rows = infer_from_valve(make_view(torch.tensor(counts), is_off=0.3, seed=seed))
    assert rows is not None
    assert rows.is_exact


def test_noise_widens_the_interval_until_the_valve_tells_nothing() -> None:
    counts = torch.tensor([24, 26, 11, 36, 23])
    widths = []
    for noise in (0.0, 0.01, 0.03):
        estimate = infer_from_valve(make_view(counts, is_off=0.3, noise=noise))
        assert estimate is not None
        truth = counts / counts.sum()
        assert bool(((estimate.low <= truth + 1e-6) & (truth <= estimate.high + 1e-6)).all())
        widths.append(float((estimate.high - estimate.low).mean()))
    assert widths[0] == 0
    assert widths[0] < widths[1] < widths[2]
    assert infer_from_valve(make_view(counts, is_off=0.3, noise=1.0)) is None


def test_noise_of_a_defence_hides_proportions() -> None:
    exact, noisy, hidden = (infer(digits(**FOUR_CLASSES), 1, "0", clip=1.0, noise=noise) for noise in (1e-5, 0.01, 1.0))
    assert worst(exact) < 1e-6
    assert 1e-3 < worst(noisy) < worst(hidden)
    assert all(each.interval is not None and each.interval[1] < 0.6 for each in noisy)
    assert all(each.interval is not None and each.interval[1] > 0.9 for each in hidden)


def test_upload_without_most_entries_gives_no_bounds() -> None:
    labels = infer(digits(**FOUR_CLASSES), 1, "0", top_k=0.3)
    assert all(each.interval is not None and each.interval[1] > 0.9 for each in labels)


# Sums.


def test_a_mean_of_uploads_still_shows_the_class_counts_of_single_clients() -> None:
    federation = digits(**FOUR_CLASSES)
    result = gpfl.fit("gpfl", federation, net="mlp", hidden=256, lr=0.05, device="cpu", rounds=1)
    clients = [0, 1, 2]
    views = observe_uploads(result.engine, state_at(result, "0"), [AttackedBatch(client, (0,)) for client in clients], "epoch")
    uploads = [tree.branch(view.upload, "cov") for view in views]
    n_samples = [view.n_samples for view in views]

    def mean_of(*values: Tensor) -> Tensor:
        return sum(n * value for n, value in zip(n_samples, values, strict=True)) / sum(n_samples)

    sent, embeddings = tree.branch(views[0].sent, "cov"), embeddings_of(views[0].sent)
    found = counts_in_mean(sent, tree.map_leaves(mean_of, *uploads), embeddings, n_samples)
    assert len(found) >= 2
    for client, counts in found.items():
        assert counts.tolist() == federation.label_counts[client].tolist()
    noisy = tree.map_leaves(lambda *values: mean_of(*values) + 1e-3 * torch.randn(values[0].shape), *uploads)
    assert counts_in_mean(sent, noisy, embeddings, n_samples) == {}
