"""Should these clients federate? Trains alone and together on repeated splits and returns what the scores say."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpfl.core.metrics import METRICS
from gpfl.core.randomness import generator
from gpfl.data.table import SPLITS
from gpfl.errors import GpflError
from gpfl.experiments.advice import (
    ALONE,
    CLEAR,
    Advice,
    CurveScores,
    Floats,
    Scores,
    Verdict,
    best_on_validation,
    give_advice,
    mean_of_clients,
    required_repeats,
)
from gpfl.experiments.compare import MethodVariant, parse_methods
from gpfl.experiments.pairwise import metric_sign
from gpfl.experiments.repeats import RepeatedResults, RepeatRecord, run_repeats
from gpfl.experiments.trials import CallbackFactory
from gpfl.federation import Federation, Partition, partition_table
from gpfl.inference.metrics import UndefinedMetricError, compute_metric
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict

GLOBAL = "fedavg"
DEFAULT_METHODS = "fedavg-ft,fedper,ditto,gpfl"
"""Personalised methods that are tried by default."""

DEFAULTS: Mapping[str, Mapping[str, object]] = {"partition": {"validation_fraction": 0.2}, "train": {"rounds": 30}}
"""Settings of the config that differ from those of other commands, by default: small tables need few rounds."""

FIRST_REPEATS = 2
"""Repeats of all methods that are run first, from which the time of all is estimated."""

FRACTIONS = (0.25, 0.5, 0.75)
"""Fractions of the training samples at which learning curves are measured, besides all of them."""

Overrides = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class MethodCost:
    """What a method costs in one training, mean over repeats.

    Attributes:
        rounds: Rounds that were trained.
        selected_round: Round whose models are best on validation samples.
        bytes_up: Bytes that one client sends.
        bytes_down: Bytes that one client receives.
        seconds: Time to simulate all clients on this machine.

    """

    rounds: float
    selected_round: float
    bytes_up: float
    bytes_down: float
    seconds: float


@dataclass(frozen=True)
class AdviceResult:
    """The advice for a federation, and what it is based on."""

    config: Config
    advice: Advice
    scores: Scores
    curves: CurveScores | None
    no_curves: str  # why there are no learning curves
    costs: Mapping[str, MethodCost]
    rope: float
    diverged: Mapping[str, str]  # methods that are left out since they diverged, and how

    @property
    def metric(self) -> str:
        """The metric that models are judged by."""
        return self.scores.metric

    def mean_score(self, method: str) -> float:
        """Return a method's mean test score over clients and repeats."""
        return mean_of_clients(self.scores, self.scores.test[method])

    def to_dict(self) -> dict[str, object]:
        """Return the content of advice.json."""
        scores, advice = self.scores, self.advice
        return {
            "recommendation": advice.choice,
            "method": advice.method,
            "data": self.config.data,
            "metric": scores.metric,
            "repeats": scores.n_repeats,
            "region_of_practical_equivalence": self.rope,
            "clear_probability": CLEAR,
            "test": "Bayesian correlated t-test (Corani and Benavoli, 2015)",
            "average": _verdict_dict(advice.average, scores.metric),
            "clients": {verdict.name: _verdict_dict(verdict, scores.metric) for verdict in advice.clients},
            "global_model_gain": advice.global_gain and dataclasses.asdict(advice.global_gain),
            "personalised_over_global_gain": advice.personal_gain and dataclasses.asdict(advice.personal_gain),
            "chosen_in_repeats": dict(advice.chosen),
            "costs": {name: dataclasses.asdict(cost) for name, cost in self.costs.items()},
            "diverged": dict(self.diverged),
            "learning_curve": self._curve_dict(),
            "scores": {
                split: {name: _to_lists(values, scores.metric) for name, values in by_method.items()}
                for split, by_method in (("validation", scores.validation), ("test", scores.test))
            }
            | {"constant": _to_lists(scores.constant, scores.metric)},
        }

    def _curve_dict(self) -> dict[str, object]:
        if self.curves is None:
            return {"missing": self.no_curves}
        return {
            "fractions": self.curves.fractions.tolist(),
            "method": self.curves.method,
            "training_samples": dict(zip(self.scores.clients, self.scores.n_train.tolist(), strict=True)),
            "alone": _to_lists(self.curves.alone, self.metric),
            "joined": _to_lists(self.curves.joined, self.metric),
        }


