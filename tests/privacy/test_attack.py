"""Attacks on uploads: one that must win, one that must not, and what they are given."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command
from torch import Tensor, nn

import gpfl
from gpfl.core import tree
from gpfl.core.local_round import local_round
from gpfl.core.method import Method
from gpfl.engine import Engine
from gpfl.experiments import privacy_table as columns
from gpfl.methods import METHODS
from gpfl.models.architecture import net_from_architecture
from gpfl.models.cnn4 import CNN4
from gpfl.models.splitting import net_from_module
from gpfl.privacy import attack, lbfgs, measures
from gpfl.privacy import victims as victim
from gpfl.privacy.attack import AttackConfig, AttackRunner, Case, rebuild
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.matching import Matching, cosine_distance, cotangent
from gpfl.privacy.server_view import ServerView, view_of
from gpfl.privacy.victims import Victim
from gpfl.report import attack_images as pictures
from gpfl.report import attack_tables as table

SIDE = 8


def smooth() -> nn.Module:
    """A small net without corners."""
    base = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 8, 5, stride=2, padding=2), nn.Tanh(), nn.Flatten()
    )
    return nn.Sequential(base, nn.Linear(8 * (SIDE // 2) ** 2, 4))


def blobs(rows: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Soft spots of light, four classes by their quarter."""
    draw = np.random.default_rng(0)
    y = np.arange(rows) % 4
    places = np.stack([2 + 4 * (y // 2), 2 + 4 * (y % 2)], 1) + draw.uniform(-1, 1, (rows, 2))
    grid = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"), -1)
    x = np.exp(-((grid[None] - places[:, None, None]) ** 2).sum(-1) / draw.uniform(3, 8, (rows, 1, 1)))
    return (255 * x).astype(np.uint8)[:, None], y


def trained(method: str, out: Path | None = None, rounds: int = 1, **settings: object) -> gpfl.Result:
    x, y = blobs()
    federation = gpfl.federate(
        gpfl.Table(x, y, name="blobs"), partition="pathological", clients=4, classes_per_client=2, balanced=True
    )
    return gpfl.fit(method, federation, net=smooth, head="1", rounds=rounds, lr=0.1, device="cpu", out=out, **settings)


@pytest.fixture(scope="module")
def results() -> dict[str, gpfl.Result]:
    return {name: trained(name) for name in columns.METHODS}


def one_image(result: gpfl.Result, count: int = 1) -> tuple[list[Victim], list[ServerView], Tensor]:
    victims = victim.choose_victims(result.federation, [0], count, [1], 0)[1]
    seen = victim.uploads_of(result.engine, victim.state_at(result, "0"), victims, "one")
    return victims, seen, victim.images_of(result.federation, victims)


@pytest.mark.parametrize(
    ("kind", "target", "iterations"), [("dlg", "model", 200), ("geiping", "model", 250), ("geiping", "fe", 400)]
)
def test_one_image_is_rebuilt_from_one_exact_gradient(
    results: dict[str, gpfl.Result], kind: str, target: str, iterations: int
) -> None:
    _, seen, true = one_image(results["fedavg"])
    found = rebuild(seen, target, kind, true.shape[1:], [(0,)], AttackConfig(iterations=iterations, restarts=2))
    assert float(measures.psnr(true, found.images)) > 25


@pytest.mark.parametrize("kind", attack.KINDS)
def test_nothing_is_rebuilt_from_noise(results: dict[str, gpfl.Result], kind: str) -> None:
    victims, seen, true = one_image(results["fedavg"], 4)
    generator = torch.Generator().manual_seed(0)
    noisy = [
        dataclasses.replace(
            one, upload=tree.map_leaves(lambda t: t + 100 * torch.randn(t.shape, generator=generator), one.upload)
        )
        for one in seen
    ]
    keys = [(one.rows[0],) for one in victims]
    found = rebuild(noisy, "model", kind, true.shape[1:], keys, AttackConfig(iterations=40, restarts=1))
    blank = victim.mean_image(results["fedavg"].federation).expand_as(true)
    assert float(measures.psnr(true, found.images).mean()) < float(measures.psnr(true, blank).mean())


# What the attacker is given.


@pytest.mark.parametrize("name", METHODS)
def test_nothing_private_reaches_the_attacker(name: str) -> None:
    engine, state = whole(trained(name, batch_size=4))
    for steps in victim.STEPS:
        for seen in victim.uploads_of(engine, state, [Victim(0, tuple(engine.federation.shards[0].train[:4].tolist()))], steps):
            allowed = set(engine.method.shared_parts)
            assert set(seen.sent) <= allowed
            assert set(seen.upload) <= allowed
            assert not {"head", "personal_head", "personal"} & (set(seen.sent) | set(seen.upload)) - allowed
            assert set(seen.known) <= allowed | {"batch_norm_stats"}


def whole(result: gpfl.Result) -> tuple[Engine, gpfl.training.run_dir.State]:
    return result.engine, victim.state_at(result, "best")


def test_private_parts_cannot_be_put_in(results: dict[str, gpfl.Result]) -> None:
    _, (seen,), _ = one_image(results["fedper"])
    with pytest.raises(gpfl.GpflError, match="does not see 'head' of fedper"):
        dataclasses.replace(seen, upload={**seen.upload, "head": {}})


def test_what_is_rebuilt_does_not_depend_on_a_model_that_stays_at_home() -> None:
    engine, state = whole(trained("ditto"))
    chosen = [Victim(0, (int(engine.federation.shards[0].train[0]),))]
    other = state._replace(private=tree.map_leaves(lambda t: t + 1, state.private))
    seen = [victim.uploads_of(engine, one, chosen, "one") for one in (state, other)]
    first, second = (
        rebuild(one, "model", "geiping", (1, 1, SIDE, SIDE), [(0,)], AttackConfig(iterations=3, restarts=1)) for one in seen
    )
    assert torch.equal(first.images, second.images)


def test_an_epoch_is_the_upload_of_the_runs_own_round(results: dict[str, gpfl.Result]) -> None:
    engine, state = whole(results["fedavg"])
    (seen,) = victim.uploads_of(engine, state, [Victim(1, (0,))], "epoch")
    facts = engine.client_info([1], state.round).select(0)
    plan = engine.plan(1, state.round)
    private = tree.take(state.private, 1)
    update = local_round(engine.method, state.shared, private, engine.federation.table, plan, facts)
    assert seen.steps == len(plan[-1]) > 0
    assert all(torch.equal(a, b) for a, b in tree.zip_leaves(seen.upload, update.upload))


def test_methods_offer_the_papers_targets() -> None:
    offered = {column.method: set(gradient_targets(bound(METHODS[column.method]()))) for column in columns.COLUMNS}
    assert offered == {
        "fedper": {"fe"},
        "fedrep": {"fe"},
        "fedavg": {"fe", "model"},
        "fedrod": {"fe", "model"},
        "gpfl": {"fe", "sfe", "sm"},
    }
    assert set(gradient_targets(bound(METHODS["gpfl"](without=("cov", "gce"))))) == {"fe"}
    with pytest.raises(gpfl.GpflError, match="fedproto has no target 'fe'"):
        view_of(bound(METHODS["fedproto"]()), "fe")


def bound(method: Method) -> Method:
    return method.bind(gpfl_net(), lr=0.1, epochs=1)


def gpfl_net() -> gpfl.core.net.Net:
    return net_from_module(smooth, torch.zeros(2, 1, SIDE, SIDE), 4, head="1")


def test_gpfls_sfe_is_the_global_route(results: dict[str, gpfl.Result]) -> None:
    method = results["gpfl"].engine.method
    shared = results["gpfl"].outcome.last.shared
    x = torch.rand(3, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    model = gpfl.core.net.Model(method.net, shared)
    from gpfl.methods.gpfl import embeddings_of, valve

    f = valve(model["cov"], model("base", x), embeddings_of(shared).mean(0))
    torch.testing.assert_close(gradient_targets(method)["sfe"].output(model, x), f)
    unit = torch.nn.functional.normalize
    torch.testing.assert_close(
        gradient_targets(method)["sm"].output(model, x), unit(f, dim=-1) @ unit(embeddings_of(shared), dim=-1).T
    )


# Victims, L-BFGS, cases.


def test_all_sizes_of_batch_have_the_same_images(results: dict[str, gpfl.Result]) -> None:
    chosen = victim.choose_victims(results["fedavg"].federation, [0, 2], 8, [1, 4], 3)
    rows = {batch: [row for one in victims for row in one.rows] for batch, victims in chosen.items()}
    assert rows[1] == rows[4]
    assert len(set(rows[1])) == 8
    for one in chosen[4]:
        assert set(one.rows) <= set(results["fedavg"].federation.shards[one.client].train.tolist())
    with pytest.raises(gpfl.GpflError, match="must be a multiple of 4"):
        victim.choose_victims(results["fedavg"].federation, [0], 6, [1, 4], 3)


def test_lbfgs_solves_many_problems_each_at_its_own_pace() -> None:
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 12, generator=draw)
    scales = torch.logspace(0, 3, 12)[None] * torch.tensor([1.0, 0.1, 10.0, 1.0, 100.0])[:, None]

    def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
        away = points - centres
        return 2 * scales * away + 4 * away**3, (scales * away**2 + away**4).sum(-1)

    state = lbfgs.begin(torch.zeros(5, 12), evaluate)
    for _ in range(120):
        state = lbfgs.advance(state, evaluate)
    torch.testing.assert_close(tree.leaf(state, "point"), centres, atol=1e-3, rtol=1e-3)


def test_victims_at_once_are_rebuilt_as_alone(results: dict[str, gpfl.Result]) -> None:
    victims, seen, true = one_image(results["fedavg"], 3)
    keys = [(one.rows[0],) for one in victims]
    effort = AttackConfig(iterations=8, restarts=2)
    together = rebuild(seen, "model", "geiping", true.shape[1:], keys, effort)
    alone = rebuild(seen, "model", "geiping", true.shape[1:], keys, dataclasses.replace(effort, at_once=1))
    torch.testing.assert_close(together.images, alone.images, atol=2e-2, rtol=0)
    assert torch.equal(together.logits, alone.logits)


def test_corners_and_pools_of_the_papers_net_are_matched_at_once_as_alone() -> None:
    net = net_from_architecture(CNN4(channels=(3, 4), hidden=8), "cnn4", torch.zeros(2, 1, 16, 16), 4)
    method = METHODS["fedavg"]().bind(net, lr=0.1, epochs=1)
    draw = torch.Generator().manual_seed(0)
    images, outputs = torch.rand(3, 2, 1, 16, 16, generator=draw), torch.randn(3, 2, 8, generator=draw)
    matching = Matching(method.net, gradient_targets(method)["fe"], method.init(0)[0], cotangent)
    wanted = torch.func.vmap(matching.gradient)(images.flip(0), outputs)

    def far(image: Tensor, output: Tensor, wanted: tree.Tree) -> Tensor:
        return cosine_distance(matching.gradient(image, output), wanted)

    slopes = torch.func.vmap(torch.func.grad(far))(images, outputs, wanted)
    assert float(slopes.abs().sum()) > 0
    for place in range(3):
        alone = images[place].clone().requires_grad_()
        far(alone, outputs[place], tree.take(wanted, place)).backward()
        torch.testing.assert_close(slopes[place], alone.grad, atol=1e-6, rtol=1e-4)


def test_finished_cases_are_not_attacked_again(
    results: dict[str, gpfl.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = results["fedavg"]
    victims = victim.choose_victims(result.federation, [0], 2, [1], 0)
    effort = AttackConfig(iterations=5, restarts=1)
    bench = AttackRunner(result.engine, {"0": victim.state_at(result, "0")}, victims, effort)
    cases = [Case("fedavg", "fe", "geiping", "0", steps, 1) for steps in victim.STEPS]
    first = bench.attack(cases, tmp_path, lambda case, kept: None)
    monkeypatch.setattr(attack, "rebuild", lambda *given: pytest.fail("attacked again"))
    again = bench.attack(cases, tmp_path, lambda case, kept: None)
    assert [kept.records for kept in again.values()] == [kept.records for kept in first.values()]
    harder = AttackRunner(result.engine, bench.states, victims, dataclasses.replace(effort, iterations=6))
    assert harder.held(cases[0], tmp_path) is None


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"batch_size": 5}])
def test_a_whole_round_of_other_steps_is_attacked_anew(
    results: dict[str, gpfl.Result], tmp_path: Path, settings: dict[str, int]
) -> None:
    cases = [Case("fedavg", "fe", "geiping", "0", steps, 1) for steps in victim.STEPS]
    victims = victim.choose_victims(results["fedavg"].federation, [0], 1, [1], 0)
    benches = [
        AttackRunner(result.engine, {"0": victim.state_at(result, "0")}, victims, AttackConfig(iterations=1, restarts=1))
        for result in (results["fedavg"], trained("fedavg", **settings))
    ]
    benches[0].attack(cases, tmp_path, lambda case, kept: None)
    assert [benches[0].held(case, tmp_path) is not None for case in cases] == [True, True]
    assert [benches[1].held(case, tmp_path) is not None for case in cases] == [True, False], "one step is the same in both"


def test_a_weak_attack_is_said_to_prove_nothing(results: dict[str, gpfl.Result], tmp_path: Path) -> None:
    result = results["fedavg"]
    victims = victim.choose_victims(result.federation, [0, 1, 2, 3], 8, [1], 0)
    bench, top = attack.ceiling_of(result.engine, victims, "dlg", AttackConfig(iterations=1, restarts=1))
    done = bench.attack([top], None, lambda case, kept: None)
    text = table.markdown(done, (top, done[top]), "proper", "title")
    assert "proves nothing" in text
    assert "at the floor" in text


def test_a_verdict_says_what_the_images_say() -> None:
    case = Case("fedavg", "model", "geiping", "0", "one", 1)

    def verdict(*psnrs: float) -> str:
        same = {"psnr": 0.0, "ssim": 0.5, "either_ssim": 0.5, "turned": False}
        floors = {"either_start_psnr": 8.0, "either_mean_psnr": 10.0}
        records = [{**same, **floors, "either_psnr": psnr} for psnr in psnrs]
        return table.verdict(table.line_of(case, attack.Kept(records, torch.zeros(0), torch.zeros(0))))

    assert verdict(*range(20, 28)) == "leaks"
    assert verdict(*range(1, 9)) == "at the floor"
    assert verdict(30, 30.5, 31, 31.5, 5, 4, 3, 2) == "above the floor, not for certain"
    assert verdict(20, 21) == "above the floor (too few images to test)"
    assert verdict(5, 6) == "at the floor (too few images to test)"


def test_nine_columns_stand_beside_the_papers(results: dict[str, gpfl.Result], tmp_path: Path) -> None:
    effort = AttackConfig(iterations=2, restarts=1)
    paths = columns.nine_columns(results, tmp_path, kinds=("geiping",), images=2, batches=(2,), rounds=("0",), effort=effort)
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert (
        "| setting | Per-fe | Rep-fe | Avg-fe | Avg | RoD-fe | RoD | GPFL-fe | GPFL-sfe | GPFL-sm | start | mean image |"
        in text
    )
    assert "| paper, Cifar100 | 7.94 | 7.73 | 6.92 | 7.30 | 6.82 | 7.48 | 6.56 | 6.41 | 6.71 |" in text
    assert text.count("![grid geiping round 0 ") == 2
    for line in ("round 0, one step, batch 2", "round 0, one epoch, batch 2"):
        assert line in text
    assert all(path.is_file() for path in paths)
    held = columns.read(tmp_path / "results.json")
    assert dict(held.rounds) == {name: results[name].outcome.selected.round for name in columns.METHODS}
    pictures = {"geiping": [path for path in paths if path.suffix == ".png"]}
    assert columns.page(held, "proper", "", pictures) == text, "all numbers of the page are in the records"
    assert columns.page(held, "proper", "Made by hand.").endswith("\n\nMade by hand.\n")
    with pytest.raises(gpfl.GpflError, match="gpfl is missing"):
        columns.nine_columns({name: results[name] for name in columns.METHODS[:-1]}, tmp_path)


def test_the_nine_columns_can_be_by_the_papers_formula(results: dict[str, gpfl.Result], tmp_path: Path) -> None:
    given = {"kinds": ("dlg",), "images": 1, "batches": (1,), "steps": ("one",), "rounds": ("0",)}
    lines = []
    for psnr in table.PSNRS:
        columns.nine_columns(results, tmp_path, **given, effort=AttackConfig(iterations=1, restarts=1), psnr=psnr)
        text = (tmp_path / "table.md").read_text(encoding="utf-8")
        lines.append(next(line for line in text.splitlines() if line.startswith("| round 0")))
    starts = [float(line.split("|")[-3]) for line in lines]
    assert starts[0] - starts[1] == pytest.approx(10 * np.log10(4 / 3), abs=0.011)
    assert "All is by the formula of the paper's row" in text


def test_the_title_of_few_pictures_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(pictures.drawing, "write", lambda figure, stem: drawn.append(figure) or [])
    title = "gpfl on digits: what 'geiping' rebuilds from uploads; PSNR in dB"
    pictures.draw_grid(torch.zeros(1, 1, 8, 8), [], title, tmp_path)
    (figure,) = drawn
    figure.draw_without_rendering()
    extent = figure._suptitle.get_window_extent()
    assert extent.x0 >= 0
    assert extent.x1 <= figure.bbox.width


# The command.


def test_the_command_says_what_it_prints_and_what_it_cannot_do(command: Command) -> None:
    run = ("run", "--data", "digits", "--net", "mlp", "--hidden", 8, "--rounds", 1, "--device", "cpu", "--method", "fedavg")
    assert command(*run, "--out", "r").code == 0
    call = ("attack", "r", "--target", "model", "--images", 1, "--iterations", 2, "--restarts", 1, "--graph")
    words = []
    for psnr in table.PSNRS:
        said = command(*call, "--psnr", psnr)
        assert "--graph is for a GPU; on cpu attacks run without it." in said.out
        words.append([line.split("(start ")[1] for line in said.out.splitlines() if line.startswith("fedavg model")])
    starts = [float(text.split(",")[0]) for (text,) in words]
    assert starts[0] - starts[1] == pytest.approx(10 * np.log10(4 / 3), abs=0.011)


def test_the_command_attacks_a_run(command: Command) -> None:
    run = ("run", "--data", "digits", "--net", "mlp", "--hidden", 8, "--rounds", 1, "--device", "cpu", "--method")
    assert command(*run, "gpfl", "--out", "r").code == 0
    call = ("attack", "r", "--client", 3, "--images", 2, "--batch", 1, "--iterations", 3, "--restarts", 1, "--out", "a")
    said = command(*call, "--kind", "geiping", "--target", "sm", "--steps", "one,epoch")
    assert said.code == 0, said.err
    assert "gpfl sm, geiping, round 0, one epoch, batch 1" in said.out
    for name in ("table.md", "results.json", "grid-geiping.png", "grid-geiping.pdf"):
        assert Path("a", name).is_file()
    assert Path("a", "table.md").read_text(encoding="utf-8").endswith("\n\n![grid geiping](grid-geiping.png)\n")
    said = command("attack", "r", "--labels", "--membership", "--round", "0,best", "--client", "0,1")
    assert said.code == 0, said.err
    assert "Labels: from gpfl's upload" in said.out
    assert "AUC" in said.out
    for words, complaint in (
        (("--target", "model"), "gpfl has no target 'model': it offers fe, sfe, sm"),
        (("--client", "77"), "no client '77'"),
        (("--kind", "dgl"), "did you mean 'dlg'?"),
        (("--batch", "0"), "each must be at least 1"),
        (("--iterations", "0"), "--iterations is 0; it must be at least 1"),
        (("--out", "r/config.toml"), "cannot make the folder r/config.toml"),
    ):
        refused = command("attack", "r", *words)
        assert refused.code == 2
        assert complaint in refused.err


REFUSED = (
    (("--target", "model"), "gpfl", "gpfl has no target 'model'"),
    (("--target", "fe,model"), "gpfl", "gpfl has no target 'model'"),
    (("--labels", "--membership", "--kind", "dlg", "--target", "all"), "fedproto", "fedproto has no target"),
    (("--labels", "--kind", "dlg"), "toy", "attacks rebuild images"),
    (("--images", 0), "gpfl", "--images is 0"),
    (("--images", 3, "--batch", 2), "gpfl", "it must be a multiple of 2"),
    (("--images", 5000), "gpfl", "of them are asked for"),
    (("--client", 0, "--images", 1, "--steps", "epoch"), "perfedavg", "client 0 has too few rows to train"),
    (("--client", 0, "--labels"), "perfedavg", "client 0 has too few rows to train"),
    (("--labels",), "nowhere", "nowhere holds no run"),
)


def test_an_attack_that_is_refused_leaves_nothing_behind(command: Command, tmp_path: Path) -> None:
    run = ("run", "--hidden", 8, "--rounds", 1, "--device", "cpu")
    for name in ("gpfl", "fedproto", "perfedavg"):
        assert command(*run, "--data", "digits", "--batch-size", 40, "--method", name, "--out", name).code == 0
    assert command(*run, "--data", "toy", "--method", "fedavg", "--out", "toy").code == 0
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for words, name, complaint in REFUSED:
        for out in ((), ("--out", "new/deep"), ("--out", "there")):
            refused = command("attack", name, *words, *out)
            assert (refused.code, refused.out) == (2, ""), (name, words)
            assert complaint in refused.err
            assert sorted(tmp_path.rglob("*")) == before, (name, words, out)


@pytest.mark.parametrize("steps", ["one", "one,epoch"])
def test_a_batch_that_a_net_cannot_train_on_is_refused_before_anything_is_attacked(
    command: Command, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    assert command("run", "--hidden", 8, "--rounds", 1, "--device", "cpu", "--method", "fedavg", "--out", "r").code == 0
    monkeypatch.setattr("gpfl.core.module_checks.trains_on_single_sample", lambda parts, example: False)  # as with BatchNorm
    refused = command("attack", "r", "--images", 2, "--iterations", 1, "--steps", steps)
    assert "net 'mlp' trains on batches of at least 2 rows: raise --batch" in refused.err
    assert not Path("r", "attack").exists()


def test_a_folder_of_several_seeds_is_refused_with_the_run_to_name(command: Command) -> None:
    run = ("run", "--data", "toy", "--method", "fedavg", "--rounds", 1, "--device", "cpu", "--seeds", "0,1", "--out", "r")
    assert command(*run).code == 0
    refused = command("attack", "r", "--labels")
    assert refused.code == 2
    assert "r holds the trials of 2 seeds: name one of them, such as r/seed-0" in refused.err
    assert command("attack", "r/seed-0", "--labels").code == 0
