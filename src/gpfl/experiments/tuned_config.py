"""What a search has chosen: configs and settings that run it, and what a folder of searches holds for tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from gpfl.errors import GpflError, pluralize
from gpfl.experiments.budget import (
    BEST,
    CANDIDATES,
    STUDY,
    SearchInfo,
    all_made,
    describe_unequal_budgets,
    read_search_info_or_none,
)
from gpfl.experiments.trials import NEGLIGIBLE
from gpfl.experiments.tune import MethodSearch, SearchResult, plan_all, read_candidates
from gpfl.federation import MANIFEST
from gpfl.io import files, toml
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict
from gpfl.training.prepare import prepare

LIKE = (("net", "name"), ("train", "lr"), ("train", "batch_size"), ("train", "epochs"), ("run", "protocol"))
"""What values belong to, besides data and division: chosen under another one of these, they say little."""


def held_beside(found: Sequence[SearchResult], given: ConfigDict) -> list[SearchResult]:
    """Gives the searches of other methods that the folder holds: those behind a choice, or as far as they went."""
    plan = found[0].plan
    others: list[SearchResult] = []
    for path in sorted(plan.out.glob(f"*/{STUDY}")):
        name = path.parent.name
        if name in {tuned.plan.method for tuned in found}:
            continue
        before = configs.read_sections(path)
        own = {
            key: value for key, value in before["method"].items() if f"method.{key}" not in before["space"] and key != "name"
        }
        [other] = plan_all(given, [name], {name: own}, plan.search, plan.out)
        candidates = [candidate for candidate in read_candidates(other) if candidate.done]
        made = read_search_info_or_none(path.parent)
        count, budget = (made.candidates, made.budget) if made else (len(candidates), len(candidates))
        if candidates:
            other = replace(other, search=replace(plan.search, budget=budget))
            others.append(SearchResult(other, candidates[:count], made.note if made else ""))
    return others


def best_config(tuned: SearchResult) -> str:
    """Gives the config of the best candidate: what it needs to be run, without seed and device."""
    given = tuned.plan.sections(tuned.best.values)
    content = settled(tuned.plan, given, f"../{MANIFEST}")
    content["method"] = {key: content["method"][key] for key in ("name", *given["method"]) if key in content["method"]}
    return toml.dump(content)


def common_config(tuned: SearchResult) -> ConfigDict:
    """Gives the config that all methods of a search share."""
    content = settled(tuned.plan, tuned.plan.given, MANIFEST)
    return {section: values for section, values in content.items() if section != "method"}


def settled(plan: MethodSearch, given: ConfigDict, manifest: str) -> ConfigDict:
    """Gives the complete config of a candidate, but of [run] only what was given and matters to its numbers."""
    complete, _ = prepare(configs.resolve_config(given), plan.federation, None, None)
    content: ConfigDict = complete.sections()
    if "file" in content["partition"]:
        content["partition"]["file"] = manifest
    content["run"] = {key: value for key, value in given.get("run", {}).items() if ("run", key) not in NEGLIGIBLE}
    return {section: values for section, values in content.items() if values}


def assignments(tuned: SearchResult) -> list[str]:
    """Gives the method's chosen values as `gpfl compare` takes them: gpfl.lam=0.01."""
    given = tuned.plan.sections(tuned.best.values)["method"]
    return [f"{tuned.plan.method}.{key}={toml.value_text(value)}" for key, value in given.items() if key != "name"]


# For tables.


