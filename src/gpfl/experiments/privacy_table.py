"""The paper's nine columns: the same victims attacked in five methods' uploads, beside the paper's values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from gpfl.errors import GpflError, pluralize
from gpfl.experiments import definitions as experiments
from gpfl.io import files, toml
from gpfl.privacy.attack import AttackConfig, AttackRunner, Case, Kept, Record, ceiling_of
from gpfl.privacy.victims import ROUNDS, STEPS, choose_victims, state_at
from gpfl.report import attack_tables as table
from gpfl.report import plotting
from gpfl.report.attack_images import draw_grid
from gpfl.training.result import Result


@dataclass(frozen=True)
class Column:
    """A column of the paper's table."""

    label: str
    method: str
    target: str


COLUMNS = (
    Column("Per-fe", "fedper", "fe"),
    Column("Rep-fe", "fedrep", "fe"),
    Column("Avg-fe", "fedavg", "fe"),
    Column("Avg", "fedavg", "model"),
    Column("RoD-fe", "fedrod", "fe"),
    Column("RoD", "fedrod", "model"),
    Column("GPFL-fe", "gpfl", "fe"),
    Column("GPFL-sfe", "gpfl", "sfe"),
    Column("GPFL-sm", "gpfl", "sm"),
)
METHODS = tuple(dict.fromkeys(column.method for column in COLUMNS))
"""The methods whose runs are needed."""

CEILING = "ceiling"
"""The column of records that belong to none: those of a ceiling."""

Done = Mapping[tuple[Column, Case], Kept]


class PrivacyTable(NamedTuple):
    """All cases of the columns, the ceiling of each attack, and the methods' best rounds."""

    done: Done
    ceilings: Mapping[str, tuple[Case, Kept]]
    rounds: Mapping[str, int]


def paper_values(path: Path | None = None) -> dict[str, float]:
    """Gives the paper's PSNR of each column, in dB."""
    content = toml.read(path or experiments.config_dir() / "attacks" / "privacy.toml")
    values = content.get("paper")
    if not isinstance(values, dict) or set(values) != {column.label for column in COLUMNS}:
        raise GpflError(f"{path or 'configs/attacks/privacy.toml'} must hold [paper] with the nine columns")
    return {label: float(value) for label, value in values.items()}


def nine_columns(
    results: Mapping[str, Result],
    out: Path,
    *,
    kinds: Sequence[str] = ("geiping", "dlg"),
    images: int = 20,
    batches: Sequence[int] = (1, 4),
    steps: Sequence[str] = STEPS,
    rounds: Sequence[str] = ROUNDS,
    effort: AttackConfig | None = None,
    psnr: str = "proper",
    origin: str = "",
    tell: Callable[[Case, Kept], None] = lambda case, kept: None,
) -> list[Path]:
    """Writes the nine columns of finished runs into a folder, and gives the files; cases that it holds are not attacked again.

    `results` are the runs of METHODS on one federation with one seed. Victims are spread over the clients; they, their
    starts and the effort are the same in every column. `psnr` is one of table.PSNRS, `origin` the last line of the page.
    """
    effort = effort or AttackConfig()
    refuse_unequal(results)
    first = results[METHODS[0]]
    victims = choose_victims(first.federation, range(len(first.federation)), images, sorted({1, *batches}), effort.seed)
    benches = {
        name: AttackRunner(results[name].engine, {which: state_at(results[name], which) for which in rounds}, victims, effort)
        for name in METHODS
    }
    done: dict[tuple[Column, Case], Kept] = {}
    ceilings: dict[str, tuple[Case, Kept]] = {}
    for kind in kinds:
        bench, top = ceiling_of(results["fedavg"].engine, victims, kind, effort)
        ceilings[kind] = (top, bench.attack([top], out, tell)[top])
        for column in COLUMNS:
            cases = [
                Case(column.method, column.target, kind, which, step, batch)
                for which in rounds
                for batch in batches
                for step in steps
            ]
            done |= {(column, case): kept for case, kept in benches[column.method].attack(cases, out, tell).items()}
    best = {name: results[name].outcome.selected.round for name in METHODS}
    return write(PrivacyTable(done, ceilings, best), out, psnr, origin)


