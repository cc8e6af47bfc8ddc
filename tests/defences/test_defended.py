"""Defences: checked against plain computations, the same in all engines."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command, metrics_without_time, toy_federation
from torch import Tensor

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.core.tree import Tree
from gpfl.defences import DefenceConfig, Defended, accounting, uploads
from gpfl.engine.base import RoundResult
from gpfl.engine.compiler.program import Program
from gpfl.engine.vmap import Vmap
from gpfl.models.architectures import CNN4, MLP
from gpfl.training.callbacks import Callback

CLIENT = {"clip": 0.5, "noise": 0.5}
EXAMPLE = {"example_clip": 1.0, "example_noise": 0.5}
SMALL = {"top_k": 0.1, "bits": 4}
PER_EXAMPLE_OPTIONS = {"gpfl": {"mlg_norm": "sample_mean"}}


def fit(method: str, federation: gpfl.Federation | None = None, **settings: object) -> gpfl.Result:
    defaults = {"net": "mlp", "rounds": 3, "lr": 0.1, "device": "cpu", **PER_EXAMPLE_OPTIONS.get(method, {})}
    return gpfl.fit(method, federation or toy_federation(), **{**defaults, **settings})


def flatten(state: Tree) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in tree.leaves(state)])


def shared_of(result: gpfl.Result) -> Tensor:
    return flatten(result.outcome.last.shared)


# The same in all engines.


@pytest.mark.parametrize("settings", [CLIENT, EXAMPLE], ids=["client", "example"])
@pytest.mark.parametrize("method", ["gpfl", "fedavg", "fedrep"])
def test_engines_agree(method: str, settings: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "accountant_version", lambda: "")  # which takes longer than the runs
    settings = {"client_fraction": 0.75, "drop_last": False, **settings}
    runs = [fit(method, engine=engine, **settings) for engine in ("loop", "vmap", "workers")]
    for other in runs[1:]:
        assert torch.allclose(shared_of(runs[0]), shared_of(other), atol=2e-5)
        assert other.summary["bytes_up"] == runs[0].summary["bytes_up"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", ["gpfl", "fedavg", "fedrep"])
def test_engines_compress_alike(method: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines round differently, so an entry of an update at the boundary between two levels may get either.

    Every round starts from the state of `loop`. The mean of another engine's uploads must lie between those of `loop` with all
    updates 5e-7 lower and 5e-7 higher, which differ at such entries alone.
    """
    settings = {"client_fraction": 0.75, "drop_last": False, "seed": seed, **SMALL}
    loop, *others = (fit(method, engine=engine, **settings) for engine in ("loop", "vmap", "workers"))
    assert [other.summary["bytes_up"] for other in others] == [loop.summary["bytes_up"]] * 2
    shared, private = loop.engine.method.init(seed)
    private = tree.repeat(private, 4)
    entries = at_boundary = 0

    def train(run: gpfl.Result, shift: float = 0.0) -> RoundResult:
        def transform(shared: Tree, upload: Tree, *arguments: Any) -> Tree:
            return uploads.transform_upload(shared, tree.map_leaves(lambda leaf: leaf + shift, upload), *arguments)

        with monkeypatch.context() as patch:
            patch.setattr("gpfl.defences.defended.transform_upload", transform)
            return run.engine.train(shared, tree.take(private, torch.tensor(clients)), clients, number)

    for number in range(3):
        clients = loop.engine.schedule.sample_clients(number, 4)
        low, high = (flatten(train(loop, shift).mean) for shift in (-5e-7, 5e-7))
        for other in others:
            found = flatten(train(other).mean)
            assert bool(((found > low - 1e-6) & (found < high + 1e-6)).all())
        at_boundary += int((high - low > 1e-6).sum())
        entries += len(low)
        result = train(loop)
        shared = loop.engine.method.aggregate(shared, result.mean)
        tree.index_copy_(private, torch.tensor(clients), result.private)
    assert at_boundary < entries / 100


