"""Hyperparameter search with Optuna: scored on validation samples, with the same budget for every method.

Candidates are kept in a text file. Each batch of proposals depends only on the candidates before it and the search seed, so an
interrupted search resumes exactly.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from gpfl.core.metrics import best_index
from gpfl.core.options import SearchRange, options_of
from gpfl.engine import make_engine
from gpfl.engine.distributed import require_single_process
from gpfl.errors import DivergenceError, GpflError
from gpfl.experiments.run_checks import UNCOMPARED, first_difference
from gpfl.experiments.trials import check_same_federation, delete_weights, prepare_trial, with_seed
from gpfl.experiments.tuned_values import BEST, CANDIDATES, COMMON, STUDY, Candidate, SearchResult, Values, read_candidates
from gpfl.federation import MANIFEST, Federation
from gpfl.io import files, toml
from gpfl.io.legacy import FORMAT_VERSION
from gpfl.methods import METHODS
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict, TrainOptions
from gpfl.training.execute import execute_trials
from gpfl.training.prepare import prepare
from gpfl.training.run_dir import RunDir, metric

Space = dict[str, SearchRange | tuple[int, ...]]  # ranges or lists of values by section and key

_MAX_PROPOSALS = 200  # for one batch; some repeat earlier candidates, or the method rejects them


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search, the same for every method."""

    budget: int = 20  # candidates per method
    seeds: tuple[int, ...] = (0,)
    with_lr: bool = False
    n_concurrent: int = 4  # candidates to train at the same time
    seed: int = 0
    keep_weights: bool = False


@dataclass(frozen=True)
class MethodSearch:
    """The search of one method."""

    method: str
    settings: ConfigDict  # without the values that are searched
    config: Config  # complete, with their defaults
    federation: Federation
    space: Space
    options: SearchOptions  # with n_concurrent = 1 if the engine trains one run at a time
    out: Path

    @property
    def folder(self) -> Path:
        """Folder of the method's candidates."""
        return self.out / self.method

    @property
    def n_candidates(self) -> int:
        """The budget, or the number of values in the space if that is lower."""
        sizes = [len(values) if isinstance(values, tuple) else math.inf for values in self.space.values()]
        return int(min(self.options.budget, math.prod(sizes)))

    @property
    def study(self) -> ConfigDict:
        """What all candidates have in common: the config with default values, the options of the search and the ranges."""
        content: ConfigDict = self.config.sections()
        content["run"] = {key: value for key, value in content["run"].items() if ("run", key) not in UNCOMPARED}
        seeds, with_lr, search_seed = list(self.options.seeds), self.options.with_lr, self.options.seed
        content["tune"] = {"seeds": seeds, "with_lr": with_lr, "search_seed": search_seed}
        content["space"] = {
            key: ", ".join(map(str, values)) if isinstance(values, tuple) else str(values) for key, values in self.space.items()
        }
        return content

    def config_of(self, values: Values) -> ConfigDict:
        """Return the config of a candidate."""
        settings = {section: dict(content) for section, content in self.settings.items()}
        for key, value in values.items():
            section, _, name = key.partition(".")
            settings.setdefault(section, {})[name] = value
        return settings

    def run_dir(self, candidate: Candidate, seed: int) -> RunDir:
        """Return the run directory of a candidate and a seed."""
        return RunDir(self.folder / f"candidate-{candidate.number:03}" / f"seed-{seed}")

    def read_candidates(self) -> list[Candidate]:
        """Return the candidates so far, trained or not."""
        return read_candidates(self.folder, self.space) if (self.folder / CANDIDATES).exists() else []

    def result(self) -> SearchResult:
        """Return the result of the finished search."""
        return SearchResult(self.method, self.study, self.read_candidates()[: self.n_candidates], self.options.budget)


MakeCallback = Callable[[Candidate], Callback]  # makes the callback of one run of a candidate


# Plan.


def plan_searches(
    settings: ConfigDict,
    overrides: Mapping[str, Mapping[str, object]],
    methods: Sequence[str],
    options: SearchOptions,
    out: Path,
) -> list[MethodSearch]:
    """Return the searches of several methods. Raise before any training if one of them cannot run, or not in `out`.

    `overrides` has the options of single methods that are set and hence not searched.
    """
    _import_optuna()
    require_single_process("gpfl tune")
    if options.with_lr and "lr" in settings.get("train", {}):
        raise GpflError("train.lr is set, and --with-lr searches it: leave one of them out")
    searches: list[MethodSearch] = []
    for method in methods:
        sections = {**settings, "method": {**overrides.get(method, {}), "name": method}}
        try:
            config = configs.resolve_config(with_seed(sections, options.seeds[0]))
            federation = searches[0].federation if searches else config.federation()
            if not federation.has_validation:
                fix = f"{'set' if config.partition else 'save one with'} --validation-fraction, such as 0.2"
                raise GpflError(f"candidates are scored on validation samples, but no client has any: {fix}")
            config, spec = prepare(config, federation)
            concurrent = make_engine(config.run.engine, spec).supports_concurrent_trials
        except GpflError as problem:
            raise GpflError(f"{method}: {problem}" if len(methods) > 1 else str(problem)) from None
        limited = options if concurrent else dataclasses.replace(options, n_concurrent=1)
        space = search_space(method, sections, options.with_lr)
        search = MethodSearch(method, sections, config, spec.federation, space, limited, out)
        _check_folder(search)
        searches.append(search)
    return searches


