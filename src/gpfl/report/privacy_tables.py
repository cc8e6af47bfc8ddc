"""Tables of privacy: attack cases, the paper's table, label and membership inference, and the defence study."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from gpfl.defences.accounting import INSTALL_COMMAND, accountant_version, format_epsilon
from gpfl.errors import pluralize
from gpfl.experiments.defence_study import ATTACK, FAMILIES, DefencePoint, DefenceStudy
from gpfl.experiments.definitions import display_name
from gpfl.experiments.leaks import InferenceFindings
from gpfl.experiments.privacy_table import COLUMNS, PrivacyTable, compare_with_fedavg, paper_psnr
from gpfl.privacy.attack_runner import AttackCase, CaseResult, CaseSummary, record_values, summarize_case
from gpfl.privacy.label_inference import LabelInference
from gpfl.privacy.membership import MembershipInference, confidence_interval
from gpfl.report.tables import Bold, Cell, MeanStd, ResultColumn, ResultTable, markdown_images, render_lines, render_page

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
    """Return the table of an attack's cases, with PSNRs by one of `PSNR_FORMULAS`."""
    summaries = [summarize_case(case, result, formula) for case, result in results.items()]
    notes = render_lines("attack_notes.txt", **_ceiling_values(ceiling, formula))
    return ResultTable.from_items(_CASE_COLUMNS, summaries, title, notes=notes)


def describe_summary(summary: CaseSummary) -> str:
    """Return the outcome of a case in one line."""
    inverted = f" ({summary.inverted} closer as negatives; as found {summary.psnr_as_found:.2f} dB)" if summary.inverted else ""
    return (
        f"{summary.case.description}: {summary.psnr:.2f} dB, SSIM {summary.ssim:.3f} over {summary.images} images "
        f"(start {summary.start_psnr:.2f}, mean image {summary.mean_psnr:.2f}): {summary.verdict}{inverted}"
    )


def _ceiling_values(ceiling: tuple[AttackCase, CaseResult], formula: str) -> dict[str, object]:
    """Return what notes say of a ceiling; `start` is the PSNR of an attack without iterations in the authors' code."""
    start = record_values(ceiling[1].records, "reference_start").mean()
    return {"top": summarize_case(*ceiling, formula), "start": start, "reference": formula == "reference"}


def privacy_page(table: PrivacyTable, formula: str, origin: str, images: Mapping[str, Sequence[Path]] | None = None) -> str:
    """Return the page of the paper's table: two tables for each attack, and the image grids."""
    tables = [each for attack in table.ceilings for each in _attack_tables(table, attack, formula)]
    grids = "".join(markdown_images((images or {}).get(attack, ())) for attack in table.ceilings)
    intro = render_lines("privacy_intro.txt")
    return render_page("Privacy: reconstruction from uploads", tables, intro=intro, origin=origin) + grids


def _attack_tables(table: PrivacyTable, attack: str, formula: str) -> tuple[ResultTable, ResultTable]:
    rows = [[summarize_case(*each, formula) for each in row.values()] for row in table.rows(attack).values()]
    paper = paper_psnr()
    paper_row: list[Cell] = ["paper, Cifar100", *(f"{paper[column.label]:.2f}" for column in COLUMNS), None, None]
    columns = [ResultColumn("setting", align="left"), *(ResultColumn(column.label) for column in COLUMNS)]
    notes = render_lines(
        "privacy_notes.txt",
        **_ceiling_values(table.ceilings[attack], formula),
        best_rounds=[f"{display_name(name)} {number}" for name, number in table.best_rounds.items()],
        comparisons=compare_with_fedavg(table, attack),
    )
    return (
        ResultTable(
            [*columns, ResultColumn("start", ".2f"), ResultColumn("mean image", ".2f")],
            [*map(_setting_row, rows), paper_row],
            f"Attack {attack}",
            f"PSNR in dB [SSIM], mean over {pluralize(len(table.ceilings[attack][1].records), 'image')}.",
            notes,
        ),
        ResultTable(
            columns,
            [_row_as_found(row) for row in rows],
            f"Attack {attack}: images as found",
            "PSNR in dB [SSIM] (images that count as their negative above).",
        ),
    )


def _setting_row(row: Sequence[CaseSummary]) -> list[Cell]:
    values = [f"{each.psnr:.2f} [{each.ssim:.2f}]" for each in row]
    cells = [Bold(value) if each.leaks and each.tested else value for value, each in zip(values, row, strict=True)]
    fedavg_leaks = any(each.leaks for each in row if each.case.method == "fedavg")
    return [row[0].case.setting + " †" * (not fedavg_leaks), *cells, row[0].start_psnr, row[0].mean_psnr]


def _row_as_found(row: Sequence[CaseSummary]) -> list[Cell]:
    counts = [f" ({each.inverted})" if each.inverted else "" for each in row]
    values = [f"{each.psnr_as_found:.2f} [{each.ssim_as_found:.2f}]" for each in row]
    return [row[0].case.setting, *(value + count for value, count in zip(values, counts, strict=True))]