@pytest.mark.parametrize("settings", [EXAMPLE, CLIENT], ids=["example", "client"])
def test_traced_steps_on_convolutions_draw_the_same_noise(settings: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU runs them: traced, and stacked convolutions as products."""
    monkeypatch.setattr(accounting, "accountant_version", lambda: "")
    draw = np.random.default_rng(0)
    table = gpfl.Table(draw.integers(0, 256, (48, 1, 16, 16)).astype(np.uint8), np.arange(48) % 3, name="noise")
    federation = gpfl.federate(table, partition="pathological", clients=3, classes_per_client=2, balanced=True)
    runs = []
    for engine in ("loop", "vmap"):
        monkeypatch.setattr(Vmap, "min_calls_to_trace", 1)
        monkeypatch.setattr(Program, "matmul_devices", ("cpu",))
        runs.append(fit("fedavg", federation, net=CNN4(channels=(4, 8), hidden=16), rounds=2, engine=engine, **settings))
    assert all(program.traced for program in runs[1].engine._programs.values())
    assert torch.allclose(shared_of(runs[0]), shared_of(runs[1]), atol=1e-5)


@pytest.mark.parametrize("method", ["gpfl", "fedavg", "fedprox"])
def test_traced_steps_never_materialise_per_example_gradients(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedProx's proximal term makes an example's gradient no product of factors; its numbers must be the same."""
    monkeypatch.setattr(accounting, "accountant_version", lambda: "")
    monkeypatch.setattr(Vmap, "min_calls_to_trace", 1)
    loop, vmap = (fit(method, net=MLP(hidden=(128, 64)), rounds=2, engine=engine, **EXAMPLE) for engine in ("loop", "vmap"))
    assert torch.allclose(shared_of(loop), shared_of(vmap), atol=1e-5)
    graphs = [program._run.graph for program in vmap.engine._programs.values()]
    lengths = [node for graph in graphs for node in graph.nodes if node.target is torch.ops.aten.linalg_vector_norm.default]
    whole = [node for node in lengths if node.args[0].meta["val"].shape[-1] >= 64 * 64]
    assert bool(whole) == (method == "fedprox")


def test_concurrent_trials_have_their_own_noise(command: Command, tmp_path: Path) -> None:
    flags = ("--data", "toy", "--method", "fedavg", "--clip", "0.5", "--noise", "1", "--engine", "vmap", "--rounds", "2")
    assert command("run", *flags, "--seeds", "0,1", "--out", "both").code == 0
    for seed in (0, 1):
        assert command("run", *flags, "--seed", seed, "--out", f"alone-{seed}").code == 0
        together, alone = (
            metrics_without_time(tmp_path / "both" / f"seed-{seed}"),
            metrics_without_time(tmp_path / f"alone-{seed}"),
        )
        assert [line["loss"] for line in together] == pytest.approx([line["loss"] for line in alone], abs=1e-5)
    salts = {fit("fedavg", seed=seed, rounds=1, **CLIENT).engine.method.salt for seed in (0, 1)}
    assert len(salts) == 2


def test_clients_split_over_processes_sum_to_the_result_of_one_process() -> None:
    result = fit("fedavg", engine="loop", **CLIENT)
    engine, state = result.engine, result.outcome.last
    whole = engine.train(state.shared, {}, [0, 1, 2, 3], 7).mean
    asked = gpfl.engine.base.TrainRequest(state.shared, {}, [1, 3], 7, engine.schedule, [0, 1, 2, 3], engine.method)
    parts = [engine.train_round(asked._replace(clients=clients)).mean for clients in ([1, 3], [0, 2])]
    added = tree.map_leaves(torch.add, *parts)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in tree.zip_leaves(whole, added))


# Updates, against plain computations.


def updates(result: gpfl.Result, method: gpfl.core.method.Method) -> list[Tensor]:
    """Return every client's update of one round as one vector."""
    engine, shared = result.engine, result.outcome.last.shared
    found = []
    for client in range(len(engine.federation)):
        facts = engine.client_info([client], 5).select(0)
        private = tree.take(result.outcome.last.private, client)
        sent = local_round(method, shared, private, engine.federation.table, engine.plan(client, 5), facts).upload
        found.append(torch.cat([(a - b).flatten() for a, b in tree.zip_leaves(sent, tree.pick(shared, tuple(sent)))]))
    return found


def test_updates_are_clipped_and_get_the_stated_noise() -> None:
    result = fit("fedavg", rounds=1, clip=0.05, noise=2.0)
    defended = result.engine.method
    plain = defended.replace(defence=DefenceConfig())
    only = defended.replace(defence=DefenceConfig(clip=0.05))
    noisy, clipped, raw = (updates(result, method) for method in (defended, only, plain))
    drawn = []
    for mine, bound, full in zip(noisy, clipped, raw, strict=True):
        assert torch.allclose(bound, full * min(1, 0.05 / float(full.norm())), atol=1e-6)
        assert float(full.norm()) > 0.05
        drawn.append(mine - bound)
    share = 2.0 * 0.05 / math.sqrt(4)
    assert float(torch.cat(drawn).std()) == pytest.approx(share, rel=0.05)
    assert float(torch.stack(drawn).sum(0).std()) == pytest.approx(2.0 * 0.05, rel=0.08), "shares add up"
    assert abs(float(torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs().max())) < 0.15


