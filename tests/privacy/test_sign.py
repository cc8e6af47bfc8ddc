"""Images that come back as their negatives: the attack tries both signs, and measures count either, for the floors too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from privacy.test_attack import trained
from torch import Tensor

import gpfl
from gpfl.core import tree
from gpfl.io.tensors import read_tensors, write_tensors
from gpfl.privacy import attack, geiping, measures
from gpfl.privacy import victims as victim
from gpfl.privacy.attack import AttackConfig, AttackRunner, Case, Kept, Rebuilt
from gpfl.privacy.geiping import Geiping
from gpfl.privacy.gradient_targets import gradient_targets
from gpfl.privacy.matching import Matching, cotangent, gradients_of, start_images
from gpfl.report import attack_images as pictures
from gpfl.report import attack_tables as table

CASE = Case("fedavg", "fe", "geiping", "0", "one", 1)


@pytest.fixture(scope="module")
def result() -> gpfl.Result:
    return trained("fedavg", rounds=10)


def bench_of(result: gpfl.Result, images: int = 2, batch: int = 1, effort: AttackConfig | None = None) -> AttackRunner:
    victims = victim.choose_victims(result.federation, [0, 1], images, [batch], 3)
    return AttackRunner(
        result.engine, {"0": victim.state_at(result, "0")}, victims, effort or AttackConfig(iterations=3, restarts=1)
    )


# The search.


def upright(true: Tensor, found: Tensor) -> Tensor:
    return measures.psnr(true, found).flatten() > measures.psnr(true, 1 - found).flatten()


def test_a_search_that_ends_at_negatives_is_set_right_by_the_gradient_alone(result: gpfl.Result) -> None:
    victims = victim.choose_victims(result.federation, range(4), 8, [1], 3)[1]
    seen = victim.uploads_of(result.engine, victim.state_at(result, "best"), victims, "one")
    true = victim.images_of(result.federation, victims)
    method = result.engine.method
    matching = Matching(method.net, gradient_targets(method)["fe"], seen[0].known, cotangent)
    wanted = gradients_of(seen, gradient_targets(method)["fe"])
    how = Geiping(iterations=200)
    found, far = geiping.invert_freely(matching, wanted, 1 - (0.1 + 0.8 * true), how)
    wrong = ~upright(true, found)
    assert int(wrong.sum()) >= 6, "from the negative of an image a search by itself mostly ends there"
    settled, nearer = geiping.settle_sign(matching, wanted, found, far, how)
    assert int(upright(true, settled)[wrong].sum()) >= int(wrong.sum()) - 1
    assert bool((nearer <= far).all())


def test_the_strong_attack_tries_the_negative_of_single_images_only(
    result: gpfl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def settle(matching: Matching, wanted: tree.Tree, image: Tensor, far: Tensor, how: Geiping) -> tuple[Tensor, Tensor]:
        asked.append(tuple(image.shape))
        return 1 - image, far / 2

    monkeypatch.setattr(geiping, "settle_sign", settle)
    for batch, target in ((1, "fe"), (2, "fe"), (1, "model")):
        bench = bench_of(result, 2, batch, AttackConfig(iterations=2, restarts=2, at_once=3))
        bench.attack([Case("fedavg", target, "geiping", "0", "one", batch)], None, lambda case, kept: None)
    assert asked == [(2, 1, 1, 8, 8)], "not of batches, nor where labels are known"


def test_every_second_start_is_the_negative_of_the_one_before() -> None:
    starts = start_images((1, 4, 4), [(7, restart) for restart in range(4)], 0)
    assert torch.equal(starts[1], -starts[0])
    assert torch.equal(starts[3], -starts[2])
    assert not torch.equal(starts[2].abs(), starts[0].abs())


# The measures.


def measured(result: gpfl.Result, found: Tensor, batch: int = 1) -> Kept:
    """The records of a case in which an attack had found these images of a bench's victims."""
    bench = bench_of(result, found.shape[0] * batch, batch)
    true = victim.images_of(result.federation, bench.victims[batch])
    logits = torch.randn(true.shape, generator=torch.Generator().manual_seed(0))
    case = Case("fedavg", "fe", "geiping", "0", "one", batch)
    return bench.measured(case, Rebuilt(found, torch.zeros(len(true)), logits), true, 0.0)


