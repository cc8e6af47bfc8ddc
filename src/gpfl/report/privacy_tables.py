"""Tables of privacy: attack cases, the paper's table, label and membership inference, and the defence study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gpfl.defences.accounting import INSTALL_COMMAND, accountant_version, format_epsilon
from gpfl.errors import pluralize
from gpfl.experiments.defence_points import ATTACK, DefencePoint, DefenceStudy
from gpfl.experiments.defence_study import FAMILIES
from gpfl.experiments.definitions import display_name
from gpfl.experiments.leaks import InferenceFindings
from gpfl.experiments.privacy_table import COLUMNS, PrivacyTable, compare_with_fedavg, paper_psnr
from gpfl.privacy.attack_runner import AttackCase, CaseResult
from gpfl.privacy.case_summary import CaseSummary, record_values, summarize_case
from gpfl.privacy.label_inference import LabelInference
from gpfl.privacy.membership import MembershipInference, confidence_interval
from gpfl.report.pages import markdown_images, render_page
from gpfl.report.tables import Bold, Cell, MeanStd, ResultColumn, ResultTable

EITHER_SIGN = (
    "PSNR, SSIM, floors and verdicts count each image as itself or its negative, whichever is closer, since a negative reveals "
    "as much; the start and the mean image are measured in the same way."
)
LEAKS = (
    "An upload leaks if the reconstructions are closer to the images than the start, a random image, and the mean image of the "
    "dataset (signed-rank test over images, p < 0.05). Lower is more private."
)
REFERENCE_FORMULA = "−10·log10(MSE/3) on net inputs from −1 to 1"


# Attack cases.


_CASE_COLUMNS: Mapping[ResultColumn, Callable[[CaseSummary], Cell]] = {
    ResultColumn("method", align="left"): lambda each: each.case.method,
    ResultColumn("target", align="left"): lambda each: each.case.target,
    ResultColumn("attack", align="left"): lambda each: each.case.kind,
    ResultColumn("round", align="left"): lambda each: each.case.round,
    ResultColumn("training", align="left"): lambda each: each.case.training,
    ResultColumn("verdict", align="left"): lambda each: each.verdict,
    ResultColumn("batch"): lambda each: each.case.batch,
    ResultColumn("images"): lambda each: each.images,
    ResultColumn("PSNR, dB", ".2f"): lambda each: MeanStd(each.psnr, each.std, each.images),
    ResultColumn("SSIM", ".3f"): lambda each: each.ssim,
    ResultColumn("start", ".2f"): lambda each: each.start_psnr,
    ResultColumn("mean image", ".2f"): lambda each: each.mean_psnr,
    ResultColumn("inverted"): lambda each: each.inverted,
    ResultColumn("PSNR as found", ".2f"): lambda each: each.psnr_as_found,
    ResultColumn("SSIM as found", ".3f"): lambda each: each.ssim_as_found,
}


def attack_table(
    results: Mapping[AttackCase, CaseResult], ceiling: tuple[AttackCase, CaseResult], formula: str, title: str
) -> ResultTable:
    """Return the table of an attack's cases, with PSNRs by one of `case_summary.PSNR_FORMULAS`."""
    summaries = [summarize_case(case, result, formula) for case, result in results.items()]
    return ResultTable.from_items(_CASE_COLUMNS, summaries, title, notes=attack_notes(ceiling, formula))


def attack_notes(ceiling: tuple[AttackCase, CaseResult], formula: str) -> list[str]:
    """Return how to read a table of cases, and whether the attack works at all."""
    top = summarize_case(*ceiling, formula)
    notes = [
        LEAKS,
        EITHER_SIGN,
        f"{_describe_ceiling(top)} In harder settings (larger batches, whole epochs, later rounds) a value at the floor may "
        "show a weak attack; attack fedavg in the same setting to compare.",
        *_ceiling_caveat(top.leaks, top.psnr, top.floor),
    ]
    if formula == "reference":
        notes.append(
            f"PSNR by the formula of the authors' code, {REFERENCE_FORMULA}. In their code an attack without iterations "
            f"reaches {_reference_start(ceiling[1]):.2f} dB on these images; the paper's values lie between 6.41 and 7.94."
        )
    return notes


def describe_summary(summary: CaseSummary) -> str:
    """Return the outcome of a case in one line."""
    inverted = f" ({summary.inverted} closer as negatives; as found {summary.psnr_as_found:.2f} dB)" if summary.inverted else ""
    return (
        f"{summary.case.description}: {summary.psnr:.2f} dB, SSIM {summary.ssim:.3f} over {summary.images} images "
        f"(start {summary.start_psnr:.2f}, mean image {summary.mean_psnr:.2f}): {summary.verdict}{inverted}"
    )


