"""Should these clients federate? Trains alone and together on repeated splits and returns what the scores say."""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import numpy as np

from gpfl.core.metrics import METRICS
from gpfl.core.randomness import generator
from gpfl.data.table import SPLITS
from gpfl.errors import GpflError
from gpfl.experiments import advice as advising
from gpfl.experiments.advice import ALL, ALONE, CLEAR, Advice, CurveScores, Floats, Scores, Verdict
from gpfl.experiments.compare import MethodVariant, parse_methods
from gpfl.experiments.repeats import FIXED_SPLIT, DrawSplit, RepeatedResults, RepeatRecord, SplitDrawer, run_repeats
from gpfl.experiments.trials import CallbackFactory
from gpfl.federation import Federation
from gpfl.inference.metrics import UndefinedMetricError, compute_metric
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict

GLOBAL = "fedavg"
DEFAULT_METHODS = "fedavg-ft,fedper,ditto,gpfl"  # personalised methods

DEFAULTS: Mapping[str, Mapping[str, object]] = {"partition": {"validation_fraction": 0.2}, "train": {"rounds": 30}}
"""Settings of the config that differ from those of other commands, by default: small tables need few rounds."""

FIRST_REPEATS = 2  # repeats of all methods that are run first, from which the time of all is estimated
FRACTIONS = (0.25, 0.5, 0.75)  # fractions of the training samples at which learning curves are measured, besides all of them


