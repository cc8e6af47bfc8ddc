"""Tuning: a search of each method's documented ranges, judged on validation rows, with the same budget for every method.

A *candidate* is one set of values; its trials are its runs, one a seed. Optuna proposes candidates. What has been tried lies
in files of our own, and a proposal is a function of those and of the search's seed: a search that was killed goes on to the
same candidates.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch

from gpfl.core.metrics import best_index
from gpfl.engine import make_engine
from gpfl.engine.distributed import require_single_process
from gpfl.errors import DivergenceError, GpflError
from gpfl.experiments.budget import CANDIDATES, STUDY, SearchInfo, read_search_info_or_none
from gpfl.experiments.proposals import Space, Values, count_of, describe_space, import_optuna, propose, search_space
from gpfl.experiments.trials import NEGLIGIBLE, delete_weights, prepare_trial, refuse_other_federation, with_seed
from gpfl.federation import MANIFEST, Federation
from gpfl.io import files, toml
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict
from gpfl.training.devices import find_device
from gpfl.training.execute import PreparedRun, execute_trials
from gpfl.training.prepare import prepare
from gpfl.training.run_dir import RunDir

VALIDATION = 0.2
"""The share of each client's training rows that is kept for validation where nobody says."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """How a search is made, alike for every method."""

    budget: int = 20  # candidates of a method, its default values among them
    seeds: tuple[int, ...] = (0,)
    with_lr: bool = False
    at_once: int = 4  # candidates that train at the same time
    seed: int = 0
    keep_weights: bool = False


@dataclass(frozen=True)
class Candidate:
    """One set of values and, once it was run, its outcome for each seed. The first of a method has the defaults."""

    number: int  # from 1
    values: Values
    scores: tuple[float, ...] = ()  # best validation accuracy over rounds
    rounds: tuple[int, ...] = ()  # where it was reached
    seconds: float = 0.0
    trouble: str = ""  # why it could not be trained to its end

    @property
    def done(self) -> bool:
        """Tells whether it was run."""
        return bool(self.scores) or bool(self.trouble)

    @property
    def score(self) -> float:
        """Its validation accuracy, the mean over seeds; 0 where training failed."""
        return float(np.mean(self.scores)) if self.scores and not self.trouble else 0.0

    @property
    def std(self) -> float:
        """The population standard deviation over seeds."""
        return float(np.std(self.scores)) if self.scores and not self.trouble else 0.0


@dataclass(frozen=True)
class MethodSearch:
    """The search of one method: what is given, what is searched, and where it is kept."""

    method: str
    given: ConfigDict
    config: Config  # complete, with the default values
    federation: Federation
    space: Space
    search: Search
    at_once: int  # candidates that train at the same time: one where the engine does not stack them
    out: Path

    @property
    def folder(self) -> Path:
        """Where the method's candidates lie."""
        return self.out / self.method

    @property
    def count(self) -> int:
        """The candidates it will have: the budget, or fewer where there are not as many values."""
        return count_of(self.space, self.search.budget)

    @property
    def defaults(self) -> Values:
        """The values that would be used without a search."""
        sections = {"method": self.config.method, "train": self.config.train}
        found = {key: getattr(sections[key.split(".")[0]], key.split(".")[1]) for key in self.space}
        return cast(Values, found)

    def sections(self, values: Values) -> ConfigDict:
        """Gives the sections of a candidate's config."""
        given = {section: dict(content) for section, content in self.given.items()}
        for key, value in values.items():
            section, _, name = key.partition(".")
            given.setdefault(section, {})[name] = value
        return given

    def home(self, candidate: Candidate) -> Path:
        """Gives the folder of a candidate's runs."""
        return self.folder / f"candidate-{candidate.number:03}"


