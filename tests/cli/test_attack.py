"""The command `gpfl attack`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import Command

from gpfl.privacy import reconstruction
from gpfl.privacy.attack_runner import PSNR_FORMULAS

RUN = ("run", "--data", "digits", "--net", "mlp", "--hidden", 8, "--rounds", 1, "--device", "cpu", "--method")
QUICK = ("--iterations", 2, "--restarts", 1)


def test_the_psnr_formula_shifts_the_printed_values(command: Command) -> None:
    assert command(*RUN, "fedavg", "--out", "r").code == 0
    starts = []
    for formula in PSNR_FORMULAS:
        result = command("attack", "r", "--target", "model", "--images", 1, *QUICK, "--graph", "--psnr", formula)
        assert "--graph is for a GPU; on cpu attacks run without it." in result.out
        (line,) = (line for line in result.out.splitlines() if line.startswith("fedavg model"))
        starts.append(float(line.split("(start ")[1].split(",")[0]))
    assert starts[0] - starts[1] == pytest.approx(10 * np.log10(4 / 3), abs=0.011)


def test_the_command_reconstructs_images_and_infers_labels_and_members(command: Command) -> None:
    assert command(*RUN, "gpfl", "--out", "r").code == 0
    flags = ("--client", 3, "--images", 2, "--batch", 1, *QUICK, "--out", "a")
    result = command("attack", "r", *flags, "--kind", "geiping", "--target", "sm", "--steps", "one,epoch")
    assert result.code == 0, result.err
    assert "gpfl sm, geiping, round 0, one epoch, batch 1" in result.out
    for name in ("table.md", "results.json", "grid-geiping.png", "grid-geiping.pdf"):
        assert Path("a", name).is_file()
    assert Path("a", "table.md").read_text(encoding="utf-8").endswith("\n![grid geiping](grid-geiping.png)\n")
    result = command("attack", "r", "--labels", "--membership", "--round", "0,best", "--client", "0,1")
    assert result.code == 0, result.err
    assert "Labels: from uploads of gpfl" in result.out
    assert "AUC" in result.out
    for flags, message in (
        (("--target", "model"), "gpfl has no target 'model': it offers fe, sfe, sm"),
        (("--client", "77"), "no client '77'"),
        (("--kind", "dgl"), "did you mean 'dlg'?"),
        (("--batch", "0"), "attack.batch (--batch) is 0; it must be at least 1"),
        (("--iterations", "0"), "attack.iterations (--iterations) is 0; it must be at least 1"),
        (("--psnr", "nice"), "attack.psnr (--psnr) is 'nice'; it must be one of proper, reference"),
        (("--out", "r/config.toml"), "--out r/config.toml is a file; choose a folder"),
    ):
        result = command("attack", "r", *flags)
        assert result.code == 2
        assert message in result.err


REJECTED = (
    (("--target", "model"), "gpfl", "gpfl has no target 'model'"),
    (("--target", "fe,model"), "gpfl", "gpfl has no target 'model'"),
    (("--labels", "--membership", "--kind", "dlg", "--target", "all"), "fedproto", "fedproto has no target"),
    (("--labels", "--kind", "dlg"), "toy", "attacks reconstruct images"),
    (("--images", 0), "gpfl", "attack.images (--images) is 0; it must be at least 1"),
    (("--images", 3, "--batch", 2), "gpfl", "it must be a multiple of 2"),
    (("--images", 5000), "gpfl", "the attack needs"),
    (("--client", 0, "--images", 1, "--steps", "epoch"), "perfedavg", "client 0 has too few samples to train"),
    (("--client", 0, "--labels"), "perfedavg", "client 0 has too few samples to train"),
    (("--labels",), "nowhere", "nowhere holds no run"),
)


def test_a_rejected_attack_writes_nothing(command: Command, tmp_path: Path) -> None:
    run = ("run", "--hidden", 8, "--rounds", 1, "--device", "cpu")
    for name in ("gpfl", "fedproto", "perfedavg"):
        assert command(*run, "--data", "digits", "--batch-size", 40, "--method", name, "--out", name).code == 0
    assert command(*run, "--data", "toy", "--method", "fedavg", "--out", "toy").code == 0
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for flags, name, message in REJECTED:
        for out in ((), ("--out", "new/deep"), ("--out", "there")):
            result = command("attack", name, *flags, *out)
            assert (result.code, result.out) == (2, ""), (name, flags)
            assert message in result.err
            assert sorted(tmp_path.rglob("*")) == before, (name, flags, out)


@pytest.mark.parametrize("steps", ["one", "one,epoch"])
def test_a_batch_too_small_for_the_net_is_rejected_before_the_attack(
    command: Command, monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    assert command("run", "--hidden", 8, "--rounds", 1, "--device", "cpu", "--method", "fedavg", "--out", "r").code == 0
    monkeypatch.setattr("gpfl.core.module_checks.trains_on_single_sample", lambda parts, example: False)  # as with BatchNorm
    result = command("attack", "r", "--images", 2, "--iterations", 1, "--steps", steps)
    assert "net 'mlp' trains on batches of at least 2 samples: raise --batch" in result.err
    assert not Path("r", "attack").exists()


def test_a_folder_of_several_trials_is_rejected(command: Command) -> None:
    run = ("run", "--data", "toy", "--method", "fedavg", "--rounds", 1, "--device", "cpu", "--seeds", "0,1", "--out", "r")
    assert command(*run).code == 0
    result = command("attack", "r", "--labels")
    assert result.code == 2
    assert "r holds the trials of 2 seeds: choose one of them, such as r/seed-0" in result.err
    assert command("attack", "r/seed-0", "--labels").code == 0


def test_a_defended_fedavg_and_its_ceiling_are_both_saved(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(*RUN, "fedavg", "--clip", 0.1, "--out", "r").code == 0
    call = ("attack", "r", "--target", "model", "--images", 1, *QUICK)
    first = command(*call)
    monkeypatch.setattr(reconstruction, "reconstruct", lambda *given: pytest.fail("attacked again"))
    again = command(*call)
    assert again.code == 0, again.err
    assert again.out == first.out
