"""Tables of attacks, of inference and of the defence study, and the sentences around them."""

from __future__ import annotations

import dataclasses

import pytest
from privacy.blob_runs import train_on_blobs
from report.made_studies import STUDY, make_point

from gpfl.experiments.leaks import InferenceFindings
from gpfl.privacy.attack_runner import attack_ceiling
from gpfl.privacy.label_inference import LabelInference
from gpfl.privacy.membership import MembershipInference
from gpfl.privacy.reconstruction import AttackConfig
from gpfl.privacy.uploads import choose_batches
from gpfl.report.privacy_tables import (
    attack_table,
    defence_page,
    describe_label_inference,
    describe_membership_inference,
    inference_page,
)

# Attacks.


def test_a_weak_attack_is_no_evidence() -> None:
    result = train_on_blobs("fedavg")
    batches = choose_batches(result.federation, [0, 1, 2, 3], 8, [1], 0)
    case, found = attack_ceiling(result.engine, batches, "dlg", AttackConfig(iterations=1, restarts=1))
    table = attack_table({case: found}, (case, found), "proper", "title")
    text = table.to_markdown()
    assert "**No evidence**" in text
    assert "at the floor" in text
    assert "| inverted | PSNR as found | SSIM as found |" in text
    assert "count each image as itself or its negative" in text


# Inference.


def labels(guess: float | None) -> list[LabelInference]:
    return [LabelInference("0", guess, 0.6, 0.5, 0.1)]


def findings_page(guess: float | None) -> str:
    members = [MembershipInference("0", 0.6, 1.0, 1.2)]
    return inference_page([InferenceFindings("gpfl", 3, "test", 0.5, 2, {"best": labels(guess)}, members)], "")


def test_a_guess_no_better_than_the_baselines_is_named() -> None:
    assert "no better" not in findings_page(0.4)
    assert "A guess that is no better (GPFL) does not make the upload safe." in findings_page(0.55)
    assert "| GPFL | – |" in findings_page(None)
    assert "mean over 1 of 2 clients; the others have too few samples to train; 0 is exact" in findings_page(0.4)


def test_inference_is_described_with_its_baselines() -> None:
    text = describe_label_inference(labels(0.4), "gpfl", 2)
    assert "to a total variation distance of 0.400, correlation 0.10" in text
    assert "(mean over 1 of 2 clients; the others have too few samples to train; 0 is exact; guesses without an upload:" in text
    assert "uniform 0.600, all clients together 0.500" in text
    assert "have no head, embeddings or prototypes" in describe_label_inference(labels(None), "fedper", 1)
    members = [MembershipInference(str(k), auc, 1.0, 1.2) for k, auc in enumerate((0.5, 0.6, 0.7))]
    assert "AUC 0.600 ± 0.248 (mean over 3 clients; 0.5 is chance)" in describe_membership_inference(members, "gpfl")


# Defences.


def test_the_defence_page_has_a_row_for_each_point() -> None:
    page = defence_page(STUDY, "Made by hand.")
    assert "| GPFL | clip and noise, client level |  | model | leaks | 0.1 | 50.00 | 300 | 100 | 20.00 | 0.500 | 1.0 |" in page
    assert "best of 50 rounds" in page
    assert "Without this rule (points.csv), PSNR is at most 0.25 dB lower" in page
    assert "ceiling (fedavg, no defence, untrained) 30.00 dB" in page
    assert page.endswith("\n\nMade by hand.\n")


def test_the_defence_page_states_what_limits_its_numbers() -> None:
    page = defence_page(STUDY, "")
    weak = dataclasses.replace(STUDY, ceiling=10.0, ceiling_leaks=False)
    known = dataclasses.replace(make_point("gpfl", "example_noise", 1, 0.4, 12, 10.0), label_counts_known=True)
    for note, study in (
        ("**No evidence**", weak),
        (
            "Not finished: fedavg, few bits, 2: it diverged.",
            dataclasses.replace(STUDY, failed=("fedavg, few bits, 2: it diverged",)),
        ),
        ("At the example level, ε of GPFL is for replacing an example by another of its class", with_point(known)),
    ):
        assert note not in page
        assert note in defence_page(study, "")


@pytest.mark.parametrize(
    ("variant", "note"),
    [("--mlg-norm sample_mean", "the magnitude term as a mean over examples"), ("--mu 0", "has no weight decay (--mu 0)")],
)
def test_the_defence_page_explains_variants_of_gpfl(variant: str, note: str) -> None:
    assert note not in defence_page(STUDY, "")
    assert note in defence_page(
        with_point(dataclasses.replace(make_point("gpfl", "noise", 1, 0.4, 12, 10.0), variant=variant)), ""
    )


def with_point(point: object) -> object:
    return dataclasses.replace(STUDY, points=(*STUDY.points, point))
