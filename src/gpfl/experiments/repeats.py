"""Repeated splits: several methods on the same data, split anew in every repeat.

Repeat k draws the split (for synthetic partitions, the partition) with the seed of the partition plus k, and trains with the
seed of the run plus k. All methods get the same splits. Preprocessing is fitted to each repeat's own training samples.

    results = run_repeats(settings, parse_methods("local,fedavg,gpfl"), 20, out, make_callback)
    results.values("gpfl", "auroc", client="cleveland")  # (repeats,), NaN where it is undefined

Repeats of a method run at once where the engine stacks clients: their samples, encoded by the statistics of their repeat, form
one table, from which the clients of all repeats draw their batches in the same steps (`gpfl.federation.share_table`).

Each method has one file, `METHOD/repeats.jsonl`: a line with its config, then a line for each finished repeat. Models are not
kept: `gpfl run --partition-seed … --seed …` with the seeds of a line trains them.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from gpfl.core.metrics import METRICS
from gpfl.core.net import InputSpec
from gpfl.data.table import SPLITS
from gpfl.engine import make_engine
from gpfl.engine.distributed import process_group
from gpfl.engine.slots import batched
from gpfl.errors import DivergenceError, GpflError, error_prefix
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.statistics import CorrectedTTest, Floats, corrected_t_test, holm_correction, rank_scores, round_values
from gpfl.experiments.stored_runs import check_same_config, hash_partition
from gpfl.experiments.trials import CallbackFactory
from gpfl.federation import Federation, partition_table
from gpfl.io import files
from gpfl.io.legacy import FORMAT_VERSION
from gpfl.training import config as configs
from gpfl.training.config import Config, ConfigDict
from gpfl.training.execute import PreparedRun, execute_trials
from gpfl.training.prepare import prepare
from gpfl.training.result import Result

REPEATS_FILE = "repeats.jsonl"  # file in a method's folder with its config and its finished repeats
STACKED_CLIENTS = 128  # clients of all repeats that run at once; more would not train faster
STACKED_BYTES = 1 << 30  # bytes of the encoded samples of all repeats that run at once

FIXED_SPLIT = "a manifest fixes every client's samples, and repeats divide them again: leave out --federation"

DrawSplit = Callable[[int], Federation]  # returns the federation of a repeat, the same in every call


class SplitMetrics(TypedDict):
    """The metrics of `METRICS` on one split: of all predictions together, and of each client. None is undefined."""

    overall: Mapping[str, float | None]
    clients: Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class RepeatRecord:
    """One method in one repeat: the metrics of the round that is reported, and its costs."""

    repeat: int  # number of the repeat, from 0
    seed: int  # seed of training
    partition_seed: int | None  # seed of the split; None if the config has no partition
    split: str  # hash of the data and of each client's samples
    n_samples: Mapping[str, Sequence[int]]  # training, validation and test samples of each client
    metrics: Mapping[str, SplitMetrics]  # metrics on "test" and, if there are any, on "validation" samples
    rounds: int  # rounds that were trained
    selected_round: int  # the round that is reported
    selected_by: str  # how it was selected: "last" or "validation" ("test" for the paper's protocol)
    bytes_up: int  # bytes that clients sent
    bytes_down: int  # bytes that clients received
    seconds: float  # time of the run; concurrent runs share it

    def value(self, metric: str, split: str = "test", client: str | None = None) -> float:
        """Return a metric of all predictions together or of a client; NaN if it is undefined or the client is absent."""
        if split not in self.metrics:
            raise GpflError(f"repeat {self.repeat} has no {split} samples: set --validation-fraction, such as 0.1")
        on_split = self.metrics[split]
        value = (on_split["overall"] if client is None else on_split["clients"].get(client, {})).get(metric)
        return float("nan") if value is None else value


@dataclass(frozen=True)
class RepeatedResults:
    """The finished repeats of several methods by label, and those that diverged in this call."""

    config: Config  # the config that all have in common; its method is the first one
    records: Mapping[str, Mapping[int, RepeatRecord]]  # for each method the records by repeat
    diverged: Mapping[str, Mapping[int, DivergenceError]] = field(default_factory=dict)  # for each method the errors by repeat

    @property
    def methods(self) -> list[str]:
        """Labels of the methods with finished repeats."""
        return [label for label, records in self.records.items() if records]

    @property
    def repeats(self) -> list[int]:
        """The repeats that all methods have finished."""
        finished = [set(self.records[label]) for label in self.methods]
        return sorted(set.intersection(*finished)) if finished else []

    @property
    def clients(self) -> list[str]:
        """The clients of every repeat, if the data name them; clients of a synthetic partition differ between repeats."""
        if self.config.partition is not None and self.config.partition.name != "natural":
            return []
        present = [record.n_samples for records in self.records.values() for record in records.values()]
        return [name for name in present[0] if all(name in names for names in present)] if present else []

    def values(self, method: str, metric: str, *, split: str = "test", client: str | None = None) -> Floats:
        """Return a metric of a method in each of `repeats`, of all predictions together or of a client; NaN if undefined."""
        return np.array([self.records[method][repeat].value(metric, split, client) for repeat in self.repeats])

    def test_train_ratio(self) -> float:
        """Return the number of test samples divided by that of all others, mean over repeats."""
        records = next(iter(self.records.values()))
        sizes = [np.sum(list(records[repeat].n_samples.values()), axis=0) for repeat in self.repeats]
        return float(np.mean([test / (train + validation) for train, validation, test in sizes]))


def run_repeats(
    settings: ConfigDict,
    variants: Sequence[MethodVariant],
    repeats: int,
    out: Path | None,
    make_callback: CallbackFactory,
    *,
    draw: DrawSplit | None = None,
    draw_for: Mapping[str, DrawSplit] | None = None,
) -> RepeatedResults:
    """Run repeats 0 to `repeats` − 1 of every method, except those that `out` holds, and return all of them.

    Without `out` the results stay in memory. `draw` returns the federation of a repeat, by default the config's partition with
    another seed; `draw_for` replaces it for single methods.
    """
    by_label = {}
    for variant in variants:
        with error_prefix(variant.label):
            by_label[variant.label] = configs.resolve_config(variant.config(settings))
    first = next(iter(by_label.values()))
    draw = draw or SplitDrawer(first)
    shared = [draw(repeat) for repeat in range(repeats)]
    drawn = {label: [special(repeat) for repeat in range(repeats)] for label, special in (draw_for or {}).items()}
    federations_of = {label: drawn.get(label, shared) for label in by_label}
    stores = {each.label: RepeatStore(out / each.folder / REPEATS_FILE if out else None, each.label) for each in variants}
    for label, federations in federations_of.items():
        config, _ = prepare(by_label[label], federations[0])  # raises before anything is run
        stores[label].start(config, federations)
    diverged: dict[str, dict[int, DivergenceError]] = {}
    for label, federations in federations_of.items():
        config = by_label[label]
        pending = [repeat for repeat in range(repeats) if repeat not in stores[label].records]
        for group in _group_repeats(config, federations, pending):
            runs = [
                PreparedRun(
                    *prepare(_for_repeat(config, repeat, federations[repeat]), federations[repeat]),
                    callbacks=[make_callback(f"{label} repeat {repeat}")],
                )
                for repeat in group
            ]
            for repeat, run, result in zip(group, runs, execute_trials(runs), strict=True):
                if isinstance(result, DivergenceError):
                    diverged.setdefault(label, {})[repeat] = result
                else:
                    stores[label].append(_to_record(repeat, run, result))
    records = {
        label: {repeat: record for repeat, record in sorted(store.records.items()) if repeat < repeats}
        for label, store in stores.items()
    }
    return RepeatedResults(first, records, diverged)


class SplitDrawer:
    """The default way to draw a repeat's federation: the config's partition with the seed of the repeat.

    With `same_clients`, a repeat divides the samples of the same clients, also of a synthetic partition.
    """

    def __init__(self, config: Config, *, same_clients: bool = False) -> None:
        if config.partition is None or config.source is None:
            raise GpflError(FIXED_SPLIT)
        if config.partition.rng == "pfllib":
            raise GpflError("repeats are drawn with gpfl's random numbers: leave out --partition-rng pfllib")
        self.partition, self.table, self._same_clients = config.partition, config.source.load(), same_clients
        if self.table.splits is not None and (same_clients or config.partition.name == "natural"):
            raise GpflError(
                f"data '{self.table.name}' says which samples are for testing, and repeats draw them anew: leave out "
                "--split-column, or join the files of training and test samples"
            )

    def __call__(self, repeat: int) -> Federation:
        """Return the federation of a repeat."""
        seed = self.partition.seed + repeat
        if self._same_clients:
            return partition_table(self.table, self.partition, seed)
        return partition_table(self.table, dataclasses.replace(self.partition, seed=seed))


class RepeatStore:
    """The finished repeats of one method, in its file or in memory."""

    def __init__(self, path: Path | None, label: str) -> None:
        self.path, self.label = path, label
        self.records: dict[int, RepeatRecord] = {}

    def start(self, config: Config, federations: Sequence[Federation]) -> None:
        """Read the file if there is one, else write its first line. Raise if it is of another config or other splits."""
        if self.path is None:
            return
        if not self.path.exists():
            self._write_line({"format_version": FORMAT_VERSION, "method": self.label, "config": config.sections()})
            return
        stored, self.records = read_repeats_file(self.path)
        check_same_config(self.path, stored, config.sections(), "repeats")
        splits = {repeat: hash_partition(federation.manifest()) for repeat, federation in enumerate(federations)}
        if any(record.split != splits.get(repeat, record.split) for repeat, record in self.records.items()):
            raise GpflError(f"{self.path} holds repeats on other data: choose another --out")

    def append(self, record: RepeatRecord) -> None:
        """Add a finished repeat."""
        self.records[record.repeat] = record
        self._write_line(dataclasses.asdict(record))

    def _write_line(self, content: Mapping[str, object]) -> None:
        path = self.path
        if path is not None:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            line = json.dumps(content, allow_nan=False) + "\n"
            process_group().run_on_main(lambda: files.write_text(path, text + line))


def read_repeats_file(path: Path) -> tuple[ConfigDict, dict[int, RepeatRecord]]:
    """Return the config and the finished repeats in a method's file."""
    fix = f"remove {path.parent} to run its repeats again"
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        config = json.loads(header)["config"]
        records = [RepeatRecord(**json.loads(line)) for line in lines]
    except OSError as error:
        raise GpflError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise GpflError(f"{path} is damaged ({error}): {fix}") from None
    return config, {record.repeat: record for record in records}