def test_a_negative_counts_as_rebuilt_and_is_said_to_be_turned(result: gpfl.Result) -> None:
    bench = bench_of(result, 8)
    true = victim.images_of(result.federation, bench.victims[1])
    found = torch.cat([1 - true[:3], true[3:]])
    kept = measured(result, found)
    assert [record["turned"] for record in kept.records] == [True] * 3 + [False] * 5
    assert all(record["either_psnr"] == 100 for record in kept.records)
    assert kept.records[0]["psnr"] < 10
    assert kept.records[0]["ssim"] < kept.records[0]["either_ssim"] == pytest.approx(1)
    torch.testing.assert_close(kept.found, true.flatten(0, 1))
    line = table.line_of(CASE, kept)
    assert (line.psnr, line.turned) == (100, 3)
    assert line.psnr_as_found < 70
    assert table.verdict(line) == "leaks"


def test_signs_of_a_batch_are_one_by_one_and_its_order_is_that_which_fits(result: gpfl.Result) -> None:
    bench = bench_of(result, 4, 4)
    true = victim.images_of(result.federation, bench.victims[4])
    found = true[:, [2, 0, 3, 1]].clone()
    found[:, 1] = 1 - found[:, 1]  # the first of the true ones
    kept = measured(result, found, 4)
    assert [record["turned"] for record in kept.records] == [True, False, False, False]
    assert all(record["either_psnr"] == 100 for record in kept.records)


def test_floors_are_measured_by_the_same_rule(result: gpfl.Result) -> None:
    bench = bench_of(result, 8)
    true = victim.images_of(result.federation, bench.victims[1])
    blank = victim.mean_image(result.federation)
    start = torch.sigmoid(torch.randn(true.shape, generator=torch.Generator().manual_seed(0)))
    for guess, floor in (
        (start, "either_start_psnr"),
        (1 - start, "either_start_psnr"),
        (blank.expand_as(true), "either_mean_psnr"),
    ):
        for record in measured(result, guess).records:
            assert record["either_psnr"] == pytest.approx(record[floor], abs=1e-5), (
                "what is no attack is no better than its floor"
            )
    line = table.line_of(CASE, measured(result, 1 - start))
    assert line.start > float(measures.psnr(true, start).mean()), "the start may be turned too"
    assert table.verdict(line) == "at the floor"


def test_the_reference_formula_is_a_constant_away(result: gpfl.Result) -> None:
    kept = measured(result, torch.full((8, 1, 1, 8, 8), 0.3))
    line = table.line_of(CASE, kept, "reference")
    assert line.psnr_as_found == pytest.approx(table.numbers(kept.records, "reference_psnr").mean(), abs=1e-5)
    assert line.leaks == table.line_of(CASE, kept).leaks


def test_tables_say_which_number_is_which(result: gpfl.Result) -> None:
    true = victim.images_of(result.federation, bench_of(result, 8).victims[1])
    kept = measured(result, 1 - true)
    text = table.markdown({CASE: kept}, (CASE, kept), "proper", "title")
    assert "| turned | PSNR as found | SSIM as found |" in text
    assert "| 8 | 100.00 ± 0.00 | 1.000 |" in text
    assert "under either sign" in text


def test_pictures_mark_what_was_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(pictures.drawing, "write", lambda figure, stem: drawn.append(figure) or [])
    images = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    pictures.draw_grid(images, [pictures.Row("fe", images, [20.0, 30.0], [True, False])], "title", tmp_path / "grid")
    assert [axes.get_xlabel() for axes in drawn[0].axes[2:]] == ["20.0 neg.", "30.0"]
    assert "negative" in drawn[0].get_supxlabel()


# What was kept before.


def test_cases_kept_without_these_measures_are_attacked_again(result: gpfl.Result, tmp_path: Path) -> None:
    bench = bench_of(result)
    bench.attack([CASE], tmp_path, lambda case, kept: None)
    path = attack.case_file(tmp_path, CASE)
    flat, facts = read_tensors(path)
    settings = {name: value for name, value in facts["settings"].items() if name != "form"}
    records = [{name: value for name, value in record.items() if "either" not in name} for record in facts["records"]]
    write_tensors(path, flat, {"settings": settings, "records": records})
    assert bench.held(CASE, tmp_path) is None
    told = []
    bench.attack([CASE], tmp_path, lambda case, kept: told.append(table.line_of(case, kept)))
    assert len(told) == 1
    assert bench.held(CASE, tmp_path) is not None