def parse_variants(text: str) -> list[MethodVariant]:
    """Return staying alone, one global model and the methods of a list."""
    return list({variant.label: variant for variant in parse_methods(f"{ALONE},{GLOBAL},{text}")}.values())


def resolve_settings(settings: ConfigDict) -> ConfigDict:
    """Return settings with the defaults of advice. Raise if they, or the data that they name, do not allow advice."""
    complete = {**settings, **{section: {**values, **settings.get(section, {})} for section, values in DEFAULTS.items()}}
    if complete["partition"].get("name") == "manifest":
        raise GpflError(FIXED_SPLIT)
    if complete["partition"]["validation_fraction"] == 0:
        raise GpflError(
            "partition.validation_fraction is 0, but gpfl advise chooses the method on validation samples, never on test "
            f"samples: leave it out, which means {DEFAULTS['partition']['validation_fraction']:g}"
        )
    select = complete.get("run", {}).get("select", "auto")
    if select not in ("auto", "validation"):
        raise GpflError(f"run.select is '{select}', but gpfl advise chooses rounds on validation samples: leave it out")
    if complete.get("run", {}).get("metric") == "ece":
        raise GpflError(
            "run.metric is 'ece', by which always predicting the class frequencies is nearly best, so it cannot tell whether a "
            "model has learnt anything: use log_loss or brier"
        )
    return complete


def advise(
    settings: ConfigDict,
    variants: Sequence[MethodVariant],
    repeats: int,
    out: Path,
    make_callback: CallbackFactory,
    *,
    overrides: Overrides | None = None,
    rope: float = 0.01,
    report_time: Callable[[float, float], None] = lambda elapsed, remaining: None,
) -> AdviceResult:
    """Run what `out` does not hold yet and return the advice.

    Args:
        settings: Config without the method, from `resolve_settings`.
        variants: The methods, with staying alone and one global model.
        repeats: Number of repeated splits.
        out: Folder of the results.
        make_callback: Returns the callback of a run from its label.
        overrides: Settings of single methods by name.
        rope: Region of practical equivalence: differences of the metric up to this size do not matter.
        report_time: Called after `FIRST_REPEATS` new repeats of all methods with their seconds and the expected seconds for
            the others.

    """
    config = configs.resolve_config({**settings, "method": {"name": ALONE}})
    draw = ClientSplits(config)

    def run(count: int) -> RepeatedResults:
        return run_repeats(
            settings, variants, count, out, count_runs, overrides=overrides, draw=draw, draw_for={ALONE: draw.alone()}
        )

    started: list[str] = []

    def count_runs(label: str) -> Callback:
        started.append(label)
        return make_callback(label)

    start = time.perf_counter()
    run(FIRST_REPEATS)
    if len(started) == FIRST_REPEATS * len(variants):
        elapsed = time.perf_counter() - start
        report_time(elapsed, elapsed / FIRST_REPEATS * (repeats - FIRST_REPEATS))
    results = run(repeats)
    diverged = _check_diverged(results)
    kept = {name: records for name, records in results.records.items() if name not in diverged}
    results = dataclasses.replace(results, records=kept)
    scores = collect_scores(results, draw, config.run.metric)
    advice = give_advice(scores, rope, seed=config.run.seed)
    curves, no_curves = None, "not measured, since more samples would not change an answer"
    if advice.is_noisy:
        method = best_on_validation(scores, scores.federated)
        pair = [variant for variant in variants if variant.label in (ALONE, method)]
        at_fractions = {}
        try:
            for fraction in FRACTIONS:
                folder, draw_fraction = out / f"training-{fraction:g}", TrainingFraction(draw, fraction)
                name_fraction = f"{fraction:.0%} of the training samples, "
                at_fractions[fraction] = run_repeats(
                    settings,
                    pair,
                    repeats,
                    folder,
                    lambda label, prefix=name_fraction: make_callback(prefix + label),  # type: ignore[misc]
                    overrides=overrides,
                    draw=draw_fraction,
                    draw_for={ALONE: TrainingFraction(draw.alone(), fraction)},
                )
        except GpflError as error:  # a method may need more samples than a fraction leaves
            no_curves = f"not measured: {error}"
        else:
            curves = collect_curves(scores, results, at_fractions, method)
            advice = give_advice(scores, rope, curves, config.run.seed)
    return AdviceResult(
        config=results.config,
        advice=advice,
        scores=scores,
        curves=curves,
        no_curves=no_curves,
        costs={name: measure_cost(results, name) for name in scores.test},
        rope=rope,
        diverged=diverged,
    )