def test_updates_below_the_bound_do_not_change() -> None:
    update: tree.Tree = {"base": {"w": torch.tensor([0.3, 0.4])}}
    assert torch.equal(tree.leaf(tree.branch(uploads.clip(update, 1.0), "base"), "w"), torch.tensor([0.3, 0.4]))


def test_no_clipped_update_exceeds_its_bound() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        sizes, scale = draw.integers(1, 60, 2), 10.0 ** draw.uniform(-12, 12)
        update: tree.Tree = {
            "base": {"w": torch.tensor(scale * draw.standard_normal(sizes[0]), dtype=torch.float32)},
            "head": torch.tensor(scale * draw.standard_t(1, sizes[1]), dtype=torch.float32),
        }
        bound = float(10.0 ** draw.uniform(-6, 3))
        assert float(uploads.l2_norm(tree.map_leaves(Tensor.double, uploads.clip(update, bound)))) <= bound


def test_exchanging_a_client_changes_the_aggregate_by_at_most_twice_the_bound() -> None:
    """The sensitivity behind ε: clients have equal weights, and both runs draw the same noise."""
    bound, shifted = 0.2, toy_federation()
    table = shifted.table
    rows = torch.from_numpy(shifted.shards[0].train)
    moved = table.with_tensors(table.x.clone(), table.y.clone())
    moved.x[rows] = 50 * moved.x[rows].flip(0)
    other = gpfl.Federation(moved, shifted.shards)
    releases = []
    for federation in (shifted, other):
        result = fit("fedavg", federation, rounds=1, clip=bound, noise=0.3)
        releases.append(shared_of(result))
    far = float((releases[0] - releases[1]).norm())
    assert 0.01 * bound < far <= 2 * bound / 4 + 1e-5


def test_with_noise_all_clients_have_the_same_weight() -> None:
    noisy, clipped = fit("fedavg", rounds=1, **CLIENT), fit("fedavg", rounds=1, clip=0.5)
    facts = [noisy.engine.client_info([client], 0).select(0) for client in range(4)]
    assert {float(noisy.engine.method.aggregation_weight(client)) for client in facts} == {1.0}
    assert len({float(clipped.engine.method.aggregation_weight(client)) for client in facts}) == 4


def test_noise_is_scaled_for_the_fewest_clients_of_a_round() -> None:
    federation = toy_federation((41, 27, 33, 5))
    method = fit("perfedavg", federation, rounds=1, client_fraction=(0.5, 1.0), **CLIENT).engine.method
    assert isinstance(method, Defended)
    assert method.min_clients == 1, "one of the two sampled clients may have too few samples"
    assert fit("fedavg", federation, rounds=1, client_fraction=0.5, **CLIENT).engine.method.min_clients == 2


# Compression.


def test_only_the_largest_entries_are_sent() -> None:
    update: tree.Tree = {"a": torch.tensor([5.0, -0.1, 0.2]), "b": {"c": torch.tensor([[-4.0, 0.3], [0.0, 1.0]])}}
    kept = uploads.keep_largest(update, 3 / 7)
    assert tree.leaf(kept, "a").tolist() == [5, 0, 0]
    assert tree.leaf(tree.branch(kept, "b"), "c").tolist() == [[-4, 0], [0, 1]]


@pytest.mark.parametrize(("bits", "rounding"), [(2, "nearest"), (4, "nearest"), (4, "stochastic"), (8, "stochastic")])
def test_quantised_entries_are_on_a_neighbouring_level(bits: int, rounding: str) -> None:
    entries = torch.linspace(-1, 1, 5001)
    key = torch.tensor([3, 4]) if rounding == "stochastic" else None
    found = tree.leaf(uploads.quantise({"w": entries}, bits, key), "w")
    step = 1 / (2 ** (bits - 1) - 1)
    assert len(found.unique()) == 2**bits - 1
    assert float((found - entries).abs().max()) <= step * (0.5 if key is None else 1) + 1e-6
    if key is not None:
        blocks = (found - entries).reshape(3, 1667)
        assert float(blocks.mean(-1).abs().max()) < 4 * step / math.sqrt(1667), "unbiased"


@pytest.mark.parametrize(
    ("settings", "bytes_"),
    [
        ({}, 4 * 1000),
        ({"top_k": 0.1}, 100 * 4 + 125),  # a bit for every entry is less than 100 positions
        ({"top_k": 0.01}, 10 * 4 + 10 * 4),
        ({"bits": 8}, 1000 + 2 * 4),
        ({"bits": 4, "top_k": 0.1}, 50 + 125 + 2 * 4),
    ],
)
def test_bytes_count_entries_positions_and_scales(settings: dict[str, float], bytes_: int) -> None:
    upload: tree.Tree = {"a": torch.zeros(600), "b": torch.zeros(20, 20)}
    assert uploads.compressed_bytes(upload, DefenceConfig(**settings)) == bytes_