@dataclass(frozen=True)
class MethodCost:
    """What a method costs in one training, mean over repeats."""

    rounds: float
    selected_round: float
    bytes_up: float  # that one client sends
    bytes_down: float  # that one client receives
    seconds: float  # to simulate all clients on this machine


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

    def mean_score(self, method: str) -> float:
        """Return a method's mean test score over clients and repeats."""
        return float(advising.mean_of_defined(self.scores.mean_over(ALL, self.scores.test[method])))

    def to_dict(self) -> dict[str, object]:
        """Return the content of advice.json."""
        scores, advice, sign = self.scores, self.advice, METRICS[self.scores.metric].sign

        def to_lists(values: Floats) -> list[object]:  # metric values; JSON has no NaN
            lists: list[object] = np.where(np.isnan(values), None, sign * values).tolist()  # type: ignore[call-overload]
            return lists

        curve: dict[str, object] = {"missing": self.no_curves}
        if self.curves is not None:
            curve = {
                "fractions": self.curves.fractions.tolist(),
                "method": self.curves.method,
                "training_samples": dict(zip(scores.clients, scores.n_train.tolist(), strict=True)),
                "alone": to_lists(self.curves.alone),
                "joined": to_lists(self.curves.joined),
            }
        return {
            "recommendation": advice.choice,
            "method": advice.method,
            "data": self.config.data,
            "metric": scores.metric,
            "repeats": scores.n_repeats,
            "region_of_practical_equivalence": self.rope,
            "clear_probability": CLEAR,
            "test": "Bayesian correlated t-test (Corani and Benavoli, 2015)",
            "average": _verdict_dict(advice.average, sign),
            "clients": {verdict.name: _verdict_dict(verdict, sign) for verdict in advice.clients},
            "global_model_gain": advice.global_gain and asdict(advice.global_gain),
            "personalised_over_global_gain": advice.personal_gain and asdict(advice.personal_gain),
            "chosen_in_repeats": dict(advice.chosen),
            "costs": {name: asdict(cost) for name, cost in self.costs.items()},
            "diverged": dict(self.diverged),
            "learning_curve": curve,
            "scores": {
                "validation": {name: to_lists(values) for name, values in scores.validation.items()},
                "test": {name: to_lists(values) for name, values in scores.test.items()},
                "constant": to_lists(scores.constant),
            },
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


def check_data(settings: ConfigDict, repeats: int) -> Config:
    """Return the complete config. Raise if the data have a fixed split, one client, or no client with a defined metric."""
    config, draw = _draw_clients(settings)
    metric = config.run.metric
    defined = ~np.isnan([score_constant(draw(repeat), metric) for repeat in range(repeats)])
    if (defined.sum(0) < advising.required_repeats(repeats)).all():
        raise GpflError(
            f"{METRICS[metric].label} is undefined in most of {repeats} repeats at every client, since test samples have too "
            "few classes: choose --metric accuracy or log_loss, or raise --test-fraction"
        )
    return config


def _draw_clients(settings: ConfigDict) -> tuple[Config, SplitDrawer]:
    config = configs.resolve_config({**settings, "method": {"name": ALONE}})
    draw = SplitDrawer(config, same_clients=True)
    if len(first := draw(0)) < 2:
        raise GpflError(
            f"data '{draw.table.name}' has one client, {first.shards[0].name}; gpfl advise compares joining with staying "
            "alone, which needs at least 2: name another column of clients with --client"
        )
    return config, draw


def advise(
    settings: ConfigDict,
    variants: Sequence[MethodVariant],
    repeats: int,
    out: Path,
    make_callback: CallbackFactory,
    *,
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
        rope: Region of practical equivalence: differences of the metric up to this size do not matter.
        report_time: Called after `FIRST_REPEATS` new repeats of all methods with their seconds and the expected seconds for
            the others.

    """
    config, draw = _draw_clients(settings)
    started: list[str] = []

    def run(count: int, methods: Sequence[MethodVariant] = variants, fraction: float = 1.0) -> RepeatedResults:
        folder, prefix = out, ""
        if fraction < 1:
            folder, prefix = out / f"training-{fraction:g}", f"{fraction:.0%} of the training samples, "

        def start(label: str) -> Callback:
            started.append(label)
            return make_callback(prefix + label)

        shared, own = (reduce_training(each, fraction) for each in (draw, with_own_statistics(draw)))
        return run_repeats(settings, methods, count, folder, start, draw=shared, draw_for={ALONE: own})

    begin = time.perf_counter()
    run(FIRST_REPEATS)
    if len(started) == FIRST_REPEATS * len(variants):
        elapsed = time.perf_counter() - begin
        report_time(elapsed, elapsed / FIRST_REPEATS * (repeats - FIRST_REPEATS))
    results = run(repeats)
    diverged = _check_diverged(results)
    results = replace(results, records={name: each for name, each in results.records.items() if name not in diverged})
    scores = collect_scores(results, draw, config.run.metric)
    advice = advising.give_advice(scores, rope, seed=config.run.seed)
    curves, no_curves = None, "not measured, since more samples would not change an answer"
    if advice.is_noisy:
        method = advising.best_on_validation(scores, scores.federated)
        pair = [variant for variant in variants if variant.label in (ALONE, method)]
        try:
            at_fractions = {fraction: run(repeats, pair, fraction) for fraction in FRACTIONS}
        except GpflError as error:  # a method may need more samples than a fraction leaves
            no_curves = f"not measured: {error}"
        else:
            curves = collect_curves(scores, results, at_fractions, method)
            advice = advising.give_advice(scores, rope, curves, config.run.seed)
    costs = {name: measure_cost(results, name) for name in scores.test}
    return AdviceResult(results.config, advice, scores, curves, no_curves, costs, rope, diverged)


def with_own_statistics(draw: SplitDrawer) -> SplitDrawer:
    """Return the same splits with numbers filled and scaled by each client's own statistics alone."""
    if draw.table.raw is None or draw.table.preprocessing.scale != "federated":
        return draw
    alone = copy.copy(draw)
    alone.table = copy.copy(draw.table)
    alone.table.preprocessing = replace(draw.table.preprocessing, scale="local")
    return alone


def reduce_training(draw: SplitDrawer, fraction: float) -> DrawSplit:
    """Return the splits with a fraction of the training samples; those of a smaller fraction are among them."""
    if fraction == 1:
        return draw

    def draw_fraction(repeat: int) -> Federation:
        full, seed = draw(repeat), draw.partition.seed + repeat
        shards = []
        for client, shard in enumerate(full.shards):
            order = generator(seed, "subset", client).permutation(shard.train)
            shards.append(replace(shard, train=order[: max(1, round(fraction * len(order)))]))
        return Federation(draw.table, shards, full.partition)

    return draw_fraction


def collect_scores(results: RepeatedResults, draw: SplitDrawer, metric: str) -> Scores:
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
        constant=METRICS[metric].sign * np.array([score_constant(each, metric) for each in federations.values()]),
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
    traffic = [(each.bytes_up / len(each.n_samples), each.bytes_down / len(each.n_samples)) for each in records]
    costs = [(each.rounds, each.selected_round, *sent, each.seconds) for each, sent in zip(records, traffic, strict=True)]
    return MethodCost(*np.mean(costs, axis=0).tolist())


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
    return METRICS[metric].sign * np.array(values, dtype=np.float64)


def _verdict_dict(verdict: Verdict, sign: int) -> dict[str, object]:
    gain, more = verdict.gain, verdict.more_samples
    means = {"alone": verdict.alone, "joined": verdict.joined, "constant": verdict.constant}
    extra = more and [round((factor - 1) * verdict.n_samples) for factor in astuple(more)]
    return {
        "samples": verdict.n_samples,
        "answer": verdict.answer,
        "reason": verdict.reason,
        **{name: None if math.isnan(value) else sign * value for name, value in means.items()},
        "gain": gain and asdict(gain),
        "best_methods": list(verdict.methods),
        "samples_factor": more and asdict(more),
        "samples_more": extra and dict(zip(("expected", "low", "high"), extra, strict=True)),
    }