def refuse_unequal(results: Mapping[str, Result]) -> None:
    """Refuses runs that cannot stand in one table."""
    missing = [name for name in METHODS if name not in results]
    if missing:
        raise GpflError(f"the nine columns need runs of {', '.join(METHODS)}; {', '.join(missing)} is missing")
    manifests = [results[name].federation.manifest() for name in METHODS]
    if any(manifest != manifests[0] for manifest in manifests[1:]):
        raise GpflError("the runs are not on one federation: give all of them the same data and division of rows")
    seeds = {results[name].engine.schedule.seed for name in METHODS}
    if len(seeds) > 1:
        raise GpflError(f"the runs have the seeds {sorted(seeds)}: give all of them the same")


def write(nine: PrivacyTable, out: Path, psnr: str, origin: str) -> list[Path]:
    """Writes table, records and pictures of all columns."""
    pictures = {
        kind: [path for key in settings(nine.done, kind) for path in draw(nine.done, kind, key, out)] for kind in nine.ceilings
    }
    files.write_text(out / "results.json", json_of(records_of(nine)))
    files.write_text(out / "table.md", page(nine, psnr, origin, pictures))
    return [out / "table.md", out / "results.json", *(path for paths in pictures.values() for path in paths)]


def page(nine: PrivacyTable, psnr: str, origin: str, pictures: Mapping[str, Sequence[Path]] | None = None) -> str:
    """Gives the page: the tables of each attack, its pictures if there are any, and where all comes from."""
    parts = [
        markdown(nine.done, kind, ceiling, nine.rounds, psnr) + plotting.markdown_images((pictures or {}).get(kind, ()))
        for kind, ceiling in nine.ceilings.items()
    ]
    return "\n".join([*parts, *([f"{origin}\n"] if origin else [])])


def records_of(nine: PrivacyTable) -> list[Record]:
    """Gives a record of every rebuilt image, with its column and the best round of its method."""
    records: list[Record] = [
        {"column": column.label, "best_round": nine.rounds[column.method], **record}
        for (column, _), kept in nine.done.items()
        for record in kept.records
    ]
    return records + [{"column": CEILING, **record} for _, kept in nine.ceilings.values() for record in kept.records]


def read(path: Path) -> PrivacyTable:
    """Gives what `results.json` holds: all numbers, no images."""
    columns = {column.label: column for column in COLUMNS}
    done: dict[tuple[Column, Case], Kept] = {}
    ceilings: dict[str, tuple[Case, Kept]] = {}
    rounds: dict[str, int] = {}
    for record in cast(list[Record], json.loads(path.read_text(encoding="utf-8"))):
        case = Case(**{field.name: record[field.name] for field in dataclasses.fields(Case)})  # type: ignore[arg-type]
        if record["column"] == CEILING:
            kept = ceilings.setdefault(case.kind, (case, numbers_alone()))[1]
        else:
            kept = done.setdefault((columns[str(record["column"])], case), numbers_alone())
            rounds[case.method] = cast(int, record["best_round"])
        kept.records.append(record)
    return PrivacyTable(done, ceilings, rounds)


def numbers_alone() -> Kept:
    """Gives a case without images, whose records are still to come."""
    return Kept([], torch.empty(0), torch.empty(0))


def settings(done: Done, kind: str) -> list[tuple[str, str, int]]:
    """Gives (round, steps, batch) of the lines of a table."""
    return list(dict.fromkeys((case.round, case.steps, case.batch) for _, case in done if case.kind == kind))


def of_setting(done: Done, kind: str, key: tuple[str, str, int]) -> dict[Column, tuple[Case, Kept]]:
    """Gives the columns of one line."""
    return {
        column: (case, kept)
        for (column, case), kept in done.items()
        if case.kind == kind and (case.round, case.steps, case.batch) == key
    }


