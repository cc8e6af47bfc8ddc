"""The paper's privacy table: the same images attacked in five methods' uploads, in nine columns."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from gpfl.experiments.defence_study import study_defaults
from gpfl.privacy import attack_runner
from gpfl.privacy.attack_runner import AttackCase, AttackPlan, AttackRunner, CaseResult, OnResult, Record
from gpfl.privacy.uploads import ROUNDS, state_at
from gpfl.training.result import Result


@dataclass(frozen=True)
class AttackColumn:
    """A column of the paper's table."""

    label: str
    method: str
    target: str


COLUMNS = (
    AttackColumn("Per-fe", "fedper", "fe"),
    AttackColumn("Rep-fe", "fedrep", "fe"),
    AttackColumn("Avg-fe", "fedavg", "fe"),
    AttackColumn("Avg", "fedavg", "model"),
    AttackColumn("RoD-fe", "fedrod", "fe"),
    AttackColumn("RoD", "fedrod", "model"),
    AttackColumn("GPFL-fe", "gpfl", "fe"),
    AttackColumn("GPFL-sfe", "gpfl", "sfe"),
    AttackColumn("GPFL-sm", "gpfl", "sm"),
)
METHODS = tuple(dict.fromkeys(column.method for column in COLUMNS))  # the methods whose runs the table needs
CEILING = "ceiling"  # column of the records of a ceiling

Results = dict[tuple[AttackColumn, AttackCase], CaseResult]
Setting = tuple[str, str, int]  # round, steps and batch size


class PrivacyTable(NamedTuple):
    """The results of all columns, the ceiling of each attack, and the best round of each method."""

    results: Results
    ceilings: dict[str, tuple[AttackCase, CaseResult]]
    best_rounds: dict[str, int]

    def rows(self, attack: str) -> dict[Setting, dict[AttackColumn, tuple[AttackCase, CaseResult]]]:
        """Return the results of an attack by setting and column."""
        rows: dict[Setting, dict[AttackColumn, tuple[AttackCase, CaseResult]]] = {}
        for (column, case), result in self.results.items():
            if case.kind == attack:
                rows.setdefault((case.round, case.steps, case.batch), {})[column] = (case, result)
        return rows


def paper_psnr() -> dict[str, float]:
    """Return the paper's PSNR of each column in dB."""
    return {label: float(cast(float, value)) for label, value in study_defaults()["paper"].items()}


def attack_methods(
    runs: Mapping[str, Result], folder: Path, plan: AttackPlan, on_result: OnResult = lambda case, result: None
) -> PrivacyTable:
    """Attack the runs of `METHODS`, which must have the same federation and seed. Cases that `folder` holds are reused.

    The attacked images are spread over the clients; they, the random starts and the iterations are the same in all columns.
    """
    federation, engine = runs["fedavg"].federation, runs["fedavg"].engine
    batches = plan.choose_batches(federation, engine.method.net, range(len(federation)))
    runners = {
        name: AttackRunner(runs[name].engine, {round_: state_at(runs[name], round_) for round_ in plan.round}, batches, plan)
        for name in METHODS
    }
    table = PrivacyTable({}, {}, {name: runs[name].outcome.selected.round for name in METHODS})
    for attack in plan.kind:
        table.ceilings[attack] = attack_runner.attack_ceiling(engine, batches, attack, plan, folder, on_result)
        for column in COLUMNS:
            cases = plan.cases(column.method, [column.target], attack)
            for case, result in runners[column.method].run(cases, folder, on_result).items():
                table.results[column, case] = result
    return table


class TargetComparison(NamedTuple):
    """GPFL and FedAvg image by image, each attacked through the target that leaks most."""

    round: str
    gpfl: str
    fedavg: str
    difference: float  # mean PSNR of GPFL minus that of FedAvg, in dB
    p_value: float | None


def compare_with_fedavg(table: PrivacyTable, attack: str) -> list[TargetComparison]:
    """Compare GPFL with FedAvg for one step on single images, at each round of a table."""
    comparisons, rows = [], table.rows(attack)
    for round_ in (each for each in ROUNDS if (each, "one", 1) in rows):
        row = rows[round_, "one", 1]
        psnr = {column: attack_runner.record_values(result.records, "either_psnr") for column, (_, result) in row.items()}
        gpfl, fedavg = (
            max((column for column in psnr if column.method == name), key=lambda column: float(psnr[column].mean()))
            for name in ("gpfl", "fedavg")
        )
        difference = psnr[gpfl] - psnr[fedavg]
        p_value = attack_runner.signed_rank_p_value(difference)
        comparisons.append(TargetComparison(round_, gpfl.label, fedavg.label, float(np.mean(difference)), p_value))
    return comparisons


# results.json: a record for every image, with its column and the best round of its method.


def table_records(table: PrivacyTable) -> list[Record]:
    """Return a record for every reconstructed image of a table."""
    records: list[Record] = [
        {"column": column.label, "best_round": table.best_rounds[column.method], **record}
        for (column, _), result in table.results.items()
        for record in result.records
    ]
    return records + [{"column": CEILING, **record} for _, result in table.ceilings.values() for record in result.records]


def table_from_records(records: Iterable[Record]) -> PrivacyTable:
    """Return the table of the records that `table_records` made, without images."""
    columns = {column.label: column for column in COLUMNS}
    table = PrivacyTable({}, {}, {})
    for record in records:
        case = AttackCase(**{field.name: record[field.name] for field in dataclasses.fields(AttackCase)})  # type: ignore[arg-type]
        empty = CaseResult([], torch.empty(0), torch.empty(0))
        if record["column"] == CEILING:
            _, result = table.ceilings.setdefault(case.kind, (case, empty))
        else:
            result = table.results.setdefault((columns[str(record["column"])], case), empty)
            table.best_rounds[case.method] = cast(int, record["best_round"])
        result.records.append(record)
    return table