def test_a_run_counts_the_bytes_of_compressed_uploads() -> None:
    plain, small = fit("fedavg", rounds=2), fit("fedavg", rounds=2, top_k=0.1)
    entries = len(shared_of(plain))
    kept = math.ceil(0.1 * entries)
    assert plain.summary["bytes_up"] == 2 * 4 * 4 * entries
    assert small.summary["bytes_up"] == 2 * 4 * (4 * kept + math.ceil(entries / 8))
    assert small.summary["bytes_down"] == plain.summary["bytes_down"]


# Runs.


class Stop(Callback):
    """Ends a run as a kill would."""

    def on_evaluate(self, record: dict[str, object]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("settings", [CLIENT, EXAMPLE], ids=["client", "example"])
def test_a_resumed_run_has_the_numbers_of_an_uninterrupted_one(settings: dict[str, float], tmp_path: Path) -> None:
    whole = fit("gpfl", rounds=4, checkpoint_every=1, out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt):
        fit("gpfl", rounds=4, checkpoint_every=1, out=tmp_path / "cut", callbacks=[Stop()], **settings)
    resumed = gpfl.resume(tmp_path / "cut", federation=toy_federation())
    assert torch.equal(shared_of(whole), shared_of(resumed))
    assert isinstance(resumed.engine.method, Defended)
    assert resumed.summary["privacy"] == whole.summary["privacy"]


def test_without_a_defence_the_method_is_unchanged(tmp_path: Path) -> None:
    result = fit("fedavg", rounds=1, out=tmp_path / "run")
    assert type(result.engine.method) is gpfl.methods.METHODS["fedavg"]
    assert "defence" not in (tmp_path / "run" / "config.toml").read_text()
    assert not {"defence", "privacy"} & result.summary.keys()


def test_the_command_records_the_defence_and_prints_its_guarantee(command: Command, tmp_path: Path) -> None:
    said = command(
        "run", "--data", "toy", "--method", "fedavg", "--clip", "0.5", "--noise", "2", "--delta", "1e-3", "--out", "run"
    )
    assert said.code == 0, said.err
    assert "Client level: updates clipped to L2 norm 0.5, noise multiplier 2. After " in said.out
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["defence"] | {"noise": 2.0, "clip": 0.5, "delta": 1e-3} == config["defence"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["privacy"]["client"]["epsilon"] > summary["privacy"]["client"]["epsilon_if_poisson"] > 0
    assert summary["defence"]["noise"] == 2.0


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        (("--clip", "0.5"), "is part of the update that is clipped"),
        (("--top-k", "0.1"), "is part of the update that is reduced to its largest entries"),
        (("--clip", "0.5", "--mu", "0"), ""),
        (("--bits", "4"), ""),
        (("--example-clip", "1", "--mlg-norm", "sample_mean"), ""),
    ],
)
def test_weight_decay_in_a_bounded_update_gives_a_warning(command: Command, flags: tuple[str, ...], warning: str) -> None:
    ended = command("run", "--data", "toy", "--method", "gpfl", "--rounds", "1", "--out", "run", *flags)
    assert ended.code == 0, ended.err
    assert ("Weight decay changes cov and gce" in ended.out) == bool(warning)
    assert warning in ended.out


def test_comparisons_do_not_mix_defences(command: Command) -> None:
    flags = ("compare", "--data", "toy", "--methods", "fedavg,fedper", "--seeds", "0", "--out", "both")
    assert command(*flags, "--clip", "0.1").code == 0
    said = command(*flags)
    assert (said.code, "under a defence, now there is none" in said.err) == (2, True)
    assert "holds trials with defence.clip (--clip) = 0.1, now it is 0.2" in command(*flags, "--clip", "0.2").err


def test_models_of_a_defended_run_load_like_others(tmp_path: Path) -> None:
    result = fit("gpfl", rounds=1, out=tmp_path / "run", **CLIENT, **EXAMPLE)
    x = toy_federation().table.x[:5]
    loaded = gpfl.load_model(next((tmp_path / "run" / "models").iterdir()))
    assert np.allclose(loaded.logits(x), result.clients[0].logits(x), atol=1e-6)
    assert result.personalize(x.numpy(), np.array([0, 1, 2, 0, 1]), rounds=1).predict(x).shape == (5,)