def inference_page(findings: Sequence[InferenceFindings], origin: str) -> str:
    """Return the page of label distribution and membership inference, a row for each method."""

    def mean_guess(round_: str) -> Callable[[InferenceFindings], Cell]:
        return lambda each: _mean(each.labels[round_], "guess")

    names = {"0": "untrained", "best": "trained"}
    columns: dict[ResultColumn, Callable[[InferenceFindings], Cell]] = {
        ResultColumn("method", align="left"): lambda each: display_name(each.method),
        **{ResultColumn(f"labels, {names[round_]}", ".3f"): mean_guess(round_) for round_ in findings[0].labels},
        ResultColumn("members, AUC"): lambda each: _mean_auc(each.members),
        ResultColumn("training loss", ".3f"): lambda each: _mean(each.members, "train_loss"),
        ResultColumn("test loss", ".3f"): lambda each: _mean(each.members, "test_loss"),
        ResultColumn("accuracy, %", ".2f"): lambda each: 100 * each.accuracy,
        ResultColumn("round"): lambda each: each.round,
    }
    labels = next(iter(findings[0].labels.values()))
    baselines = _label_values(labels, findings[0].clients)
    best_baseline = min(_mean(labels, name) or 0.0 for name in ("uniform", "overall"))
    weak = [
        display_name(each.method)
        for each in findings
        if any((_mean(clients, "guess") or 0.0) >= best_baseline for clients in each.labels.values())
    ]
    selected_by = sorted({each.selected_by for each in findings})
    notes = render_lines("inference_notes.txt", **baselines, weak=weak, selected_by=selected_by)
    table = ResultTable.from_items(columns, findings, notes=notes)
    return render_page("Privacy: label distribution and membership inference", [table], origin=origin)


def describe_label_inference(labels: Sequence[LabelInference], method: str, clients: int) -> str:
    """Return the outcome of label distribution inference for one method; `clients` is the number of those attacked."""
    return "".join(render_lines("label_inference.txt", **_label_values(labels, clients), method=method))


def describe_membership_inference(members: Sequence[MembershipInference], method: str) -> str:
    """Return the outcome of membership inference for one method."""
    return (
        f"Members: a threshold on the loss of {method}'s personal models separates training from test samples with AUC "
        f"{_mean_auc(members)} (mean over {pluralize(len(members), 'client')}; 0.5 is chance). Mean loss "
        f"{_mean(members, 'train_loss'):.3f} on training samples, {_mean(members, 'test_loss'):.3f} on test samples."
    )


def _label_values(labels: Sequence[LabelInference], clients: int) -> dict[str, object]:
    """Return the means of label inference, and how many clients it covers, of how many."""
    covered = pluralize(clients, "client")
    if len(labels) < clients:
        covered = f"{len(labels)} of {covered}; the others have too few samples to train"
    means = {name: _mean(labels, name) for name in ("guess", "uniform", "overall", "correlation")}
    intervals = [each.interval for each in labels if each.interval is not None]
    return means | {
        "clients": covered,
        "exact": sum(each.is_exact for each in labels),
        "open": len(intervals),
        "interval": np.mean(intervals, axis=0).tolist() if intervals else None,
    }


def _mean(clients: Sequence[LabelInference | MembershipInference], name: str) -> float | None:
    values = [value for each in clients if (value := getattr(each, name)) is not None]
    return float(np.mean(values)) if values else None


def _mean_auc(members: Sequence[MembershipInference]) -> str:
    mean, half_width = confidence_interval([member.auc for member in members])
    return f"{mean:.3f} ± {half_width:.3f}" if math.isfinite(half_width) else f"{mean:.3f}"


def _epsilon(value: float | None) -> str | None:
    return None if value is None else format_epsilon(value)


_DEFENCES = {"": "none", **{family.option: family.description for family in FAMILIES}}
_POINT_COLUMNS: Mapping[ResultColumn, Callable[[DefencePoint], Cell]] = {
    ResultColumn("method", align="left"): lambda point: display_name(point.method),
    ResultColumn("defence", align="left"): lambda point: _DEFENCES[point.family],
    ResultColumn("variant", align="left"): lambda point: f"`{point.variant}`" if point.variant else "",
    ResultColumn("target", align="left"): lambda point: point.target,
    ResultColumn("verdict", align="left"): lambda point: point.verdict,
    ResultColumn("value", "g"): lambda point: point.value if point.family else None,
    ResultColumn("accuracy, %", ".2f"): lambda point: MeanStd(100 * point.accuracy, 100 * point.std, point.trials),
    ResultColumn("ε"): lambda point: _epsilon(point.epsilon),
    ResultColumn("ε, Poisson"): lambda point: _epsilon(point.epsilon_if_poisson),
    ResultColumn("PSNR, dB", ".2f"): lambda point: point.psnr,
    ResultColumn("SSIM", ".3f"): lambda point: point.ssim,
    ResultColumn("MB up", ".1f"): lambda point: point.bytes_up / 1e6,
}


def defence_page(study: DefenceStudy, origin: str, images: Sequence[Path] = ()) -> str:
    """Return the page of the defence study, a row for each point."""
    points = study.points
    notes = render_lines(
        "defence_notes.txt",
        study=study,
        attack=ATTACK,
        floor=np.mean([point.floor for point in points]),
        inversion=max(point.psnr - point.psnr_as_found for point in points),
        deltas=[f"{delta:g}" for delta in sorted({point.delta for point in points if point.delta is not None})],
        accounted=any(point.epsilon is not None for point in points),
        accountant=accountant_version(),
        install_command=INSTALL_COMMAND,
        same_class=list(dict.fromkeys(display_name(point.method) for point in points if point.label_counts_known)),
        variants=" ".join(point.variant for point in points),
    )
    table = ResultTable.from_items(_POINT_COLUMNS, points, notes=notes)
    return render_page("Privacy: defences", [table], origin=origin) + markdown_images(images)
