"""Decisions from given scores: honest choices, posteriors by hand, ties, undefined metrics, noise and tiny clients."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pytest

from gpfl.experiments.advice import (
    Gain,
    Scores,
    Verdict,
    choose,
    follow_choice,
    give_advice,
    measure_gain,
    methods_within_noise,
)
from gpfl.experiments.statistics import correlated_t_posterior

Floats = npt.NDArray[np.float64]
NAN = float("nan")
REPEATS = 20


def noisy(means: float | list[float], std: float = 0.02, seed: int = 0) -> Floats:
    """Return scores (repeats, clients) with exactly these means and this standard deviation over repeats."""
    noise = np.random.default_rng(seed).normal(size=(REPEATS, np.size(means)))
    return np.array(means) + std * (noise - noise.mean(0)) / noise.std(0, ddof=1)


def scores_of(means: Mapping[str, list[float]], *, std: float = 0.02, n_samples: int = 400, **changes: object) -> Scores:
    """Return scores with these means for each client, equal on validation and on test samples."""
    by_method = {name: noisy(values, std, seed) for seed, (name, values) in enumerate(means.items())}
    return scores_from(by_method, by_method, n_samples=n_samples, **changes)


def scores_from(
    validation: Mapping[str, Floats], test: Mapping[str, Floats], *, n_samples: int = 400, **changes: object
) -> Scores:
    """Return the scores of clients with 400 samples, a quarter of them for testing."""
    clients = test["local"].shape[1]
    values: dict[str, object] = {
        "clients": [f"c{k}" for k in range(clients)],
        "metric": "accuracy",
        "validation": validation,
        "test": test,
        "constant": np.full((REPEATS, clients), 0.5),
        "n_samples": np.full(clients, n_samples),
        "n_train": np.full(clients, 0.6 * n_samples),
        "n_test": np.full(clients, n_samples / 4),
    }
    return Scores(**(values | changes))  # type: ignore[arg-type]


def answers(scores: Scores, rope: float = 0.01) -> tuple[str, str, list[str]]:
    advice = give_advice(scores, rope)
    return advice.choice, advice.method, [f"{client.answer} {client.reason}".strip() for client in advice.clients]


# The recommendation.


def test_a_global_model_that_is_as_good_as_any_other_is_recommended() -> None:
    scores = scores_of({"local": [0.7, 0.7], "fedavg": [0.8, 0.8], "fedper": [0.8, 0.8]})
    assert answers(scores) == ("global", "fedavg", ["yes", "yes"])


def test_a_personalised_method_is_recommended_where_it_is_clearly_better_than_a_global_model() -> None:
    scores = scores_of({"local": [0.7, 0.7], "fedavg": [0.75, 0.75], "fedper": [0.9, 0.9], "ditto": [0.85, 0.85]})
    assert answers(scores) == ("personalised", "fedper", ["yes", "yes"])


def test_staying_alone_is_recommended_where_joining_is_worse() -> None:
    scores = scores_of({"local": [0.9, 0.9], "fedavg": [0.6, 0.6], "fedper": [0.8, 0.8]})
    assert answers(scores) == ("alone", "local", ["no", "no"])


def test_staying_alone_is_recommended_where_joining_makes_no_practical_difference() -> None:
    scores = scores_of({"local": [0.9, 0.9], "fedavg": [0.9, 0.9]}, std=0.001, n_samples=40_000)
    advice = give_advice(scores, 0.01)
    assert (advice.choice, advice.average.answer) == ("alone", "no")
    assert advice.average.gain is not None
    assert advice.average.gain.same > 0.99


def test_nothing_is_recommended_where_the_gain_is_within_noise() -> None:
    scores = scores_of({"local": [0.8, 0.8], "fedavg": [0.82, 0.82]}, std=0.06)
    assert answers(scores) == ("unclear", "", ["unclear noise", "unclear noise"])


def test_nothing_is_recommended_where_no_model_beats_a_constant() -> None:
    # Joining is clearly better than staying alone, but both are no better than predicting the most frequent class.
    scores = scores_of({"local": [0.40, 0.42], "fedavg": [0.5, 0.5]})
    assert answers(scores) == ("unclear", "", ["unclear no signal", "unclear no signal"])


def test_one_client_that_does_better_alone_is_an_exception() -> None:
    scores = scores_of({"local": [0.7, 0.7, 0.7, 0.9], "fedavg": [0.85, 0.85, 0.85, 0.75]})
    advice = give_advice(scores, 0.01)
    assert advice.choice == "global"
    assert [client.name for client in advice.exceptions] == ["c3"]


def test_the_average_gives_every_client_the_same_weight() -> None:
    scores = scores_of({"local": [0.7, 0.8], "fedavg": [0.8, 0.8]}, n_test=np.array([10.0, 300.0]))
    gain = give_advice(scores, 0.01).average.gain
    assert gain is not None
    assert gain.mean == pytest.approx(0.05)


def gain(better: float) -> Gain:
    return Gain(0.0, -1.0, 1.0, better, 0.0, 1 - better, REPEATS)


@pytest.mark.parametrize(
    ("answer", "global_better", "personal_better", "expected"),
    [
        ("unclear", 0.99, 0.99, "unclear"),
        ("no", 0.99, 0.99, "alone"),
        ("yes", 0.99, 0.99, "personalised"),
        ("yes", 0.99, 0.60, "global"),
        ("yes", 0.60, 0.60, "personalised"),  # only joining with the method chosen on validation samples is clearly better
        ("yes", 0.60, None, "global"),
    ],
)
def test_simpler_choices_win_unless_they_are_clearly_worse(
    answer: str, global_better: float, personal_better: float | None, expected: str
) -> None:
    average = Verdict("", 1, 0.0, 0.0, 0.0, gain(0.5), answer, "", ())  # type: ignore[arg-type]
    personal = None if personal_better is None else gain(personal_better)
    assert choose(average, gain(global_better), personal) == expected


# Optimism.


def test_the_method_is_chosen_on_validation_samples_in_each_repeat() -> None:
    validation = {
        "local": np.zeros((REPEATS, 1)),
        "fedavg": np.full((REPEATS, 1), 0.5),
        "fedper": np.tile([[0.4], [0.6]], (10, 1)),
    }
    test = {"local": np.zeros((REPEATS, 1)), "fedavg": np.full((REPEATS, 1), 0.1), "fedper": np.full((REPEATS, 1), 0.2)}
    scores = scores_from(validation, test)
    joined, chosen = follow_choice(scores, scores.federated)
    assert chosen == ["fedavg", "fedper"] * 10
    assert joined[:, 0].tolist() == [0.1, 0.2] * 10
    assert give_advice(scores, 0.01).chosen == {"fedavg": 10, "fedper": 10}


def test_the_choice_never_looks_at_test_scores() -> None:
    plain = scores_of({"local": [0.7], "fedavg": [0.7], "fedper": [0.8]})
    altered = {**plain.test, "fedavg": plain.test["fedavg"] + 0.3}
    changed = scores_from(plain.validation, altered)
    assert follow_choice(changed, changed.federated)[1] == follow_choice(plain, plain.federated)[1] == ["fedper"] * REPEATS
    assert give_advice(changed, 0.01).average.methods == give_advice(plain, 0.01).average.methods


def test_ten_methods_of_equal_worth_do_not_make_joining_look_better() -> None:
    rng = np.random.default_rng(0)
    names = ["local", "fedavg", *(f"m{k}" for k in range(9))]
    gains = []
    for _ in range(20):  # validation scores say nothing about test scores
        validation, test = ({name: rng.normal(0.8, 0.05, (REPEATS, 4)) for name in names} for _ in range(2))
        advice = give_advice(scores_from(validation, test), 0.01)
        assert advice.average.gain is not None
        gains.append(advice.average.gain.mean)
        best_on_test = max(test[name].mean() - test["local"].mean() for name in names[1:])
        assert advice.average.gain.mean < best_on_test
    assert np.mean(gains) == pytest.approx(0, abs=0.004)


def test_ties_on_validation_samples_go_to_the_global_model() -> None:
    equal = {name: np.full((REPEATS, 1), 0.5) for name in ("local", "fedper", "fedavg")}
    scores = scores_from(equal, equal)
    assert follow_choice(scores, scores.federated)[1] == ["fedavg"] * REPEATS


# Probabilities.


def test_gain_is_the_posterior_of_the_correlated_t_test() -> None:
    differences = noisy(0.03)[:, 0]
    found, posterior = measure_gain(differences, 1 / 3, 0.01), correlated_t_posterior(differences, 1 / 3)
    assert found.mean == pytest.approx(0.03)
    assert (found.low, found.high) == pytest.approx(posterior.interval())
    assert found.better == pytest.approx(posterior.probability_above(0.01))
    assert found.worse == pytest.approx(1 - posterior.probability_above(-0.01))
    assert found.better + found.same + found.worse == pytest.approx(1)


def test_a_client_is_judged_by_its_own_ratio_of_test_to_other_samples() -> None:
    scores = scores_of({"local": [0.7], "fedavg": [0.75]}, n_samples=400, n_test=np.array([200.0]))
    client = give_advice(scores, 0.01).clients[0]
    expected = measure_gain((scores.test["fedavg"] - scores.test["local"])[:, 0], 1.0, 0.01)
    assert client.gain == expected


def test_losses_count_as_gains_where_they_fall() -> None:
    scores = scores_of({"local": [-0.7, -0.7], "fedavg": [-0.5, -0.5]}, metric="log_loss", constant=np.full((REPEATS, 2), -0.9))
    assert answers(scores)[0] == "global"
    assert scores.min_std.tolist() == [0, 0]


# Tiny clients, ties and undefined metrics.


def test_equal_scores_of_a_tiny_client_are_no_proof_of_equality() -> None:
    tied = {name: np.ones((REPEATS, 1)) for name in ("local", "fedavg")}
    small, large = (give_advice(scores_from(tied, tied, n_samples=n), 0.01).clients[0] for n in (20, 2000))
    assert small.gain is not None
    assert small.gain.high == pytest.approx(3 / 20, rel=0.2)  # the rule of three
    assert small.gain.same < 0.5
    assert (small.answer, small.reason) == ("unclear", "noise")
    assert large.answer == "no"


def test_a_client_whose_metric_is_mostly_undefined_is_not_judged_and_does_not_count() -> None:
    scores = scores_of({"local": [0.7, 0.7], "fedavg": [0.8, 0.2]}, metric="auroc")
    undefined = np.zeros((REPEATS, 2), dtype=bool)
    undefined[:11, 1] = True  # test samples of one class
    test = {name: np.where(undefined, NAN, values) for name, values in scores.test.items()}
    advice = give_advice(scores_from(scores.validation, test, metric="auroc"), 0.01)
    assert [(client.answer, client.reason) for client in advice.clients] == [("yes", ""), ("unclear", "undefined")]
    assert advice.clients[1].gain is None
    assert advice.average.gain is not None
    assert advice.average.gain.mean == pytest.approx(0.1)


def test_repeats_in_which_a_metric_is_undefined_are_left_out() -> None:
    scores = scores_of({"local": [0.7], "fedavg": [0.8]}, metric="auroc")
    test = {name: values.copy() for name, values in scores.test.items()}
    for values in test.values():
        values[3:6] = NAN
    client = give_advice(scores_from(scores.validation, test, metric="auroc"), 0.01).clients[0]
    assert client.gain is not None
    assert client.gain.n_repeats == REPEATS - 3


def test_nothing_is_told_where_the_metric_is_undefined_everywhere() -> None:
    test = {name: np.full((REPEATS, 2), NAN) for name in ("local", "fedavg")}
    advice = give_advice(scores_from(test, test, metric="auroc"), 0.01)
    assert (advice.choice, advice.average.reason, advice.average.methods) == ("unclear", "undefined", ())


def test_methods_within_noise_are_those_that_are_not_clearly_worse_than_the_best() -> None:
    means = {"local": 0.6, "fedavg": 0.79, "fedper": 0.8}
    validation = {name: noisy(mean, 0.02, seed)[:, 0] for seed, (name, mean) in enumerate(means.items())}
    assert methods_within_noise(validation, 1 / 3, 0.01) == ("fedper", "fedavg")
    assert methods_within_noise({"local": np.full(REPEATS, NAN)}, 1 / 3, 0.01) == ()