def markdown(done: Done, kind: str, ceiling: tuple[Case, Kept], rounds: Mapping[str, int], psnr: str) -> str:
    """Gives the nine columns of one attack: PSNR and SSIM by setting, the floors, and which lines say anything."""
    labels = [column.label for column in COLUMNS]
    lines, plain, void = [], [], []
    for key in settings(done, kind):
        held = of_setting(done, kind, key)
        numbers = {column: table.line_of(case, kept, psnr) for column, (case, kept) in held.items()}
        some = next(iter(numbers.values()))
        open_ = [line.leaks for column, line in numbers.items() if column.method == "fedavg"]
        name = f"round {key[0]}, {'one step' if key[1] == 'one' else 'one epoch'}, batch {key[2]}"
        if not any(open_):
            void.append(name)
        shown = [f"{line.psnr:.2f} [{line.ssim:.2f}]{' *' if line.leaks and line.tested else ''}" for line in numbers.values()]
        lines.append([name + ("" if any(open_) else " †"), *shown, f"{some.start:.2f}", f"{some.mean:.2f}"])
        plain.append([name, *(as_found(line) for line in numbers.values())])
    paper = paper_values()
    lines.append(["paper, Cifar100", *(f"{paper[label]:.2f}" for label in labels), "", ""])
    top = table.line_of(*ceiling, psnr)
    images = len(ceiling[1].records)
    text = [f"PSNR in dB [SSIM] by the attack '{kind}', mean over {pluralize(images, 'image')}; lower is more private."]
    text.append("\n".join(table.rows_of(["setting", *labels, "start", "mean image"], lines, 1)))
    text += [table.EITHER]
    text += ["\\* leaks: nearer to the victims than the start and the mean image, image by image (signed-rank test, p < 0.05)."]
    text += [f"Ceiling (fedavg, untrained net, one step, batch {top.case.batch}): {top.psnr:.2f} dB, SSIM {top.ssim:.3f}."]
    if not top.leaks:
        text.append(table.void(top))
    if void:
        text.append("† proves nothing: here the attack does not beat its floor for certain on FedAvg, which protects nothing.")
    text.append(f"Best rounds: {', '.join(f'{name} {number}' for name, number in rounds.items())}.")
    text += paired(done, kind)
    text.append("As found, no image turned: PSNR in dB [SSIM] (images turned above).")
    text.append("\n".join(table.rows_of(["setting", *labels], plain, 1)))
    untouched = table.numbers(ceiling[1].records, "reference_start").mean()
    formula = "−10·log10(MSE/3) on what nets are given"
    whose = f"All is by the formula of the paper's row ({formula}), which is"
    if psnr == "proper":
        whose = f"The paper's row is by another formula ({formula}; ours are so under --psnr reference) and"
    text.append(
        f"{whose} for batches of 10. In their code an attack that was never begun scores {untouched:.2f} dB on these images."
    )
    return "\n\n".join(text) + "\n"


def as_found(line: table.Line) -> str:
    """Gives a cell of the table without turned images."""
    turned = f" ({line.turned})" if line.turned else ""
    return f"{line.psnr_as_found:.2f} [{line.ssim_as_found:.2f}]{turned}"


def paired(done: Done, kind: str) -> list[str]:
    """Gives the sentence that compares GPFL with FedAvg victim by victim, each by its target that leaks most on average."""
    from scipy.stats import wilcoxon

    parts = []
    for which in ROUNDS:
        held = of_setting(done, kind, (which, "one", 1))
        if not held:
            continue
        found = {column: table.numbers(kept.records, "either_psnr") for column, (_, kept) in held.items()}
        worst = {
            name: max((column for column in found if column.method == name), key=lambda column: float(found[column].mean()))
            for name in ("gpfl", "fedavg")
        }
        difference = found[worst["gpfl"]] - found[worst["fedavg"]]
        tested = len(difference) >= table.FEWEST and bool(np.any(difference))
        chance = f" (signed-rank p = {wilcoxon(difference).pvalue:.2g})" if tested else ""
        names = f"{worst['gpfl'].label} against {worst['fedavg'].label}"
        parts.append(f"at round {which}, {names}, {difference.mean():+.2f} dB{chance}")
    if not parts:
        return []
    words = "; ".join(parts)
    return [f"A server takes whichever target leaks most. Same victims, one step, batch 1: {words}."]


def draw(done: Done, kind: str, key: tuple[str, str, int], out: Path) -> list[Path]:
    """Writes the grid of originals and what was rebuilt in each column."""
    held = of_setting(done, kind, key)
    rows = [table.row_of(column.label, kept) for column, (_, kept) in held.items()]
    true = next(iter(held.values()))[1].true
    trained = "one step" if key[1] == "one" else "one epoch"
    when = "best round" if key[0] == "best" else f"round {key[0]}"
    title = f"{kind}, {when}, {trained}, batch {key[2]}: PSNR in dB"
    return draw_grid(true, rows, title, out / f"grid-{kind}-round-{key[0]}-{key[1]}-batch-{key[2]}")


def json_of(records: Sequence[Mapping[str, object]]) -> str:
    """Gives records as JSON, one a line."""
    return "[\n" + ",\n".join(json.dumps(record, allow_nan=False) for record in records) + "\n]\n"
