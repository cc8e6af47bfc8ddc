"""Methods over repeated splits, as `gpfl compare --repeats` and `gpfl quickstart` report them: tables, a sentence, a figure."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np

from gpfl.core.metrics import METRICS
from gpfl.errors import pluralize
from gpfl.experiments import repeats
from gpfl.experiments.repeats import MethodScore, PairedDifference, RepeatedResults
from gpfl.experiments.statistics import CorrectedTTest
from gpfl.report import tables
from gpfl.report.client_tables import MAX_CLIENTS
from gpfl.report.method_tables import REPORTED_ROUNDS
from gpfl.report.plotting import annotate, figure_style, method_styles, new_figure, save_figure, use_name_ticks
from gpfl.report.tables import Bold, Cell, MeanStd, MetricUnit, ResultColumn, ResultTable

SIGNIFICANT = 0.05


class RepeatReport:
    """The report on several methods over repeated splits, by the metric of their config."""

    def __init__(self, results: RepeatedResults) -> None:
        self.results, self.metric = results, results.config.run.metric
        self.unit = MetricUnit(self.metric, 2)
        self.scores = repeats.score_methods(results, self.metric)
        self.names = [score.method for score in self.scores]  # the best first
        self.pairs = repeats.compare_pairs(results, self.metric, list(combinations(self.names, 2)))
        self.clients = repeats.score_clients(results, self.metric)

    @property
    def title(self) -> str:
        """The data, the partition and the number of repeats."""
        config, records = self.results.config, next(iter(self.results.records.values()))
        n_clients = len(next(iter(records.values())).n_samples)
        partition = f" ({config.partition.name})" if config.partition else ""
        repeats = pluralize(len(self.results.repeats), "repeat")
        return f"{config.data}, {pluralize(n_clients, 'client')}{partition}, {config.train.rounds} rounds, {repeats}"

    @property
    def tables(self) -> list[ResultTable]:
        """All tables: methods, differences from the best, all pairs, and clients where all repeats have the same."""
        tables = [self.method_table(), self.difference_table(), self.pair_table()]
        return [*tables, self.client_table()] if 0 < len(self.clients) <= MAX_CLIENTS else tables

    def method_table(self) -> ResultTable:
        """Return the table of methods: mean ± std over repeats, ranks and costs."""
        name = METRICS[self.metric].label + self.unit.suffix
        columns: Mapping[ResultColumn, Callable[[MethodScore], Cell]] = {
            ResultColumn("method"): lambda score: score.method,
            ResultColumn(name, self.unit.spec): lambda score: MeanStd.from_values(self.unit.scale * score.values),
            ResultColumn("mean\nrank", ".2f"): lambda score: score.mean_rank,
            ResultColumn("best\nin", "d", hide=2): lambda score: score.best_in,
            ResultColumn("worst\nclient", self.unit.spec, hide=1): lambda score: self._worst_client(score.method),
            ResultColumn("up", hide=3): lambda score: tables.format_bytes(self._mean_of(score.method, "bytes_up")),
            ResultColumn("down", hide=3): lambda score: tables.format_bytes(self._mean_of(score.method, "bytes_down")),
            ResultColumn("seconds", ".1f", hide=4): lambda score: self._mean_of(score.method, "seconds"),
        }
        records = [record for each in self.results.records.values() for record in each.values()]
        rounds = " or ".join(REPORTED_ROUNDS[by] for by in dict.fromkeys(record.selected_by for record in records))
        label = METRICS[self.metric].label
        label = label[:1].upper() + label[1:]
        notes = [
            f"{label} of the predictions for all test samples, mean ± std over repeats: {rounds}. Best in: repeats in which no "
            "method is better. Worst client: mean over repeats."
        ]
        return ResultTable.from_items(columns, self.scores, notes=notes)

    def difference_table(self, reference: str = "") -> ResultTable:
        """Return the table of paired differences from a method, by default from that with the best mean."""
        if reference:
            pairs = tests = self.differences_from(reference)
        else:
            reference, tests = self.names[0], self.pairs
            pairs = [pair for pair in tests if pair.one == reference]
        columns: Mapping[ResultColumn, Callable[[PairedDifference], Cell]] = {
            ResultColumn("method"): lambda pair: pair.other,
            ResultColumn(f"difference{self.unit.points}", f"+{self.unit.spec}"): lambda pair: -self.unit.scale * pair.test.mean,
            ResultColumn("95 % interval"): lambda pair: self.unit.interval((-pair.test).low, (-pair.test).high),
            ResultColumn("p"): lambda pair: tables.format_p_value(pair.corrected_p),
            ResultColumn("repeats\nbetter – worse"): lambda pair: f"{pair.losses} – {pair.wins}",
            ResultColumn("clients\nbetter – worse", hide=1): lambda pair: f"{pair.client_losses:.1f} – {pair.client_wins:.1f}",
        }
        notes = [self.describe_test(len(tests))]
        return ResultTable.from_items(columns, pairs, f"Paired differences from {reference}", notes=notes)

    def differences_from(self, reference: str) -> list[PairedDifference]:
        """Return the differences of a method minus each of the others, the best first."""
        pairs = [(reference, other) for other in self.names if other != reference]
        return repeats.compare_pairs(self.results, self.metric, pairs)

    def describe_test(self, n_pairs: int) -> str:
        """Return the sentence that explains intervals and p-values, which are corrected for `n_pairs` pairs."""
        n, ratio = len(self.results.repeats), self.results.test_train_ratio()
        return (
            "Intervals and p-values are those of the corrected resampled t-test (Nadeau and Bengio, 2003): training sets of "
            f"repeats overlap, so the variance of a mean difference is taken as (1/{n} + {ratio:.2f}) times that of a "
            f"difference, not 1/{n}, where {ratio:.2f} is the ratio of test to other samples; p is corrected for all "
            f"{pluralize(n_pairs, 'pair')} by Holm's method."
        )

    def pair_table(self) -> ResultTable:
        """Return the matrix of differences between all methods, row minus column."""
        cells = {}
        for pair in self.pairs:
            mark = "*" if pair.corrected_p is not None and pair.corrected_p < SIGNIFICANT else " "
            cells[pair.one, pair.other] = self.unit.difference(pair.test.mean) + mark
            cells[pair.other, pair.one] = self.unit.difference(-pair.test.mean) + mark
        rows = [[row, *(cells.get((row, column)) for column in self.names)] for row in self.names]
        title, notes = f"All pairs{self.unit.points}", [f"* p < {SIGNIFICANT:g}."]
        return ResultTable(self._method_columns("row − column"), rows, title, notes=notes)

    def client_table(self) -> ResultTable:
        """Return the table of clients: each method's mean over repeats and, in brackets, the repeats in which it is best."""
        unit = MetricUnit(self.metric)
        rows: list[list[Cell]] = []
        for client, scores in self.clients.items():
            texts = {
                name: f"{tables.format_value(unit.scale * score.mean, unit.spec)} ({score.best_in})"
                if not math.isnan(score.mean)
                else None
                for name, score in scores.items()
            }
            most = max(score.best_in for score in scores.values())
            rows.append([client, *(Bold(texts[name]) if scores[name].best_in == most else texts[name] for name in self.names)])
        notes = ["In brackets and bold: the number of repeats in which no method is better for the client; ties count for all."]
        title = f"{METRICS[self.metric].label} of each client{self.unit.suffix} (wins)"
        return ResultTable(self._method_columns("client"), rows, title, notes=notes)

    def _method_columns(self, first: str) -> list[ResultColumn]:
        return [ResultColumn(first), *(ResultColumn(name, hide=max(0, k - 3)) for k, name in enumerate(self.names))]

    def save(self, folder: Path, notes: Sequence[str] = ()) -> list[Path]:
        """Write the tables as table.md, table.csv and table.json and return the paths."""
        texts = {
            "table.md": tables.render_page(self.title, self.tables, notes=notes),
            "table.csv": tables.format_csv(self._method_records()),
            "table.json": json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n",
        }
        return tables.write_texts(folder, texts)

    def to_dict(self) -> dict[str, object]:
        """Return the content of table.json; metrics are fractions."""
        return {
            "metric": self.metric,
            "repeats": len(self.results.repeats),
            "test": "corrected resampled t-test (Nadeau and Bengio, 2003)",
            "test_train_ratio": self.results.test_train_ratio(),
            "methods": self._method_records(),
            "pairs": [
                {
                    **{key: value for key, value in asdict(pair).items() if key != "test"},
                    "difference": pair.test.mean,
                    "low": pair.test.low,
                    "high": pair.test.high,
                    "p": pair.test.p,
                }
                for pair in self.pairs
            ],
            "clients": {
                client: {
                    name: {"mean": None if math.isnan(score.mean) else score.mean, "best_in": score.best_in}
                    for name, score in scores.items()
                }
                for client, scores in self.clients.items()
            },
        }

    def _method_records(self) -> list[dict[str, object]]:
        tests = {pair.other: -pair.test for pair in self.pairs if pair.one == self.names[0]}
        tests[self.names[0]] = CorrectedTTest(0, 0.0, None, None, None)
        return [
            {
                "method": score.method,
                "repeats": len(score.values),
                self.metric: float(score.values.mean()),
                f"{self.metric}_std": float(score.values.std()),
                "mean_rank": score.mean_rank,
                "best_in": score.best_in,
                "difference_from_best": tests[score.method].mean,
                "difference_low": tests[score.method].low,
                "difference_high": tests[score.method].high,
                **{key: round(self._mean_of(score.method, key)) for key in ("bytes_up", "bytes_down")},
                "seconds": round(self._mean_of(score.method, "seconds"), 3),
            }
            for score in self.scores
        ]

    def _mean_of(self, method: str, key: str) -> float:
        records = self.results.records[method]
        return float(np.mean([getattr(records[repeat], key) for repeat in self.results.repeats]))

    def _worst_client(self, method: str) -> float | None:
        worst = np.fmax if METRICS[self.metric].lower_is_better else np.fmin  # NaN only if all are
        records = [self.results.records[method][repeat] for repeat in self.results.repeats]
        values = [worst.reduce([record.value(self.metric, client=name) for name in record.n_samples]) for record in records]
        defined = [value for value in values if not np.isnan(value)]
        return self.unit.scale * float(np.mean(defined)) if defined else None