def _group_repeats(config: Config, federations: Sequence[Federation], repeats: Sequence[int]) -> list[list[int]]:
    """Return the repeats that run at once. Those whose categories give other inputs do not."""
    by_input: dict[InputSpec, list[int]] = {}
    for repeat in repeats:
        by_input.setdefault(federations[repeat].table.input_spec, []).append(repeat)
    groups = []
    for group in by_input.values():
        federation, size = federations[group[0]], 1
        _, spec = prepare(config, federation)
        if make_engine(config.run.engine, spec).supports_concurrent_trials and not config.defence.enabled:
            size = max(1, STACKED_CLIENTS // len(federation))
        if federation.preprocessing is not None:  # every repeat has a table of its own
            size = max(1, min(size, STACKED_BYTES // federation.table.x.nbytes))
        groups += batched(group, size)
    return groups


def _for_repeat(config: Config, repeat: int, federation: Federation) -> Config:
    """Return the config of a repeat: the same with other seeds, and without evaluations that cannot change what is reported."""
    run = dataclasses.replace(config.run, seed=config.run.seed + repeat)
    partition = config.partition and dataclasses.replace(config.partition, seed=config.partition.seed + repeat)
    last = run.select == "last" or (run.select == "auto" and not federation.has_validation)
    if last and not config.train.patience:
        run = dataclasses.replace(run, eval_every=config.train.rounds)
    return dataclasses.replace(config, run=run, partition=partition)


def _to_record(repeat: int, run: PreparedRun, result: Result) -> RepeatRecord:
    config, federation, summary = run.config, run.spec.federation, cast(Mapping[str, Any], result.summary)
    metrics = {split: result.metric_values(split) for split in ("test", "validation")[: 1 + federation.has_validation]}
    return RepeatRecord(
        repeat=repeat,
        seed=config.run.seed,
        partition_seed=config.partition.seed if config.partition else None,
        split=hash_partition(federation.manifest()),
        n_samples={shard.name: [len(shard.split(split)) for split in SPLITS] for shard in federation.shards},
        metrics={split: SplitMetrics(overall=overall, clients=clients) for split, (overall, clients) in metrics.items()},
        **{key: summary[key] for key in ("rounds", "selected_round", "selected_by", "bytes_up", "bytes_down", "seconds")},
    )


@dataclass(frozen=True)
class MethodScore:
    """A metric of one method over repeats."""

    method: str  # label of the method
    values: Floats  # the metric of all predictions together in each repeat
    mean_rank: float  # mean rank among the methods, 1 for the best
    best_in: int  # repeats in which no method is better


@dataclass(frozen=True)
class PairedDifference:
    """The difference of a metric between two methods, one minus other, over repeats."""

    one: str  # the first method
    other: str  # the second method
    test: CorrectedTTest  # mean, interval and p-value by the corrected resampled t-test
    corrected_p: float | None  # the p-value, corrected for the number of pairs by Holm's method
    wins: int  # repeats in which the first is better
    losses: int  # repeats in which the second is better
    client_wins: float  # clients for which the first is better, mean over repeats
    client_losses: float  # clients for which the second is better, mean over repeats


@dataclass(frozen=True)
class ClientScore:
    """A metric of one method on one client: its mean over repeats, and the repeats in which no method is better."""

    mean: float
    best_in: int


def score_methods(results: RepeatedResults, metric: str) -> list[MethodScore]:
    """Return the scores of the methods, the best mean first."""
    values = np.stack([results.values(name, metric) for name in results.methods])  # (methods, repeats)
    ranks, best = _ranks(values, metric), _is_best(values, metric)
    scores = [
        MethodScore(name, values[k], float(ranks[k].mean()), int(best[k].sum())) for k, name in enumerate(results.methods)
    ]
    return sorted(scores, key=lambda score: -METRICS[metric].sign * float(score.values.mean()))


def compare_pairs(results: RepeatedResults, metric: str, pairs: Sequence[tuple[str, str]]) -> list[PairedDifference]:
    """Return the differences of pairs of methods, first minus second; p-values are corrected for these pairs alone."""
    ratio, sign = results.test_train_ratio(), METRICS[metric].sign
    values = {name: results.values(name, metric) for name in dict.fromkeys(name for pair in pairs for name in pair)}
    tests = [corrected_t_test(values[one] - values[other], ratio) for one, other in pairs]
    corrected = holm_correction([test.p for test in tests])
    differences = []
    for (one, other), test, p in zip(pairs, tests, corrected, strict=True):
        better = sign * round_values(values[one] - values[other])
        records = [(results.records[one][repeat], results.records[other][repeat]) for repeat in results.repeats]
        by_client = [
            sign * round_values([a.value(metric, client=client) - b.value(metric, client=client) for client in a.n_samples])
            for a, b in records
        ]
        client_wins, client_losses = (float(np.mean([(side * each > 0).sum() for each in by_client])) for side in (1, -1))
        wins, losses = int((better > 0).sum()), int((better < 0).sum())
        differences.append(PairedDifference(one, other, test, p, wins, losses, client_wins, client_losses))
    return differences


def score_clients(results: RepeatedResults, metric: str) -> dict[str, dict[str, ClientScore]]:
    """Return the score of each method on each client, by client and method; empty if clients differ between repeats."""
    scores = {}
    for client in results.clients:
        values = np.stack([results.values(name, metric, client=client) for name in results.methods])
        best = _is_best(values, metric)
        scores[client] = {
            name: ClientScore(float(np.nanmean(row)) if not np.isnan(row).all() else float("nan"), int(best[k].sum()))
            for k, (name, row) in enumerate(zip(results.methods, values, strict=True))
        }
    return scores


def _ranks(values: Floats, metric: str) -> Floats:
    return np.stack([rank_scores(column, lowest_is_best=METRICS[metric].lower_is_better) for column in values.T], axis=1)


def _is_best(values: Floats, metric: str) -> npt.NDArray[np.bool_]:
    """Return where no method is better, (methods, repeats)."""
    rounded = METRICS[metric].sign * round_values(values)
    best: npt.NDArray[np.bool_] = rounded == np.fmax.reduce(rounded, axis=0)
    return best
