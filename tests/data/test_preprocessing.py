"""Federated statistics, their merge, and the encoding they define."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from user_files import message_of

from gpfl.data.columns import ColumnSchema, RawColumns, Schema
from gpfl.data.preprocessing import (
    LEVELS,
    CategoricalStatistics,
    ClientStatistics,
    NumericStatistics,
    PreprocessingOptions,
    Preprocessor,
    client_statistics,
    merge_statistics,
)

NAN = np.nan
RNG = np.random.default_rng(0)
SCHEMA = Schema(
    (
        ColumnSchema("age", low=0.0, high=255.0),
        ColumnSchema("dose", low=-1.0, high=1.0),
        ColumnSchema("sex", "categorical", ("f", "m", "x")),
        ColumnSchema("seen", "date", low=0.0, high=25_500.0),
    )
)
DECLARED = Schema(SCHEMA.columns, declared=True)
MEAN = PreprocessingOptions(missing="mean")
MEDIAN = PreprocessingOptions(missing="median")


def make_raw(rows: int = 200, schema: Schema = SCHEMA, *, gaps: float = 0.2, seed: int = 0) -> RawColumns:
    rng = np.random.default_rng(seed)
    values = np.stack(
        [
            rng.integers(0, 100, rows).astype(float),
            1e6 + rng.normal(size=rows),
            rng.integers(0, 3, rows).astype(float),
            rng.integers(10_000, 20_000, rows).astype(float),
        ],
        axis=1,
    )
    values[:, 1] -= 1e6
    return RawColumns(schema, np.where(rng.random(values.shape) < gaps, NAN, values))


def split(rows: int, clients: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return np.split(rng.permutation(rows), np.sort(rng.choice(np.arange(1, rows), clients - 1, replace=False)))


def statistics_of(raw: RawColumns, parts: Sequence[np.ndarray], options: PreprocessingOptions) -> list[ClientStatistics]:
    return [client_statistics(raw, part, options) for part in parts]


def fit(raw: RawColumns, options: PreprocessingOptions, rows: np.ndarray | None = None) -> Preprocessor:
    rows = np.arange(len(raw)) if rows is None else rows
    return Preprocessor.fit(raw.schema, client_statistics(raw, rows, options), options)


def close(first: ClientStatistics, second: ClientStatistics) -> bool:
    """Return whether all counts are equal and all numbers agree to 1e-12."""
    for name, a in first.columns.items():
        b = second.columns[name]
        if isinstance(a, NumericStatistics) and isinstance(b, NumericStatistics):
            if (a.count, a.histogram, a.has_missing) != (b.count, b.histogram, b.has_missing):
                return False
            if not np.allclose([a.mean, a.squared_deviation], [b.mean, b.squared_deviation], rtol=1e-12, atol=1e-12):
                return False
        elif a != b:
            return False
    return first.columns.keys() == second.columns.keys()


# Statistics.


@pytest.mark.parametrize("clients", [1, 2, 7])
def test_merged_statistics_are_those_of_the_pooled_samples(clients: int) -> None:
    raw = make_raw()
    options = PreprocessingOptions(missing="median", missing_indicator=True)
    merged = merge_statistics(statistics_of(raw, split(len(raw), clients), options))
    for i, name in ((0, "age"), (1, "dose"), (3, "seen")):
        values = raw.values[~np.isnan(raw.values[:, i]), i]
        found = merged.columns[name]
        assert isinstance(found, NumericStatistics)
        assert found.count == len(values)
        assert found.mean == pytest.approx(values.mean(), rel=1e-12)
        assert found.squared_deviation == pytest.approx(((values - values.mean()) ** 2).sum(), rel=1e-12)
        assert sum(found.histogram) == len(values)
        assert found.has_missing is True
    age = merged.columns["age"]
    assert isinstance(age, NumericStatistics)
    assert age.histogram == tuple(np.bincount(raw.values[~np.isnan(raw.values[:, 0]), 0].astype(int), minlength=LEVELS))
    sex = raw.values[~np.isnan(raw.values[:, 2]), 2].astype(int)
    assert merged.columns["sex"] == CategoricalStatistics(("f", "m", "x"), tuple(np.bincount(sex)), True)


def test_statistics_of_large_values_with_a_small_spread_keep_their_digits() -> None:
    values = 1e9 + RNG.normal(size=(3000, 1))
    raw = RawColumns(Schema((ColumnSchema("a"),)), values)
    merged = merge_statistics(statistics_of(raw, split(3000, 5), PreprocessingOptions())).columns["a"]
    assert isinstance(merged, NumericStatistics)
    exact = (values[:, 0] - 1e9).astype(np.longdouble)
    assert merged.mean == pytest.approx(1e9 + float(exact.mean()), abs=2e-7), "a float64 near 1e9 has steps of 1e-7"
    assert merged.squared_deviation == pytest.approx(float(((exact - exact.mean()) ** 2).sum()), rel=1e-8)


@pytest.mark.parametrize("seed", range(20))
def test_a_merge_depends_neither_on_order_nor_on_grouping(seed: int) -> None:
    rng = np.random.default_rng(seed)
    raw = make_raw(60 + seed, seed=seed)
    options = PreprocessingOptions(missing="most_frequent", missing_indicator=bool(seed % 2))
    sent = statistics_of(raw, split(len(raw), 2 + seed % 6, seed), options)
    merged = merge_statistics(sent)
    assert merge_statistics([sent[i] for i in rng.permutation(len(sent))]) == merged, "to the bit"
    cut = int(rng.integers(1, len(sent)))
    assert close(merge_statistics([merge_statistics(sent[:cut]), merge_statistics(sent[cut:])]), merged)
    assert close(merged, client_statistics(raw, np.arange(len(raw)), options))


@pytest.mark.parametrize("columns", [1, 3])
def test_columns_are_summed_in_blocks(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = make_raw()
    whole = client_statistics(raw, np.arange(len(raw)), MEAN)
    monkeypatch.setattr("gpfl.data.preprocessing.BLOCK", columns * len(raw))
    assert close(client_statistics(raw, np.arange(len(raw)), MEAN), whole)


def test_a_client_without_values_changes_nothing() -> None:
    raw = make_raw()
    raw.values[:50] = NAN
    merged = merge_statistics(statistics_of(raw, [np.arange(50), np.arange(50, 200)], MEAN))
    assert merged == client_statistics(raw, np.arange(50, 200), MEAN)


def test_only_training_samples_count() -> None:
    raw, train = make_raw(), np.arange(0, 200, 2)
    before = client_statistics(raw, train, MEDIAN)
    raw.values[1::2] = [[254.0, -1.0, 2.0, 3.0]] * 100
    assert client_statistics(raw, train, MEDIAN) == before


SENT = {
    "nothing but names of categories": (PreprocessingOptions(scale="none"), SCHEMA, {"sex": "3 category names (3 B)"}),
    "nothing at all": (PreprocessingOptions(scale="none"), DECLARED, {"sex": "nothing (0 B)"}),
    "scale": (
        PreprocessingOptions(),
        DECLARED,
        dict.fromkeys(("age", "dose", "seen"), "count, mean, sum of squared deviations (24 B)") | {"sex": "nothing (0 B)"},
    ),
    "fill": (
        PreprocessingOptions(scale="none", missing="mean", missing_indicator=True),
        SCHEMA,
        dict.fromkeys(("age", "dose", "seen"), "count, mean, whether values are missing (17 B)")
        | {"sex": "3 category names, 3 counts, whether values are missing (28 B)"},
    ),
    "median": (
        PreprocessingOptions(scale="none", missing="median"),
        DECLARED,
        dict.fromkeys(("age", "dose", "seen"), "count, mean, histogram of 256 counts over the declared range (2064 B)")
        | {"sex": "3 counts (24 B)"},
    ),
}


@pytest.mark.parametrize("kind", SENT)
def test_a_client_sends_what_the_options_need_and_says_so(kind: str) -> None:
    options, schema, expected = SENT[kind]
    sent = client_statistics(make_raw(schema=schema), np.arange(200), options)
    assert sent.describe() == [f"{name}: {expected[name]}" for name in sent.columns]
    assert sent.columns.keys() == expected.keys()
    assert sent.n_bytes == sum(int(text.rpartition("(")[2].split()[0]) for text in expected.values())


def test_names_of_declared_categories_do_not_leave_a_client() -> None:
    sent = json.dumps(client_statistics(make_raw(schema=DECLARED), np.arange(200), MEAN).to_dict())
    assert '"f"' not in sent
    assert '"f"' in json.dumps(client_statistics(make_raw(), np.arange(200), MEAN).to_dict())


@pytest.mark.parametrize("kind", SENT)
def test_statistics_survive_json(kind: str) -> None:
    options, schema, _ = SENT[kind]
    sent = client_statistics(make_raw(schema=schema), np.arange(200), options)
    assert ClientStatistics.from_dict(json.loads(json.dumps(sent.to_dict()))) == sent


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (3, "no object"),
        ({"count": -1, "mean": 0.0}, "counts"),
        ({"count": 1.5, "mean": 0.0}, "counts"),
        ({"count": 1}, "'mean'"),
        ({"count": 1, "mean": float("nan")}, "nan"),
        ({"count": 1, "mean": 0.0, "squared_deviation": -1.0}, "-1.0"),
        ({"count": 1, "mean": 0.0, "histogram": [True]}, "counts"),
        ({"categories": ["a", 1]}, "categories"),
        ({"categories": ["a"], "counts": [1, 2]}, "counts"),
        ({"has_missing": "yes"}, "has_missing"),
    ],
)
def test_statistics_from_elsewhere_are_checked(content: object, reason: str) -> None:
    assert message_of(lambda: ClientStatistics.from_dict({"a": content})) == (
        f"the statistics of column 'a' are not those of gpfl (missing or wrong: {reason})"
    )


def test_clients_with_other_columns_cannot_be_merged() -> None:
    number, text = NumericStatistics(1), CategoricalStatistics(("a",))
    one, two = ClientStatistics({"a": number}), ClientStatistics({"a": number, "b": number})
    assert message_of(lambda: merge_statistics([one, two])) == (
        "column 'b' is missing at some clients: give all clients the same columns"
    )
    assert message_of(lambda: merge_statistics([one, ClientStatistics({"a": text})])) == (
        "column 'a' is numeric at one client and categorical at another: declare its kind with --schema"
    )
    counts = [ClientStatistics({"a": CategoricalStatistics(None, (1,) * k)}) for k in (2, 3)]
    assert message_of(lambda: merge_statistics(counts)) == (
        "column 'a' has different numbers of counts at two clients: give all clients the same schema"
    )


@pytest.mark.parametrize("missing", ["median", "most_frequent"])
def test_a_median_needs_a_declared_range(missing: str) -> None:
    raw = RawColumns(Schema((ColumnSchema("age", low=0.0),)), np.zeros((3, 1)))
    assert message_of(lambda: fit(raw, PreprocessingOptions(missing=missing))) == (
        "column 'age' has no declared range, which --missing median and most_frequent need: write a schema with "
        "gpfl data show … --write-schema schema.toml, check its low and high, and give it with --schema schema.toml"
    )


# Encoding.


def test_rows_are_scaled_and_one_hot_with_missing_values_filled_and_indicated() -> None:
    values = np.array([[1, 0.5, 0, 3], [NAN, -0.5, 1, 3], [3, NAN, NAN, 3], [5, 0.0, 0, 3]])
    encoder = fit(RawColumns(SCHEMA, values), PreprocessingOptions(missing="mean", missing_indicator=True))
    assert encoder.input_names == ["age", "dose", "sex=f", "sex=m", "seen", "age missing", "dose missing", "sex missing"]
    age, dose = np.array([1, 3, 3, 5]), np.array([0.5, -0.5, 0.0, 0.0])
    expected = np.stack(
        [
            (age - 3) / np.sqrt(8 / 3),
            dose / np.sqrt(0.5 / 3),
            [1, 0, 1, 1],
            [0, 1, 0, 0],
            [0, 0, 0, 0],  # a constant has no spread to scale by
            [0, 1, 0, 0],
            [0, 0, 1, 0],
            [0, 0, 1, 0],
        ],
        axis=1,
    )
    found = encoder.transform(RawColumns(SCHEMA, values))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("rows", [9, 10, 200])
def test_the_median_is_exact_to_half_a_level(rows: int) -> None:
    raw = make_raw(rows, gaps=0.1)
    fill = fit(raw, MEDIAN).fill
    for i, (name, half) in enumerate((("age", 0.0), ("dose", 1 / 255), ("sex", 0.0), ("seen", 50.0))):
        if name == "sex":
            continue
        values = raw.values[~np.isnan(raw.values[:, i]), i]
        assert abs(float(fill[name]) - np.median(np.clip(values, -1 if i == 1 else 0, 1 if i == 1 else None))) <= half + 1e-12


def test_the_most_frequent_value_is_the_level_with_most_values() -> None:
    values = np.array([[30.0], [30.0], [30.0], [90.0], [91.0], [92.0], [NAN]])
    raw = RawColumns(Schema((ColumnSchema("age", low=0.0, high=255.0),)), values)
    assert fit(raw, PreprocessingOptions(missing="most_frequent")).fill == {"age": 30.0}


def test_an_unseen_category_is_all_zeros_and_counted() -> None:
    raw = RawColumns(Schema((ColumnSchema("sex", "categorical", ("f", "m", "x")),)), np.array([[0], [1], [2], [NAN]]))
    encoder = fit(raw, MEAN, np.array([0, 1]))
    assert encoder.transform(raw).tolist() == [[1, 0], [0, 1], [0, 0], [1, 0]]
    assert encoder.count_unseen(raw) == {"sex": 1}


def test_values_outside_a_declared_schema_count_as_missing() -> None:
    schema = Schema((ColumnSchema("age", low=0.0, high=120.0), ColumnSchema("sex", "categorical", ("m", "f"))), declared=True)
    train = RawColumns(schema, np.array([[20.0, 0], [40.0, 1], [30.0, 1]]))
    encoder = fit(train, PreprocessingOptions(scale="none", missing="mean"))
    found = Schema((ColumnSchema("sex", "categorical", ("f", "other")), ColumnSchema("age")))
    rows = RawColumns(found, np.array([[1, 50.0], [0, 121.0]]))
    assert encoder.input_names == ["age", "sex=m", "sex=f"]
    assert encoder.transform(rows).tolist() == [[50, 0, 1], [30, 0, 1]]
    strict = fit(train, PreprocessingOptions(scale="none"))
    assert message_of(lambda: strict.transform(rows)) == (
        "column 'age' has 1 missing value, and missing values are not filled: fill in the data, or train with --missing mean"
    )


def test_all_declared_categories_are_inputs() -> None:
    raw = RawColumns(Schema((ColumnSchema("sex", "categorical", ("f", "m", "x")),), declared=True), np.array([[0.0], [1.0]]))
    assert fit(raw, PreprocessingOptions()).input_names == ["sex=f", "sex=m", "sex=x"]


def test_columns_are_found_by_name() -> None:
    raw = make_raw(gaps=0.0)
    encoder = fit(raw, PreprocessingOptions())
    order = [2, 0, 3, 1]
    shuffled = RawColumns(Schema(tuple(SCHEMA.columns[i] for i in order)), raw.values[:, order])
    assert np.array_equal(encoder.transform(shuffled), encoder.transform(raw))


def test_local_scaling_uses_a_clients_own_values_where_they_have_a_spread() -> None:
    schema = Schema((ColumnSchema("a"), ColumnSchema("b"), ColumnSchema("c")))
    one = [[0.0, 5.0, NAN], [2.0, 5.0, NAN]]
    two = [[10.0, 1.0, 1.0], [30.0, 3.0, 3.0], [NAN, 2.0, 2.0]]
    raw, options = RawColumns(schema, np.array(one + two)), PreprocessingOptions(scale="local", missing="mean")
    sent = statistics_of(raw, [np.arange(2), np.arange(2, 5)], options)
    federated = Preprocessor.fit(schema, merge_statistics(sent), options)
    first, second = (federated.localize(own, options) for own in sent)
    assert (first.scaling["a"], second.scaling["a"]) == ((1.0, 1.0), (20.0, 10.0))
    assert first.scaling["b"] == federated.scaling["b"], "a constant"
    assert first.scaling["c"] == federated.scaling["c"], "no value"
    assert second.fill["a"] == 20.0
    assert first.fill["c"] == federated.fill["c"] == 2.0
    assert second.transform(raw)[2:, 0].tolist() == [-1.0, 1.0, 0.0]


def test_a_fitted_preprocessing_survives_json_to_the_bit() -> None:
    raw = make_raw()
    encoder = fit(raw, PreprocessingOptions(missing="median", missing_indicator=True))
    loaded = Preprocessor.from_dict(json.loads(json.dumps(encoder.to_dict())))
    assert loaded == encoder
    assert np.array_equal(loaded.transform(raw), encoder.transform(raw))


@pytest.mark.parametrize("change", [{"schema": 3}, {"scaling": {"age": [1]}}, {"indicators": "age"}, {"fill": None}])
def test_a_damaged_preprocessing_is_an_error(change: dict[str, object]) -> None:
    content = {**fit(make_raw(), MEAN).to_dict(), **change}
    assert message_of(lambda: Preprocessor.from_dict(content)).startswith("this is not a preprocessing of gpfl")