def describe_gains(pairs: Sequence[PairedDifference], metric: str, name: str) -> str:
    """Return a sentence that says which methods are better or worse than a reference, and which do not clearly differ.

    `pairs` are differences of the reference minus each method, the best method first; `name` describes the reference, such as
    "training alone". A difference counts if its p-value, corrected for the number of pairs, is below `SIGNIFICANT`.
    """
    sign, unit = METRICS[metric].sign, MetricUnit(metric)
    clear = [pair for pair in pairs if pair.corrected_p is not None and pair.corrected_p < SIGNIFICANT]
    groups = {
        "better": [pair for pair in clear if sign * pair.test.mean < 0],
        "worse": [pair for pair in reversed(clear) if sign * pair.test.mean > 0],
    }
    of_metric = f"points of {METRICS[metric].label}" if METRICS[metric].is_percentage else f"in {METRICS[metric].label}"
    clauses = []
    for word, group in groups.items():
        texts: list[str] = []
        for pair in group:
            ends = sorted(abs(end or 0.0) for end in (pair.test.low, pair.test.mean, pair.test.high))
            low, size, high = (tables.format_value(unit.scale * end, unit.spec) for end in ends)
            first = f"{pair.other} is {word} than {name} by {size} {of_metric} (95 % interval {low} to {high})"
            texts.append(f"{pair.other} by {size} ({low} to {high})" if texts else first)
        if texts:
            clauses.append(tables.enumerate_names(texts, len(texts)))
    if unclear := [(pair.other, -pair.test) for pair in pairs if pair not in clear]:
        texts = [
            f"{other} ({unit.difference(test.mean)}, 95 % interval {unit.interval(test.low, test.high)})"
            for other, test in unclear
        ]
        clauses.append(f"there is no clear difference from {name} for {tables.enumerate_names(texts, len(texts))}")
    return f"On these data {'; '.join(clauses)}."


