"""Results of finished searches: their candidates, their budgets and the values they chose. None of it needs Optuna."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from gpfl.core.metrics import best_index
from gpfl.errors import GpflError, pluralize
from gpfl.io import files, toml
from gpfl.io.legacy import upgrade_record
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict

STUDY, CANDIDATES, BEST, COMMON = "study.toml", "candidates.jsonl", "best.toml", "common.toml"

Values = dict[str, float | int]  # hyperparameters by section and key: {"method.lam": 0.01}

_SAME_SETTINGS = (("net", "name"), ("train", "lr"), ("train", "batch_size"), ("train", "epochs"), ("run", "protocol"))
"""Settings besides data and partition under which tuned values were chosen and must be used."""


@dataclass(frozen=True)
class Candidate:
    """Hyperparameters and, after training, their validation accuracy for each seed. Candidate 1 has the defaults."""

    number: int
    values: Values
    scores: tuple[float, ...] = ()  # best validation accuracy over rounds
    rounds: tuple[int, ...] = ()  # round of that accuracy
    seconds: float = 0.0
    failure: str = ""  # how training diverged

    @property
    def finished(self) -> bool:
        """Whether training has ended."""
        return bool(self.scores or self.failure)

    @property
    def score(self) -> float:
        """Mean validation accuracy over seeds; 0 if training diverged."""
        return float(np.mean(self.scores)) if self.scores and not self.failure else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation over seeds."""
        return float(np.std(self.scores)) if self.scores and not self.failure else 0.0


@dataclass(frozen=True)
class SearchResult:
    """The finished candidates of one method."""

    method: str
    study: ConfigDict  # what the candidates have in common
    candidates: Sequence[Candidate]
    budget: int
    note: str = ""  # command, commit and device; "" if the search was interrupted

    @classmethod
    def read(cls, folder: Path) -> SearchResult:
        """Return the search of a method's folder: the candidates behind its choice, or all if it has not chosen yet."""
        study = configs.read_sections(folder / STUDY)
        with report_damage(folder):
            candidates = [each for each in read_candidates(folder, study["space"]) if each.finished]
            result = study.pop("result", {})
            candidates = candidates[: cast(int, result.get("candidates", len(candidates)))]
            budget = cast(int, result.get("budget", len(candidates)))  # old searches lack it
            return cls(folder.name, study, candidates, budget, str(result.get("note", "")))

    @property
    def space(self) -> Mapping[str, str]:
        """Descriptions of the search ranges by key."""
        return cast(Mapping[str, str], self.study["space"])

    @property
    def best(self) -> Candidate:
        """The candidate with the best score, the first in a tie."""
        return self.candidates[best_index([candidate.score for candidate in self.candidates])]


def read_candidates(folder: Path, keys: Iterable[str]) -> list[Candidate]:
    """Return the candidates of a method's folder, trained or not. Raise if their values are not those of `keys`."""
    path = folder / CANDIDATES
    candidates: list[Candidate] = []
    with report_damage(folder):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            record = cast(dict[str, Any], upgrade_record("candidate", json.loads(line)))
            candidate = Candidate(**{**record, "scores": tuple(record["scores"]), "rounds": tuple(record["rounds"])})
            if candidate.number != number or candidate.values.keys() != set(keys):
                raise ValueError(f"line {number} of {CANDIDATES} is not candidate {number} of this search")
            candidates.append(candidate)
    return candidates