@dataclass(frozen=True)
class SearchResult:
    """The outcome of one method's search."""

    plan: MethodSearch
    candidates: list[Candidate]
    note: str = ""  # on command, commit and device

    @property
    def made(self) -> SearchInfo:
        """How it was made."""
        return SearchInfo(self.plan.search.budget, len(self.candidates), bool(self.plan.space), self.note)

    @property
    def best(self) -> Candidate:
        """The candidate with the best validation accuracy, the first of equals."""
        return self.candidates[best_index([candidate.score for candidate in self.candidates])]


class Audience(Protocol):
    """Someone who is told how a search goes."""

    def begins(self, plan: MethodSearch, candidates: Sequence[Candidate]) -> None:
        """Is told of a method's search, and of what was done of it before."""

    def callback(self, plan: MethodSearch, candidate: Candidate) -> Callback:
        """Return the callback of one run."""

    def ends(self, plan: MethodSearch, candidate: Candidate) -> None:
        """Is told of a candidate that has been run."""


def tune(
    given: ConfigDict,
    methods: Sequence[str],
    own: Mapping[str, Mapping[str, object]],
    search: Search,
    out: Path,
    audience: Audience,
) -> list[SearchResult]:
    """Gives the searches of several methods, each in its folder of `out`; what that holds already is not run again.

    `own` holds values of single methods that are not searched but given.
    """
    import_optuna()
    plans = plan_all(given, methods, own, search, out)
    for plan in plans:
        write_study(plan)
    return [run_plan(plan, audience) for plan in plans]


# What is searched.


def plan_all(
    given: ConfigDict, methods: Sequence[str], own: Mapping[str, Mapping[str, object]], search: Search, out: Path
) -> list[MethodSearch]:
    """Gives the plans of all methods, checked before the first candidate is run."""
    refuse_search(search, given)
    plans: list[MethodSearch] = []
    for name in methods:
        sections = {**given, "method": {**own.get(name, {}), "name": name}}
        try:
            config = configs.resolve_config(with_seed(sections, search.seeds[0]))
            federation = plans[0].federation if plans else validated(config).to(find_device(config.run.device))
            config, setting = prepare(config, federation, None, None)
            at_once = search.at_once if make_engine(config.run.engine, setting).supports_concurrent_trials else 1
        except GpflError as problem:
            raise GpflError(f"{name}: {problem}" if len(methods) > 1 else str(problem)) from None
        space = search_space(name, sections, search.with_lr)
        plan = MethodSearch(name, sections, config, federation, space, search, at_once, out)
        refuse_other_study(plan)
        plans.append(plan)
    return plans


def refuse_search(search: Search, given: ConfigDict) -> None:
    """Refuses numbers that make no search."""
    for flag, value in (("--budget", search.budget), ("--at-once", search.at_once)):
        if value < 1:
            raise GpflError(f"{flag} is {value}; it must be at least 1")
    if search.with_lr and "lr" in given.get("train", {}):
        raise GpflError("train.lr is given, and --with-lr searches it: leave one of them out")
    require_single_process("gpfl tune")


def validated(config: Config) -> Federation:
    """Gives the federation of a config; one without validation rows is refused."""
    federation = config.federation()
    if not federation.has_validation:
        way = (
            f"set --validation-fraction, such as {VALIDATION}"
            if config.partition
            else "make one with --validation-fraction, such as 0.2"
        )
        raise GpflError(f"values are chosen on validation rows, but no client has any: {way}")
    return federation


# What is kept.


def study_content(plan: MethodSearch) -> ConfigDict:
    """Gives what a method's candidates have in common: the complete config with default values, seeds and ranges."""
    content: ConfigDict = plan.config.sections()
    run = {key: value for key, value in content["run"].items() if ("run", key) not in NEGLIGIBLE}
    search = {"seeds": list(plan.search.seeds), "with_lr": plan.search.with_lr, "search_seed": plan.search.seed}
    return {**content, "run": run, "tune": search, "space": dict(describe_space(plan.space))}