def search_space(method: str, settings: ConfigDict, with_lr: bool) -> Space:
    """Return the space of a method: its options that have a range and are not set, and the learning rate `with_lr`."""
    records = {"method": METHODS[method], **({"train": TrainOptions} if with_lr else {})}
    return {
        f"{section}.{key}": option.search
        for section, record in records.items()
        for key, option in options_of(record).items()
        if option.search is not None and key not in settings.get(section, {})
    }


def _check_folder(search: MethodSearch) -> None:
    """Raise if the folder holds something else, or searches under other settings."""
    out, studies = search.out, sorted(search.out.glob(f"*/{STUDY}"))
    if not studies and out.exists() and any(out.iterdir()):
        raise GpflError(f"--out {out} is not empty and holds no search: choose another --out")
    for path in studies:
        omit = {"result"} if path.parent.name == search.method else {"result", "method", "space"}
        old, new = (
            {section: values for section, values in content.items() if section not in omit}
            for content in (configs.read_sections(path), search.study)
        )
        if difference := first_difference(old, new):
            key, before, now = difference
            name = f"--{key[5:].replace('_', '-')}" if key.startswith("tune.") else key.removeprefix("space.")
            raise GpflError(f"{path.parent} holds a search with {name} = {before}, now it is {now}: choose another --out")
    if (out / MANIFEST).exists():
        check_same_federation(out, search.federation)


# Search.


def run_search(search: MethodSearch, make_callback: MakeCallback) -> Iterator[Candidate]:
    """Search the values of one method: resume the search of its folder, and yield each candidate after its training."""
    if not (search.folder / STUDY).exists():
        _write_study(search)
    if not (search.out / MANIFEST).exists():
        search.federation.save(search.out / MANIFEST)
    candidates = search.read_candidates()
    while True:
        unfinished = [candidate for candidate in candidates[: search.n_candidates] if not candidate.finished]
        pending = unfinished or _next_candidates(search, candidates)
        if not pending:
            return
        candidates += [candidate for candidate in pending if candidate.number > len(candidates)]
        _write_candidates(search, candidates)  # before training, so that interrupted ones are resumed
        for group in _group_concurrent(pending, search.options.n_concurrent):
            failures = _train(search, [(each, seed) for each in group for seed in search.options.seeds], make_callback)
            for candidate in group:
                trained = _score(search, candidate, failures.get(candidate.number, ""))
                candidates[candidate.number - 1] = trained
                _write_candidates(search, candidates)
                if not search.options.keep_weights:
                    for seed in search.options.seeds:
                        delete_weights(search.run_dir(candidate, seed).path)
                yield trained


def _write_candidates(search: MethodSearch, candidates: Sequence[Candidate]) -> None:
    lines = [json.dumps(dataclasses.asdict(candidate), allow_nan=False) + "\n" for candidate in candidates]
    files.write_text(search.folder / CANDIDATES, "".join(lines))


def _write_study(search: MethodSearch, result: Mapping[str, object] | None = None) -> None:
    content = {"format_version": FORMAT_VERSION, **search.study, **({"result": result} if result else {})}
    files.write_text(search.folder / STUDY, toml.dump(content))


def _group_concurrent(candidates: Sequence[Candidate], n_concurrent: int) -> list[list[Candidate]]:
    """Return groups of candidates that can train at the same time: they differ only in floats."""
    groups: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        integers = tuple((key, value) for key, value in candidate.values.items() if isinstance(value, int))
        groups.setdefault(integers if n_concurrent > 1 else candidate.number, []).append(candidate)
    return list(groups.values())


def _train(search: MethodSearch, runs: Sequence[tuple[Candidate, int]], make_callback: MakeCallback) -> dict[int, str]:
    """Train candidates and seeds at the same time, or one by one if memory is short. Return how candidates diverged."""
    numbers, prepared = [], []
    try:
        for candidate, seed in runs:
            path = search.run_dir(candidate, seed).path
            if not RunDir(path).finished:
                settings = search.config_of(candidate.values if candidate.number > 1 else {})
                numbers.append(candidate.number)
                prepared.append(prepare_trial(path, with_seed(settings, seed), search.federation, make_callback(candidate)))
        ends = execute_trials(prepared) if prepared else []
        return {number: end.reason for number, end in zip(numbers, ends, strict=True) if isinstance(end, DivergenceError)}
    except torch.OutOfMemoryError:
        if len(runs) == 1:
            raise
    prepared.clear()  # frees its tensors; the error, which holds others, is gone outside the handler
    return {number: failure for run in runs for number, failure in _train(search, [run], make_callback).items()}