def _reference_start(ceiling: CaseResult) -> float:
    """Return the PSNR of an attack without iterations in the authors' code."""
    return float(record_values(ceiling.records, "reference_start").mean())


def _describe_ceiling(top: CaseSummary) -> str:
    return f"Ceiling (fedavg, untrained, one step, batch {top.case.batch}, model): {top.psnr:.2f} dB, SSIM {top.ssim:.3f}."


def _ceiling_caveat(leaks: bool, psnr: float, floor: float) -> list[str]:
    if leaks:
        return []
    if psnr > floor:
        return [
            f"**Weak evidence**: even at the ceiling the attack exceeds its floor ({floor:.2f} dB) on average, but not "
            "significantly. Use more images, iterations or restarts."
        ]
    return [
        f"**No evidence**: the attack does not exceed its floor ({floor:.2f} dB) even at the ceiling, so low values show a "
        "weak attack, not a private method."
    ]


# The paper's table.


def privacy_page(table: PrivacyTable, formula: str, origin: str, images: Mapping[str, Sequence[Path]] | None = None) -> str:
    """Return the page of the paper's table: two tables for each attack, and the image grids."""
    tables = [each for attack in table.ceilings for each in _attack_tables(table, attack, formula)]
    grids = "".join(markdown_images((images or {}).get(attack, ())) for attack in table.ceilings)
    return render_page("Privacy: reconstruction from uploads", tables, intro=[LEAKS, EITHER_SIGN], origin=origin) + grids


def _attack_tables(table: PrivacyTable, attack: str, formula: str) -> tuple[ResultTable, ResultTable]:
    """Return the table of an attack, and that of the images as found."""
    paper, ceiling = paper_psnr(), table.ceilings[attack]
    top = summarize_case(*ceiling, formula)
    rows: list[list[Cell]] = []
    rows_as_found: list[list[Cell]] = []
    for setting in table.settings(attack):
        row = table.row(attack, setting)
        summaries = [summarize_case(case, result, formula) for case, result in row.values()]
        first = summaries[0]
        informative = any(each.leaks for each in summaries if each.case.method == "fedavg")
        name = first.case.setting
        values = [f"{each.psnr:.2f} [{each.ssim:.2f}]" for each in summaries]
        bold = [each.leaks and each.tested for each in summaries]
        cells = [Bold(value) if leaks else value for value, leaks in zip(values, bold, strict=True)]
        rows.append([name if informative else f"{name} †", *cells, first.start_psnr, first.mean_psnr])
        as_found = [f"{each.psnr_as_found:.2f} [{each.ssim_as_found:.2f}]" for each in summaries]
        inverted = [f" ({each.inverted})" if each.inverted else "" for each in summaries]
        rows_as_found.append([name, *(value + count for value, count in zip(as_found, inverted, strict=True))])
    rows.append(["paper, Cifar100", *(f"{paper[column.label]:.2f}" for column in COLUMNS), None, None])
    columns = [ResultColumn("setting", align="left"), *(ResultColumn(column.label) for column in COLUMNS)]
    notes = [
        f"Bold: leaks. {_describe_ceiling(top)} †: no evidence, since here the attack does not significantly exceed "
        "its floor on FedAvg either, which protects nothing.",
        *_ceiling_caveat(top.leaks, top.psnr, top.floor),
        f"Best rounds: {', '.join(f'{display_name(name)} {number}' for name, number in table.best_rounds.items())}.",
        *_describe_comparison(table, attack),
        _describe_paper_row(ceiling[1], formula),
    ]
    return (
        ResultTable(
            [*columns, ResultColumn("start", ".2f"), ResultColumn("mean image", ".2f")],
            rows,
            f"Attack {attack}",
            f"PSNR in dB [SSIM], mean over {pluralize(top.images, 'image')}.",
            notes,
        ),
        ResultTable(
            columns,
            rows_as_found,
            f"Attack {attack}: images as found",
            "PSNR in dB [SSIM] (images that count as their negative above).",
        ),
    )


def _describe_comparison(table: PrivacyTable, attack: str) -> list[str]:
    parts = [
        f"round {each.round}: {each.gpfl} against {each.fedavg} {each.difference:+.2f} dB"
        + ("" if each.p_value is None else f" (signed-rank p = {each.p_value:.2g})")
        for each in compare_with_fedavg(table, attack)
    ]
    return [f"Each method by the target that leaks most, same images, one step, batch 1: {'; '.join(parts)}."] * bool(parts)


