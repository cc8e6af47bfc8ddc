"""Tables of what was measured of learned features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpfl.errors import pluralize
from gpfl.experiments import maps
from gpfl.experiments.definitions import TableColumn, display_name
from gpfl.experiments.features import FeatureMetrics
from gpfl.experiments.results import TableResults
from gpfl.report.tables import MeanStd, ResultColumn, ResultTable, format_value

HEADERS: Mapping[str, str] = {
    "silhouette": "silhouette by class",
    "silhouette_within": "within clients",
    "silhouette_islands": "by class and client",
    "purity": "purity",
    "purity_across": "purity in other clients",
}
"""FeatureMetrics in the tables and their headers."""

_EXPLANATION = (
    "Silhouettes (−1 to 1) are high where samples of a group lie together and apart from others: a class over all clients; a "
    "class among a client's samples (mean over clients); each client's share of each class. Purity is the share of a sample's "
    "{neighbours} nearest samples, or nearest samples of other clients, with its class{chance}. All are computed on the "
    "features, of at most {most} {split} samples of each client and class; mean ± population standard deviation over trials."
)


def kept_measures(results: TableResults, column: TableColumn) -> dict[str, list[FeatureMetrics]]:
    """Return the measures that are kept next to the runs of a column, by row label, one for each trial."""
    runs = {row.label: results.trials.get((column.key, row.label)) for row in results.rows}
    return {
        label: [one.measures for run in (trials.runs if trials else ()) if (one := maps.read_map(run.path)) is not None]
        for label, trials in runs.items()
    }


def tables(results: TableResults) -> list[ResultTable]:
    """Return a table for each column of an experiment on features, none for others."""
    if results.experiment.measure != "features":
        return []
    return [measure_table(column, kept_measures(results, column)) for column in results.columns]


def measure_table(column: TableColumn, measures: Mapping[str, Sequence[FeatureMetrics]]) -> ResultTable:
    """Return the table of one column, a row for each method."""
    headers = [
        ResultColumn("method"),
        *(ResultColumn(header, ".3f") for header in HEADERS.values()),
        ResultColumn("trials", "d"),
    ]
    rows = [
        [display_name(label), *(mean_std(found, name) for name in HEADERS), len(found)] for label, found in measures.items()
    ]
    first = next((found[0] for found in measures.values() if found), None)
    note = "Not measured: the same command without --no-figures measures where the models are."
    if first is not None:
        chance = f" ({first.purity_by_chance:.2f} by chance)" if first.purity_by_chance is not None else ""
        note = _EXPLANATION.format(neighbours=first.neighbours, chance=chance, most=maps.MOST_ROWS, split=maps.PART)
    return ResultTable(headers, rows, title=f"Features of {column.key}", notes=[note])


def records(results: TableResults) -> dict[tuple[str, str], dict[str, object]]:
    """Return the measures of an experiment on features as plain numbers, by column key and row label."""
    if results.experiment.measure != "features":
        return {}
    found: dict[tuple[str, str], dict[str, object]] = {}
    for column in results.columns:
        for label, measures in kept_measures(results, column).items():
            numbers = {name: mean_std(measures, name) for name in (*HEADERS, "purity_by_chance")}
            found[column.key, label] = {
                **{name: number.mean if number else None for name, number in numbers.items()},
                **{f"{name}_std_over_trials": number.std if number else None for name, number in numbers.items()},
                "measured_trials": len(measures),
            }
    return found


def describe_measures(results: TableResults) -> list[str]:
    """Return a line for the terminal for each method that was measured."""
    return [
        f"{column.key} {display_name(label)}: silhouette by class {format_value(mean_std(found, 'silhouette'), '.3f')}, "
        f"purity {format_value(mean_std(found, 'purity'), '.3f')} ({pluralize(len(found), 'trial')})"
        for column in results.columns
        for label, found in kept_measures(results, column).items()
        if found
    ]


def mean_std(measures: Sequence[FeatureMetrics], name: str) -> MeanStd | None:
    """Return a measure over the trials that have it; None if none has."""
    values = [value for one in measures if (value := getattr(one, name)) is not None]
    return MeanStd.from_values(values) if values else None