def write_study(plan: MethodSearch, made: SearchInfo | None = None) -> None:
    """Writes down what is searched, the division that it is searched on, and how the choice was made that the folder holds."""
    if not (plan.out / MANIFEST).exists():
        plan.federation.save(plan.out / MANIFEST)
    made = made or read_search_info_or_none(plan.folder)
    known = {"made": dataclasses.asdict(made)} if made else {}
    files.write_text(plan.folder / STUDY, toml.dump({**study_content(plan), **known}))


def refuse_other_study(plan: MethodSearch) -> None:
    """Refuses a folder that holds something else, or a search with other settings, and names the first that differs."""
    out = plan.out
    if out.exists() and not out.is_dir():
        raise GpflError(f"--out {out} is a file; choose a folder")
    studies = sorted(out.glob(f"*/{STUDY}"))
    early = all(path.name == MANIFEST or path.name.startswith(f".{MANIFEST}.") for path in out.glob("*"))
    if not studies and not early:
        raise GpflError(f"--out {out} is not empty and holds no search: choose another --out")
    now = study_content(plan)
    for path in studies:
        mine = path.parent.name == plan.method
        before = configs.read_sections(path)
        for section in now if mine else [section for section in now if section not in ("method", "space")]:
            old, new = before.get(section, {}), now[section]
            for key in {**new, **old}:
                if old.get(key) != new.get(key) and (section, key) not in NEGLIGIBLE:
                    name = (
                        f"--{key.replace('_', '-')}" if section == "tune" else key if section == "space" else f"{section}.{key}"
                    )
                    raise GpflError(
                        f"{path.parent} holds a search with {name} = {old.get(key)!r}, now it is {new.get(key)!r}: "
                        "choose another --out"
                    )
    if (out / MANIFEST).exists():
        refuse_other_federation(out, plan.federation)


def read_candidates(plan: MethodSearch) -> list[Candidate]:
    """Gives the candidates of a method's folder, run or proposed."""
    path = plan.folder / CANDIDATES
    if not path.exists():
        return []
    way = f"put a good copy in its place, or remove {plan.folder} to search anew"
    found = []
    try:
        for number, row in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            line = json.loads(row)
            tuples = {key: tuple(line[key]) for key in ("scores", "rounds")}
            candidate = Candidate(**{**line, **tuples})
            if candidate.number != number or candidate.values.keys() != plan.space.keys():
                raise ValueError(f"line {number} is not candidate {number} of this search")
            found.append(candidate)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise GpflError(f"{path} is damaged ({problem}): {way}") from None
    return found


def write_candidates(plan: MethodSearch, candidates: Iterable[Candidate]) -> None:
    """Writes the candidates, a line each, the file whole."""
    lines = [json.dumps(dataclasses.asdict(candidate), allow_nan=False) + "\n" for candidate in candidates]
    files.write_text(plan.folder / CANDIDATES, "".join(lines))


# The search.


def run_plan(plan: MethodSearch, audience: Audience) -> SearchResult:
    """Gives a method's search, gone on with from where its folder stands."""
    candidates = read_candidates(plan)
    audience.begins(plan, [candidate for candidate in candidates[: plan.count] if candidate.done])
    while True:
        waiting = [candidate for candidate in candidates[: plan.count] if not candidate.done]
        if not waiting:
            fresh = proposals(plan, candidates)
            if not fresh:
                return SearchResult(plan, candidates[: plan.count])
            waiting = [Candidate(len(candidates) + place, values) for place, values in enumerate(fresh, start=1)]
            candidates += waiting
            write_candidates(plan, candidates)  # before they are run: one that is cut off is gone on with
        for group in stackable(waiting) if plan.at_once > 1 else [[candidate] for candidate in waiting]:
            for candidate in run_candidates(plan, group, audience):
                candidates[candidate.number - 1] = candidate
                write_candidates(plan, candidates)
                if not plan.search.keep_weights:
                    for run in plan.home(candidate).glob("seed-*"):
                        delete_weights(run)
                audience.ends(plan, candidate)