def _describe_paper_row(ceiling: CaseResult, formula: str) -> str:
    which = "that of all rows" if formula == "reference" else "--psnr reference uses it for all rows"
    return (
        f"The paper's row is for batches of 10, by the formula {REFERENCE_FORMULA} ({which}). In the authors' code an attack "
        f"without iterations reaches {_reference_start(ceiling):.2f} dB on these images."
    )


# Label distribution and membership inference.


def inference_page(findings: Sequence[InferenceFindings], origin: str) -> str:
    """Return the page of label distribution and membership inference, a row for each method."""

    def mean_guess_in(round_: str) -> Callable[[InferenceFindings], Cell]:
        return lambda each: _mean_guess(each.labels[round_])

    names = {"0": "untrained", "best": "trained"}
    columns: dict[ResultColumn, Callable[[InferenceFindings], Cell]] = {
        ResultColumn("method", align="left"): lambda each: display_name(each.method),
        **{ResultColumn(f"labels, {names[round_]}", ".3f"): mean_guess_in(round_) for round_ in findings[0].labels},
        ResultColumn("members, AUC"): lambda each: _with_interval([member.auc for member in each.members]),
        ResultColumn("training loss", ".3f"): lambda each: float(np.mean([member.train_loss for member in each.members])),
        ResultColumn("test loss", ".3f"): lambda each: float(np.mean([member.test_loss for member in each.members])),
        ResultColumn("accuracy, %", ".2f"): lambda each: 100 * each.accuracy,
        ResultColumn("round"): lambda each: each.round,
    }
    table = ResultTable.from_items(columns, findings, notes=_inference_notes(findings))
    return render_page("Privacy: label distribution and membership inference", [table], origin=origin)


def _inference_notes(findings: Sequence[InferenceFindings]) -> list[str]:
    labels = next(iter(findings[0].labels.values()))
    uniform, overall = _baselines(labels)
    weak = [
        display_name(each.method)
        for each in findings
        if any(
            (guess := _mean_guess(clients)) is not None and guess >= min(uniform, overall) for clients in each.labels.values()
        )
    ]
    caveat = f" A guess that is no better ({', '.join(weak)}) does not make the upload safe." if weak else ""
    selected_by = ", ".join(sorted({each.selected_by for each in findings}))
    return [
        "Labels: total variation distance between a client's label distribution and the server's guess from the upload of one "
        f"local round, mean over {describe_clients(labels, findings[0].clients)}; 0 is exact. Guesses without an upload: all "
        f"classes equally frequent {uniform:.3f}, like all clients together {overall:.3f}.{caveat} Labels are the same in "
        "every round, so the server can use its best guess. A dash: the upload reveals no labels directly.",
        "Members: probability that a personal model has a lower loss on a training sample than on a test sample, mean over "
        f"clients with its 95 % confidence interval; 0.5 is chance. Models of the round selected by '{selected_by}'.",
    ]


def describe_label_inference(labels: Sequence[LabelInference], method: str, clients: int) -> str:
    """Return the outcome of label distribution inference for one method; `clients` is the number of those attacked."""
    uniform, overall = _baselines(labels)
    baselines = f"guesses without an upload: uniform {uniform:.3f}, all clients together {overall:.3f}"
    mean = f"mean over {describe_clients(labels, clients)}"
    guess = _mean_guess(labels)
    if guess is None:
        return f"Labels: uploads of {method} have no head, embeddings or prototypes that reveal labels ({mean}; {baselines})."
    correlations = [each.correlation for each in labels if each.correlation is not None]
    correlation = f", correlation {np.mean(correlations):.2f}" if correlations else ""
    return (
        f"Labels: from uploads of {method} the server guesses a client's label distribution to a total variation distance of "
        f"{guess:.3f}{correlation} ({mean}; 0 is exact; {baselines})."
    )


def describe_membership_inference(members: Sequence[MembershipInference], method: str) -> str:
    """Return the outcome of membership inference for one method."""
    train, test = (float(np.mean([getattr(each, name) for each in members])) for name in ("train_loss", "test_loss"))
    return (
        f"Members: a threshold on the loss of {method}'s personal models separates training from test samples with AUC "
        f"{_with_interval([each.auc for each in members])} (mean over {pluralize(len(members), 'client')}; 0.5 is chance). "
        f"Mean loss {train:.3f} on training samples, {test:.3f} on test samples."
    )


def describe_clients(labels: Sequence[LabelInference], clients: int) -> str:
    """Return how many clients label inference covers, of how many."""
    if len(labels) == clients:
        return pluralize(clients, "client")
    return f"{len(labels)} of {pluralize(clients, 'client')}; the others have too few samples to train"


def _baselines(labels: Sequence[LabelInference]) -> tuple[float, float]:
    return float(np.mean([each.uniform for each in labels])), float(np.mean([each.overall for each in labels]))