@contextmanager
def report_damage(folder: Path) -> Iterator[None]:
    """Raise a `GpflError` about the folder if the block cannot use what it read there."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise GpflError(
            f"the search in {folder} is damaged ({problem!r}): restore its files, or remove the folder and search it again"
        ) from None


def read_results(out: Path, omit: Collection[str] = ()) -> list[SearchResult]:
    """Return the searches in a folder, but those of the methods to omit and those without a trained candidate."""
    folders = sorted(path.parent for path in out.glob(f"*/{STUDY}") if path.parent.name not in omit)
    return [result for folder in folders if (folder / CANDIDATES).exists() and (result := SearchResult.read(folder)).candidates]


def describe_unequal_budgets(searches: Mapping[str, tuple[int, int]]) -> str:
    """Return how the budgets of methods differ and how to make them equal, or "" if they are equal.

    `searches` has the number of candidates and the budget of each method that has anything to search. A method whose space
    holds fewer values than its budget had its full share.
    """
    counts = {method: count for method, (count, _) in searches.items()}
    most = max(counts.values(), default=0)
    short = [method for method, (count, budget) in searches.items() if count == budget < most]
    if not short:
        return ""
    least = min(counts[method] for method in short)
    listed = ", ".join(f"{method} {pluralize(count, 'candidate')}" for method, count in counts.items())
    larger = ", ".join(method for method, count in counts.items() if count > least)
    return (
        f"unequal budgets ({listed}): search {', '.join(short)} with --budget {most}, or {larger} with --budget {least}, "
        "which trains nothing"
    )


def count_candidates(results: Iterable[SearchResult]) -> dict[str, tuple[int, int]]:
    """Return the number of candidates and the budget of each method that has anything to search."""
    return {result.method: (len(result.candidates), result.budget) for result in results if result.space}


@dataclass(frozen=True)
class TunedValues:
    """The values that the searches of a folder chose, for `gpfl reproduce --tuned`."""

    folder: Path
    searches: Mapping[str, SearchResult]
    values: Mapping[str, ConfigDict]  # by method: the options in its best.toml, and the learning rate if that was searched

    @classmethod
    def read(cls, folder: Path) -> TunedValues:
        """Read a folder of `gpfl tune`. Raise if nothing was chosen in it, or with unequal budgets."""
        folders = sorted(path.parent for path in folder.glob(f"*/{BEST}") if (path.parent / STUDY).is_file())
        if not folders:
            raise GpflError(f"--tuned {folder} holds no finished search: give the --out of a gpfl tune that has ended")
        searches = {path.name: SearchResult.read(path) for path in folders}
        if text := describe_unequal_budgets(count_candidates(searches.values())):
            raise GpflError(f"--tuned {folder} was searched with {text}")
        values: dict[str, ConfigDict] = {}
        for path in folders:
            best, study = configs.read_config(path / BEST), searches[path.name].study
            with report_damage(path):
                values[path.name] = {"method": {key: value for key, value in best["method"].items() if key != "name"}}
                if "train.lr" in study["space"]:
                    values[path.name]["train"] = {"lr": best["train"]["lr"]}
                for section, key in (*_SAME_SETTINGS, ("train", "rounds"), ("tune", "seeds"), ("data", "name")):
                    study[section][key]
        return cls(folder, searches, values)

    def config_for(self, method: str, settings: ConfigDict, column: str) -> ConfigDict:
        """Return the tuned options of a method. Raise if it was not searched under the config of this column of a table."""
        if method not in self.values:
            raise GpflError(f"--tuned {self.folder} holds no search of {method}: search it with the same budget, or omit it")
        config, study = configs.resolve_config(settings), self.searches[method].study
        complete = config.sections()
        if config.net and math.isnan(config.train.lr):
            complete["train"]["lr"] = config.net.lr
        free = {("partition", "validation_fraction"), *([("train", "lr")] if "train" in self.values[method] else [])}
        data = [(section, key) for section in ("data", "partition") for key in {**study[section], **complete[section]}]
        different = {
            f"{section}.{key}": (study[section].get(key), complete[section].get(key))
            for section, key in (*data, *_SAME_SETTINGS)
            if study[section].get(key) != complete[section].get(key) and (section, key) not in free
        }
        if different:
            key, (searched, needed) = next(iter(different.items()))
            assignments = " ".join(f"--set {key}={_value_text(new)}" for key, (_, new) in different.items() if new is not None)
            raise GpflError(
                f"--tuned {self.folder} was searched with {key} = {_value_text(searched)}, but {column} has "
                f"{_value_text(needed)}: search with gpfl tune {assignments}, or choose the columns of this search with --cells"
            )
        return self.values[method]

    def check_overrides(self, methods: Mapping[str, Mapping[str, object]], common: ConfigDict) -> None:
        """Raise if --set gives a tuned value as well."""
        for method, values in self.values.items():
            twice = [f"{method}.{key}" for key in methods.get(method, {}) if key in values["method"]]
            twice += ["train.lr"] * ("train" in values and "lr" in common.get("train", {}))
            if twice:
                raise GpflError(f"{twice[0]} is given by --set and by --tuned {self.folder}: leave one of them out")

    def describe(self, methods: Iterable[str]) -> str:
        """Return how the values of these methods were searched, and the values; "" if none of them was searched."""
        names = [name for name in dict.fromkeys(methods) if name in self.values]
        if not names:
            return ""
        study = self.searches[names[0]].study
        counts = ", ".join(f"{name} {len(self.searches[name].candidates)}" for name in names)
        values = [
            f"{name}.{key} = {toml.format_value(value)}" if section == "method" else f"{section}.{key} of {name} = {value}"
            for name in names
            for section, options in self.values[name].items()
            for key, value in options.items()
        ]
        seeds = ", ".join(map(str, cast(Sequence[int], study["tune"]["seeds"])))
        rounds = pluralize(cast(int, study["train"]["rounds"]), "round")
        fraction = study["partition"].get("validation_fraction")
        samples = f"; {fraction} of the training samples" if fraction else ""
        setting = f"candidates: {counts}; seeds {seeds}; {rounds}{samples}"
        return f"tuned on validation samples ({setting}): {', '.join(values) or 'the defaults'}"

    def copy_to(self, out: Path) -> Path:
        """Copy the search without its runs below `out`, unless it is there already, and return the folder of the copy."""
        if self.folder.resolve().is_relative_to(out.resolve()):
            return self.folder
        texts = {
            path.relative_to(self.folder): path.read_text(encoding="utf-8")
            for pattern in ("table.*", f"*/{BEST}", f"*/{STUDY}", f"*/{CANDIDATES}")
            for path in self.folder.glob(pattern)
        }
        name, number = self.folder.resolve().name, 1
        target = out / "tuned" / name
        while any((target / path).is_file() and (target / path).read_text("utf-8") != text for path, text in texts.items()):
            number += 1
            target = target.with_name(f"{name}-{number}")
        for path, text in texts.items():
            files.write_text(target / path, text)
        return target


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else "nothing" if value is None else toml.format_value(value)