def check_data(settings: ConfigDict, repeats: int) -> Config:
    """Return the complete config. Raise if the data have a fixed split, one client, or no client with a defined metric."""
    config = configs.resolve_config({**settings, "method": {"name": ALONE}})
    draw, metric = ClientSplits(config), config.run.metric
    defined = ~np.isnan([score_constant(draw(repeat), metric) for repeat in range(repeats)])
    if (defined.sum(0) < required_repeats(repeats)).all():
        label = METRICS[metric].label
        raise GpflError(
            f"{label} is undefined in most of {repeats} repeats at every client, since test samples have too few classes: "
            "choose --metric accuracy or log_loss, or raise --test-fraction"
        )
    return config


FIXED_SPLIT = (
    "a manifest fixes every client's samples, and gpfl advise divides them anew in every repeat: leave out --federation"
)


class ClientSplits:
    """Draws the splits of a repeat: the same clients, each with other training, validation and test samples."""

    def __init__(self, config: Config) -> None:
        if config.partition is None or config.source is None:
            raise GpflError(FIXED_SPLIT)
        if config.partition.rng == "pfllib":
            raise GpflError("gpfl advise draws splits with gpfl's random numbers: leave out --partition-rng pfllib")
        self.partition: Partition = config.partition
        self.table = config.source.load()
        if self.table.splits is not None:
            raise GpflError(
                f"data '{self.table.name}' says which samples are for testing, and gpfl advise draws test samples anew in "
                "every repeat: leave out --split-column, or join the files of training and test samples"
            )

    def alone(self) -> ClientSplits:
        """Return the same splits with numbers filled and scaled by each client's own statistics, as if it had no others'."""
        if self.table.raw is None or self.table.preprocessing.scale != "federated":
            return self
        out = copy.copy(self)
        out.table = copy.copy(self.table)
        out.table.preprocessing = dataclasses.replace(self.table.preprocessing, scale="local")
        return out

    def __call__(self, repeat: int) -> Federation:
        """Return the federation of a repeat."""
        federation = partition_table(self.table, self.partition, self.partition.seed + repeat)
        if len(federation) < 2:
            raise GpflError(
                f"data '{self.table.name}' has one client, {federation.shards[0].name}; gpfl advise compares joining with "
                "staying alone, which needs at least 2: name another column of clients with --client"
            )
        return federation


@dataclass(frozen=True)
class TrainingFraction:
    """Draws the splits of a repeat with a fraction of the training samples; those of a smaller fraction are among them."""

    draw: ClientSplits
    fraction: float

    def __call__(self, repeat: int) -> Federation:
        """Return the federation of a repeat."""
        full = self.draw(repeat)
        shards = []
        for client, shard in enumerate(full.shards):
            order = generator(self.draw.partition.seed + repeat, "subset", client).permutation(shard.train)
            shards.append(dataclasses.replace(shard, train=order[: max(1, round(self.fraction * len(order)))]))
        return Federation(self.draw.table, shards, full.partition)


def collect_scores(results: RepeatedResults, draw: ClientSplits, metric: str) -> Scores:
    """Return the scores of all methods on the validation and test samples of the repeats."""
    federations = {repeat: draw(repeat) for repeat in results.repeats}
    clients = [shard.name for shard in next(iter(federations.values())).shards]
    sizes = np.array(
        [[each.n_samples(split) for split in SPLITS] for each in federations.values()]
    )  # (repeats, splits, clients)
    validation, test = (
        {name: _client_scores(results.records[name], results.repeats, clients, metric, split) for name in results.methods}
        for split in ("validation", "test")
    )
    return Scores(
        clients=clients,
        metric=metric,
        validation=validation,
        test=test,
        constant=metric_sign(metric) * np.array([score_constant(each, metric) for each in federations.values()]),
        n_samples=sizes[0].sum(0),
        n_test=sizes[:, SPLITS.index("test")].mean(0),
        n_train=sizes[:, SPLITS.index("train")].mean(0),
    )