def _mean_guess(labels: Sequence[LabelInference]) -> float | None:
    guesses = [each.guess for each in labels if each.guess is not None]
    return float(np.mean(guesses)) if guesses else None


def _with_interval(values: Sequence[float]) -> str:
    mean, half_width = confidence_interval(values)
    return f"{mean:.3f} ± {half_width:.3f}" if math.isfinite(half_width) else f"{mean:.3f}"


# The defence study.


_POINT_COLUMNS: Mapping[ResultColumn, Callable[[DefencePoint], Cell]] = {
    ResultColumn("method", align="left"): lambda point: display_name(point.method),
    ResultColumn("defence", align="left"): (
        lambda point: next((family.description for family in FAMILIES if family.option == point.family), "none")
    ),
    ResultColumn("variant", align="left"): lambda point: f"`{point.variant}`" if point.variant else "",
    ResultColumn("target", align="left"): lambda point: point.target,
    ResultColumn("verdict", align="left"): lambda point: point.verdict,
    ResultColumn("value", "g"): lambda point: point.value if point.family else None,
    ResultColumn("accuracy, %", ".2f"): lambda point: MeanStd(100 * point.accuracy, 100 * point.std, point.trials),
    ResultColumn("ε"): lambda point: None if point.epsilon is None else format_epsilon(point.epsilon),
    ResultColumn("ε, Poisson"): (
        lambda point: None if point.epsilon_if_poisson is None else format_epsilon(point.epsilon_if_poisson)
    ),
    ResultColumn("PSNR, dB", ".2f"): lambda point: point.psnr,
    ResultColumn("SSIM", ".3f"): lambda point: point.ssim,
    ResultColumn("MB up", ".1f"): lambda point: point.bytes_up / 1e6,
}


def defence_page(study: DefenceStudy, origin: str, images: Sequence[Path] = ()) -> str:
    """Return the page of the defence study, a row for each point."""
    table = ResultTable.from_items(_POINT_COLUMNS, study.points, notes=_defence_notes(study))
    return render_page("Privacy: defences", [table], origin=origin) + markdown_images(images)


def _defence_notes(study: DefenceStudy) -> list[str]:
    floor = float(np.mean([point.floor for point in study.points]))
    inversion = max(point.psnr - point.psnr_as_found for point in study.points)
    round_ = "round 0" if study.attacked_round == "0" else "the best round"
    variants = " ".join(point.variant for point in study.points)
    notes = [
        f"Accuracy: best of {study.rounds} rounds on the test samples of all clients. PSNR: reconstruction of {study.images} "
        f"images by the attack {ATTACK} from one step on one image at {round_}, for the target that leaks most; lower is more "
        f"private. Floor {floor:.2f} dB, ceiling (fedavg, no defence, untrained) {study.ceiling:.2f} dB.",
        *_ceiling_caveat(study.ceiling_leaks, study.ceiling, study.ceiling_floor),
        f"{EITHER_SIGN} As found (points.csv) PSNR is at most {inversion:.2f} dB lower.",
        *_describe_epsilon(study.points),
        *(f"Not finished: {failure}." for failure in study.failed),
    ]
    if "--mlg-norm" in variants:
        notes.append(
            "At the example level, GPFL has the magnitude term as a mean over examples (--mlg-norm sample_mean, λ·√B), since "
            "the default couples the examples of a batch."
        )
    if "--mu" in variants:
        notes.append(
            "GPFL with clipped or sparse updates has no weight decay (--mu 0), since decay changes valve and embeddings far "
            "more than the data do and would fill the updates."
        )
    return notes


def _describe_epsilon(points: Sequence[DefencePoint]) -> list[str]:
    deltas = sorted({point.delta for point in points if point.delta is not None})
    if not deltas:
        return []
    if all(point.epsilon is None for point in points):
        return [f"ε is not stated because dp-accounting is not installed: {INSTALL_COMMAND}, then run the same command again."]
    notes = [
        f"ε by {accountant_version()} for δ = {', '.join(f'{delta:g}' for delta in deltas)} over all planned rounds. As run: "
        "one client or example is replaced, rounds sample a fixed number of clients, and batches pass over the examples in "
        "order. Poisson, as most papers report it: one is added or removed, and rounds and batches are Poisson samples. The "
        "client level protects against observers of aggregates, not of single uploads. An ε above about 100 guarantees next "
        "to nothing; large values for Poisson sampling are far from tight."
    ]
    names = dict.fromkeys(display_name(point.method) for point in points if point.label_counts_known)
    if names:
        notes.append(
            f"At the example level, ε of {', '.join(names)} is for replacing an example by another of its class: the loss uses "
            "the client's label counts, which are not protected."
        )
    return notes