def _score(search: MethodSearch, candidate: Candidate, failure: str) -> Candidate:
    """Return the candidate with the best validation accuracy of each run. Test samples play no part."""
    run_dirs = [search.run_dir(candidate, seed) for seed in search.options.seeds]
    curves = [run_dir.read_metrics() if failure else run_dir.read_complete_metrics() for run_dir in run_dirs]
    bests = [curve[best_index([metric(record, "validation_accuracy") for record in curve])] for curve in curves if curve]
    return dataclasses.replace(
        candidate,
        scores=tuple(metric(record, "validation_accuracy") for record in bests),
        rounds=tuple(int(metric(record, "round")) for record in bests),
        seconds=round(sum(metric(record, "seconds") for curve in curves for record in curve), 3),
        failure=failure,
    )


# Proposals.


def _next_candidates(search: MethodSearch, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the next candidates, or [] if the budget is spent or all values were tried.

    The defaults are not left to Optuna's `enqueue_trial`: they may lie outside the range, such as 0 on a logarithmic scale.
    """
    records = {"method": search.config.method, "train": search.config.train}
    defaults = {key: getattr(records[key.split(".")[0]], key.split(".")[1]) for key in search.space}
    first = [] if candidates else [Candidate(1, defaults)]
    wanted = min(search.options.n_concurrent, search.n_candidates - len(candidates)) - len(first)
    known = [*candidates, *first]
    seed = zlib.crc32(f"{search.options.seed} {search.method} {len(candidates)}".encode())
    values = propose(search.space, known, wanted, seed, lambda values: _find_error(search, values))
    return [*first, *(Candidate(number, each) for number, each in enumerate(values, start=len(known) + 1))]


def propose(
    space: Space, candidates: Sequence[Candidate], count: int, seed: int, find_error: Callable[[Values], str]
) -> list[Values]:
    """Return up to `count` new values for which `find_error` returns "", rounded to three digits."""
    optuna = _import_optuna()
    distributions = {
        key: optuna.distributions.CategoricalDistribution(values)
        if isinstance(values, tuple)
        else optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)
        for key, values in space.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for candidate in candidates:
        if candidate.finished and all(candidate.values[key] in values for key, values in space.items()):
            trial = optuna.trial.create_trial(params=candidate.values, distributions=distributions, value=candidate.score)
            study.add_trial(trial)
    proposals: list[Values] = []
    known, error = [candidate.values for candidate in candidates], ""
    for _ in range(_MAX_PROPOSALS):
        if len(proposals) >= count:
            return proposals
        trial = study.ask(distributions)
        values = {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in trial.params.items()}
        problem = find_error(values)
        if problem or values in known:
            error = problem or error
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            proposals.append(values)
            known.append(values)
    if error and not proposals:
        raise GpflError(f"none of {_MAX_PROPOSALS} proposed candidates can be trained: {error}")
    return proposals


def _find_error(search: MethodSearch, values: Values) -> str:
    """Return why the method rejects these values, if it does: rates and λ of pFedMe must fit each other."""
    try:
        prepare(configs.resolve_config(search.config_of(values)), search.federation)
    except GpflError as problem:
        return f"{search.method}: {problem}"
    return ""


def _import_optuna() -> ModuleType:
    try:
        import optuna
    except ImportError:
        raise GpflError("gpfl tune needs Optuna, which is not installed: pip install 'gpfl[tune]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


# Results.


def save_result(search: MethodSearch, result: SearchResult, comment: str) -> None:
    """Write the method's best.toml under a comment and how it was chosen, and common.toml, which all methods share.

    With different learning rates, methods have no config in common.
    """
    settings = search.config_of(result.best.values)
    content = _portable_config(search, settings, f"../{MANIFEST}")
    content["method"] = {key: content["method"][key] for key in ("name", *settings["method"]) if key in content["method"]}
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    files.write_text(search.folder / BEST, lines + toml.dump({"format_version": FORMAT_VERSION, **content}))
    _write_study(search, {"budget": result.budget, "candidates": len(result.candidates), "note": result.note})
    if not search.options.with_lr:
        common = _portable_config(search, search.settings, MANIFEST)
        del common["method"]
        files.write_text(search.out / COMMON, toml.dump({"format_version": FORMAT_VERSION, **common}))


def _portable_config(search: MethodSearch, settings: ConfigDict, manifest: str) -> ConfigDict:
    """Return a complete config without seed, device and defaults of [run]."""
    config, _ = prepare(configs.resolve_config(settings), search.federation)
    content: ConfigDict = config.sections()
    if "file" in content["partition"]:
        content["partition"]["file"] = manifest
    content["run"] = {key: value for key, value in settings.get("run", {}).items() if ("run", key) not in UNCOMPARED}
    return {section: values for section, values in content.items() if values}