def stackable(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Gives candidates in groups that may train at once: they differ in floats alone."""
    groups: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        whole = tuple((key, value) for key, value in candidate.values.items() if not isinstance(value, float))
        groups.setdefault(whole, []).append(candidate)
    return list(groups.values())


def run_candidates(plan: MethodSearch, candidates: Sequence[Candidate], audience: Audience) -> list[Candidate]:
    """Gives candidates with their outcomes; they train at once where they can, where memory does not suffice one by one."""
    places = [(candidate, seed) for candidate in candidates for seed in plan.search.seeds]

    def run(some: Sequence[tuple[Candidate, int]]) -> dict[int, str]:
        """Gives how candidates diverged, by their numbers; all else is not their fault."""
        unfinished = [(one, seed) for one, seed in some if not RunDir(plan.home(one) / f"seed-{seed}").finished]
        runs = [run_of(plan, one, seed, audience.callback(plan, one)) for one, seed in unfinished]
        ends = execute_trials(runs) if runs else []
        return {
            one.number: end.reason for (one, _), end in zip(unfinished, ends, strict=True) if isinstance(end, DivergenceError)
        }

    troubles: dict[int, str] | None = None
    try:
        troubles = run(places)
    except torch.OutOfMemoryError:
        if len(places) == 1:
            raise
    if troubles is None:  # not within the handler: the error holds on to the tensors that were too many
        troubles = {}
        for candidate, seed in places:
            if candidate.number not in troubles:
                troubles |= run([(candidate, seed)])
    return [outcome(plan, candidate, troubles.get(candidate.number, "")) for candidate in candidates]


def run_of(plan: MethodSearch, candidate: Candidate, seed: int, callback: Callback) -> PreparedRun:
    """Gives a candidate's run with one seed: new, or gone on with."""
    given = plan.sections(candidate.values if candidate.number > 1 else {})
    return prepare_trial(plan.home(candidate) / f"seed-{seed}", with_seed(given, seed), plan.federation, callback)


def outcome(plan: MethodSearch, candidate: Candidate, trouble: str) -> Candidate:
    """Gives a candidate with its validation accuracies, read from the metrics of its runs. Test rows are not looked at."""
    folders = [RunDir(plan.home(candidate) / f"seed-{seed}") for seed in plan.search.seeds]
    curves = [folder.read_metrics() if trouble else folder.read_complete_metrics() for folder in folders]
    tops = [curve[best_index([cast(float, line["validation_accuracy"]) for line in curve])] for curve in curves if curve]
    return dataclasses.replace(
        candidate,
        scores=tuple(cast(float, top["validation_accuracy"]) for top in tops),
        rounds=tuple(cast(int, top["round"]) for top in tops),
        seconds=round(sum(cast(float, line["seconds"]) for curve in curves for line in curve), 3),
        trouble=trouble,
    )


def proposals(plan: MethodSearch, tried: Sequence[Candidate]) -> list[Values]:
    """Gives the values of the next candidates, all new; none where the budget is spent or every value was tried.

    The first are the defaults, so that what is chosen is never worse than they are on validation rows.
    """
    wanted = min(plan.at_once, plan.count - len(tried))
    first = [] if tried or wanted < 1 else [plan.defaults]
    known = [candidate.values for candidate in tried] + first
    scores = [candidate.score for candidate in tried]
    state = f"{plan.search.seed} {plan.method} {len(tried)}"
    try:
        return first + propose(plan.space, known, scores, wanted - len(first), state, lambda values: refusal(plan, values))
    except GpflError as problem:
        raise GpflError(f"{plan.method}: {problem}") from None


def refusal(plan: MethodSearch, values: Values) -> str:
    """Gives why a method would not run with these values, if so: pFedMe's rates and pull must fit each other."""
    try:
        prepare(configs.resolve_config(plan.sections(values)), plan.federation, None, None)
    except GpflError as problem:
        return str(problem)
    return ""