@dataclass(frozen=True)
class TunedValues:
    """What the searches of a folder chose, method by method, and what they were made under."""

    folder: Path
    values: Mapping[str, ConfigDict] = field(hash=False)  # by method: its own values, and a learning rate that was searched
    studies: Mapping[str, ConfigDict] = field(hash=False)  # by method: the complete config with default values, and the search
    made: Mapping[str, SearchInfo] = field(hash=False)  # by method
    how: str  # they were searched, as a folder's searches all are

    @classmethod
    def read(cls, folder: Path) -> TunedValues:
        """Gives what a folder of `gpfl tune` holds; refuses one without a choice, and one with unequal budgets."""
        made = all_made(folder)
        if not made:
            raise GpflError(f"--tuned {folder} holds no choice of gpfl tune: give the --out of a search that came to its end")
        if words := describe_unequal_budgets(made):
            raise GpflError(f"--tuned {folder} was searched with {words}")
        values, studies, how = {}, {}, ""
        for place in (folder / name for name in made):
            best, study = configs.read_config(place / BEST), configs.read_sections(place / STUDY)
            try:
                own = {key: value for key, value in best["method"].items() if key != "name"}
                values[place.name] = {"method": own}
                if "train.lr" in study.get("space", {}):
                    values[place.name]["train"] = {"lr": best["train"]["lr"]}
                studies[place.name] = {name: dict(study[name]) for name in ("data", "partition", "net", "train", "run", "tune")}
                seeds, rounds = cast(Sequence[int], study["tune"]["seeds"]), cast(int, study["train"]["rounds"])
                how = f"seeds {', '.join(map(str, seeds))}; {pluralize(rounds, 'round')}"
            except (ValueError, KeyError, TypeError, AttributeError) as problem:
                raise GpflError(f"--tuned {folder}: the search in {place} is damaged ({problem!r}): search it again") from None
        return cls(folder, values, studies, made, how)

    def given(self, name: str, without: ConfigDict, where: str) -> ConfigDict:
        """Gives what was chosen for a method; refuses one that was not searched, or not under what its cell has.

        `without` is the cell's config without it, and `where` the cell's name.
        """
        if name not in self.values:
            raise GpflError(
                f"--tuned {self.folder} holds no search of {name}: search it with the same budget, or leave it out of --methods"
            )
        config, study = configs.resolve_config(without), self.studies[name]
        complete: ConfigDict = config.sections()
        if config.net and math.isnan(config.train.lr):
            complete["train"]["lr"] = config.net.lr
        divided = [(section, key) for section in ("data", "partition") for key in {**study[section], **complete[section]}]
        free = {("partition", "validation_fraction"), *((("train", "lr"),) if "train" in self.values[name] else ())}
        others = [
            (section, key)
            for section, key in dict.fromkeys((*divided, *LIKE))
            if study[section].get(key) != complete[section].get(key) and (section, key) not in free
        ]
        if others:
            raise GpflError(self.mismatch(others, study, complete, where))
        return self.values[name]

    def mismatch(self, others: Sequence[tuple[str, str]], study: ConfigDict, complete: ConfigDict, where: str) -> str:
        """Gives the refusal of a search under other settings than a cell has: the first of them, and how to search with all."""
        section, key = others[0]
        searched, ours = (repr(held[section][key]) if key in held[section] else "nothing" for held in (study, complete))
        renamed = [name for name, one in others if one == "name"]  # under another name all options of a section are others
        wanted = [*others, *((name, one) for name in renamed for one in complete[name])]
        sets = " ".join(
            f"--set {name}.{one}={value if isinstance(value, str) else toml.value_text(value)}"
            for name, one in dict.fromkeys(wanted)
            if (value := complete[name].get(one)) is not None and one != "validation_fraction"
        )
        column = "name the columns that this search is for with --cells"
        way = column if section in ("data", "partition", "net") else "ask for what was searched with"
        return (
            f"--tuned {self.folder} was searched with {section}.{key} = {searched}, but {where} has {ours}: search it by gpfl "
            f"tune with {sets}, or {way}"
        )

    def refuse_twice(self, own: Mapping[str, Mapping[str, object]], common: ConfigDict) -> None:
        """Refuses values that are given by hand as well."""
        for name, values in self.values.items():
            twice = [f"{name}.{key}" for key in own.get(name, {}) if key in values["method"]]
            twice += ["train.lr"] * ("train" in values and "lr" in common.get("train", {}))
            if twice:
                raise GpflError(f"{twice[0]} is given by --set and by --tuned {self.folder}: leave one of them out")

    def words(self, names: Sequence[str]) -> str:
        """Gives a sentence's part about the search and the values of these methods."""
        known = [name for name in dict.fromkeys(names) if name in self.values]
        if not known:
            return ""
        study = self.studies[known[0]]
        counts = {name: self.made[name].candidates for name in known}
        same = f"{pluralize(counts[known[0]], 'candidate')} a method"
        tried = same if len({*counts.values()}) == 1 else f"candidates: {', '.join(f'{n} {c}' for n, c in counts.items())}"
        chosen = [
            f"{name}.{key} = {toml.value_text(value)}" if section == "method" else f"{name}'s {section}.{key} = {value}"
            for name in known
            for section, values in self.values[name].items()
            for key, value in values.items()
        ]
        share = study["partition"].get("validation_fraction")
        kept = f", {share} of the training rows" if share else ""
        return f"tuned on validation rows ({tried}; {self.how}{kept}): {', '.join(chosen) or 'the defaults'}"

    def keep(self, out: Path) -> Path:
        """Copies what was searched and chosen to the results, run folders aside, and gives the place of the copy."""
        if self.folder.resolve().is_relative_to(out.resolve()):
            return self.folder
        texts = {
            path.relative_to(self.folder): path.read_text(encoding="utf-8")
            for pattern in ("table.*", f"*/{BEST}", f"*/{STUDY}", f"*/{CANDIDATES}")
            for path in sorted(self.folder.glob(pattern))
        }
        number, place = 1, out / "tuned" / self.folder.resolve().name
        while place.exists() and any(read_or_none(place / name) not in (None, text) for name, text in texts.items()):
            number += 1
            place = place.with_name(f"{self.folder.resolve().name}-{number}")
        for name, text in texts.items():
            files.write_text(place / name, text)
        return place


def read_or_none(path: Path) -> str | None:
    """Gives a file's text; None where there is none."""
    return path.read_text(encoding="utf-8") if path.is_file() else None