def collect_curves(
    scores: Scores, results: RepeatedResults, at_fractions: Mapping[float, RepeatedResults], method: str
) -> CurveScores:
    """Return the learning curves of staying alone and of a method, from the repeats at fractions of the training samples."""

    def curve(name: str) -> Floats:
        parts = [
            _client_scores(each.records[name], results.repeats, scores.clients, scores.metric, "test")
            for each in at_fractions.values()
        ]
        return np.stack([*parts, scores.test[name]], axis=1)

    return CurveScores(np.array([*at_fractions, 1.0]), method, curve(ALONE), curve(method))


def score_constant(federation: Federation, metric: str) -> list[float]:
    """Return each client's test metric of always predicting the class frequencies of its training samples; NaN if undefined."""
    scores = []
    for client, counts in enumerate(federation.label_counts.astype(np.float64)):
        y = federation.labels(client, "test")
        frequencies = (counts + 1) / (counts + 1).sum()  # no class has probability 0, whose log loss is infinite
        try:
            scores.append(compute_metric(metric, y, np.tile(frequencies, (len(y), 1)), federation.class_names))
        except UndefinedMetricError:
            scores.append(float("nan"))
    return scores


def measure_cost(results: RepeatedResults, method: str) -> MethodCost:
    """Return the mean cost of a method's trainings."""
    records = [results.records[method][repeat] for repeat in results.repeats]

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    return MethodCost(
        rounds=mean(record.rounds for record in records),
        selected_round=mean(record.selected_round for record in records),
        bytes_up=mean(record.bytes_up / len(record.n_samples) for record in records),
        bytes_down=mean(record.bytes_down / len(record.n_samples) for record in records),
        seconds=mean(record.seconds for record in records),
    )


def _check_diverged(results: RepeatedResults) -> dict[str, str]:
    """Return how methods diverged. Raise if it is staying alone or the global model, without which there is no advice."""
    for name in (ALONE, GLOBAL):
        for error in results.diverged.get(name, {}).values():
            raise GpflError(f"{name}: {error}")
    return {name: str(next(iter(errors.values()))) for name, errors in results.diverged.items() if errors}


def _client_scores(
    records: Mapping[int, RepeatRecord], repeats: Sequence[int], clients: Sequence[str], metric: str, split: str
) -> Floats:
    """Return scores (repeats, clients), higher is better; NaN where undefined, or where a repeat is missing."""
    missing = [float("nan")] * len(clients)
    values = [
        [records[repeat].value(metric, split, client) for client in clients] if repeat in records else missing
        for repeat in repeats
    ]
    return metric_sign(metric) * np.array(values, dtype=np.float64)


def _to_lists(values: Floats, metric: str) -> list[object]:
    """Return scores as metric values for JSON, which has no NaN."""
    lists: list[object] = np.where(np.isnan(values), None, metric_sign(metric) * values).tolist()  # type: ignore[call-overload]
    return lists


def _verdict_dict(verdict: Verdict, metric: str) -> dict[str, object]:
    gain, more = verdict.gain, verdict.more_samples
    means = {"alone": verdict.alone, "joined": verdict.joined, "constant": verdict.constant}
    return {
        "samples": verdict.n_samples,
        "answer": verdict.answer,
        "reason": verdict.reason,
        **{name: None if math.isnan(value) else metric_sign(metric) * value for name, value in means.items()},
        "gain": gain and dataclasses.asdict(gain),
        "best_methods": list(verdict.methods),
        "samples_factor": more and dataclasses.asdict(more),
        "samples_more": more
        and {
            key: round((factor - 1) * verdict.n_samples)
            for key, factor in zip(("expected", "low", "high"), dataclasses.astuple(more), strict=True)
        },
    }
