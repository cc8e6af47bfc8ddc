"""Tables of feature metrics."""

from collections.abc import Mapping, Sequence

from gpfl.errors import pluralize
from gpfl.experiments import features
from gpfl.experiments.definitions import TableColumn, display_name
from gpfl.experiments.features import FeatureMetrics
from gpfl.experiments.grid import TableResults
from gpfl.report.tables import MeanStd, ResultColumn, ResultTable, format_value

HEADERS: Mapping[str, str] = {
    "silhouette": "silhouette by class",
    "silhouette_within": "within clients",
    "silhouette_islands": "by class and client",
    "purity": "purity",
    "purity_across": "purity in other clients",
}
"""The metrics in the tables and their headers."""

_EXPLANATION = (
    "Silhouettes (−1 to 1) are high where samples of a group lie together and apart from others: a class over all clients; a "
    "class among a client's samples (mean over clients); each client's share of each class. Purity is the share of a sample's "
    "{neighbours} nearest samples, or nearest samples of other clients, with its class{chance}. All are computed on the "
    "features, of at most {most} {split} samples of each client and class; mean ± population standard deviation over trials."
)


def read_metrics(results: TableResults, column: TableColumn) -> dict[str, list[FeatureMetrics]]:
    """Return the metrics that are stored next to the runs of a column, by row label, one for each trial."""
    trials = results.column_trials(column)
    return {row.label: features.read_metrics(trials[row.label]) if row.label in trials else [] for row in results.rows}


def tables(results: TableResults) -> list[ResultTable]:
    """Return a table for each column of an experiment on features, none for others."""
    if results.experiment.measure != "features":
        return []
    return [metrics_table(column, read_metrics(results, column)) for column in results.columns]


def metrics_table(column: TableColumn, metrics: Mapping[str, Sequence[FeatureMetrics]]) -> ResultTable:
    """Return the table of one column, a row for each method."""
    rows = [[display_name(label), *(_mean(trials, name) for name in HEADERS), len(trials)] for label, trials in metrics.items()]
    headers = [ResultColumn(header, ".3f") for header in HEADERS.values()]
    first = next((trials[0] for trials in metrics.values() if trials), None)
    note = "Not measured: the same command without --no-figures measures where the models are."
    if first is not None:
        chance = f" ({first.purity_by_chance:.2f} by chance)" if first.purity_by_chance is not None else ""
        note = _EXPLANATION.format(neighbours=first.neighbours, chance=chance, most=features.MAX_SAMPLES, split=features.SPLIT)
    columns = [ResultColumn("method"), *headers, ResultColumn("trials", "d")]
    return ResultTable(columns, rows, title=f"Features of {column.key}", notes=[note])


def to_records(results: TableResults) -> dict[tuple[str, str], dict[str, object]]:
    """Return the metrics of an experiment on features as plain numbers, by column key and row label."""
    if results.experiment.measure != "features":
        return {}
    records: dict[tuple[str, str], dict[str, object]] = {}
    for column in results.columns:
        for label, trials in read_metrics(results, column).items():
            means = {name: _mean(trials, name) for name in (*HEADERS, "purity_by_chance")}
            records[column.key, label] = {
                **{name: mean.mean if mean else None for name, mean in means.items()},
                **{f"{name}_std_over_trials": mean.std if mean else None for name, mean in means.items()},
                "measured_trials": len(trials),
            }
    return records


def describe_metrics(results: TableResults) -> list[str]:
    """Return a line for the terminal for each method that was measured."""
    return [
        f"{column.key} {display_name(label)}: silhouette by class {format_value(_mean(trials, 'silhouette'), '.3f')}, "
        f"purity {format_value(_mean(trials, 'purity'), '.3f')} ({pluralize(len(trials), 'trial')})"
        for column in results.columns
        for label, trials in read_metrics(results, column).items()
        if trials
    ]


def _mean(metrics: Sequence[FeatureMetrics], name: str) -> MeanStd | None:
    values = [value for trial in metrics if (value := getattr(trial, name)) is not None]
    return MeanStd.from_values(values) if values else None