@figure_style()
def draw_gains(results: RepeatedResults, pairs: Sequence[PairedDifference], path: Path, title: str, axis: str) -> None:
    """Draw the difference of each method from a reference: its mean with the 95 % interval, and a dot for each repeat."""
    metric = results.config.run.metric
    scale = MetricUnit(metric).scale
    figure = new_figure(8, 0.42 * len(pairs) + 1.5)
    axes = figure.add_subplot()
    axes.axvline(0, color="#888888", linewidth=1)
    styles = method_styles([pair.other for pair in pairs])
    for row, pair in enumerate(pairs):
        differences = results.values(pair.other, metric) - results.values(pair.one, metric)
        axes.scatter(scale * differences, np.full(len(differences), row + 0.22), s=9, color="#888888", linewidth=0)
        test = -pair.test
        if test.low is not None and test.high is not None:
            axes.plot([scale * test.low, scale * test.high], [row, row], color=styles[pair.other]["color"], linewidth=2)
        axes.plot(scale * test.mean, row, color=styles[pair.other]["color"], marker="o", markersize=7)
    use_name_ticks(axes.yaxis, [pair.other for pair in pairs])
    axes.set(ylim=(len(pairs) - 0.5, -0.5), xlabel=axis)
    note = f"Small dots: {len(results.repeats)} repeated splits. Lines: 95 % intervals of the corrected resampled t-test."
    annotate(figure, title, [note])
    save_figure(figure, path)
