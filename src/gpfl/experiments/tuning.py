"""Hyperparameter search with Optuna: scored on validation samples, with the same budget for every method.

Each method has an Optuna study in a file of its folder. A batch of proposals depends only on the trials before it and the
search seed, so an interrupted search resumes exactly.
"""

import dataclasses
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

import numpy as np

from gpfl.core.metrics import best_index
from gpfl.core.options import SearchRange, options_of
from gpfl.engine import make_engine
from gpfl.engine.distributed import require_single_process
from gpfl.errors import GpflError, error_prefix
from gpfl.experiments.compare import MethodVariant
from gpfl.experiments.stored_runs import UNCOMPARED, first_difference
from gpfl.experiments.trials import check_same_federation, delete_weights, prepare_trial, train_trials, with_seed
from gpfl.experiments.tuned_values import BEST, COMMON, STORAGE, STUDY
from gpfl.federation import MANIFEST, Federation
from gpfl.io import files, toml
from gpfl.io.legacy import FORMAT_VERSION
from gpfl.methods import METHODS
from gpfl.training import config as configs
from gpfl.training.callbacks import Callback
from gpfl.training.config import Config, ConfigDict, TrainOptions
from gpfl.training.prepare import prepare
from gpfl.training.run_dir import RunDir, metric

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

Values = dict[str, float | int]  # hyperparameters by section and key: {"method.lam": 0.01}
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
class Candidate:
    """Hyperparameters and, after training, their validation accuracy for each seed. Candidate 1 has the defaults."""

    number: int
    values: Values
    trial: int  # number of the trial in Optuna's study, which counts rejected values as well
    scores: Sequence[float] = ()  # best validation accuracy over rounds
    rounds: Sequence[int] = ()  # round of that accuracy
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
    """A finished search of one method."""

    method: str
    study: ConfigDict  # content of study.toml
    candidates: Sequence[Candidate]

    @property
    def best(self) -> Candidate:
        """The candidate with the best score, the first in a tie."""
        return self.candidates[best_index([candidate.score for candidate in self.candidates])]


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

    def candidates(self) -> list[Candidate]:
        """Return the candidates within the budget so far, trained or not."""
        return _read_candidates(open_study(self.folder))[: self.n_candidates] if (self.folder / STORAGE).exists() else []


def plan_searches(
    settings: ConfigDict, methods: Sequence[MethodVariant], options: SearchOptions, out: Path
) -> list[MethodSearch]:
    """Return the searches of several methods. Raise before any training if one of them cannot run, or not in `out`.

    Options that `methods` set are not searched.
    """
    _import_optuna()
    require_single_process("gpfl tune")
    if options.with_lr and "lr" in settings.get("train", {}):
        raise GpflError("train.lr is set, and --with-lr searches it: leave one of them out")
    searches: list[MethodSearch] = []
    for method in methods:
        sections = method.config(settings)
        with error_prefix(method.label if len(methods) > 1 else ""):
            config = configs.resolve_config(with_seed(sections, options.seeds[0]))
            federation = searches[0].federation if searches else config.federation()
            if not federation.has_validation:
                fix = f"{'set' if config.partition else 'save one with'} --validation-fraction, such as 0.2"
                raise GpflError(f"candidates are scored on validation samples, but no client has any: {fix}")
            config, spec = prepare(config, federation)
            concurrent = make_engine(config.run.engine, spec).supports_concurrent_trials
        limited = options if concurrent else dataclasses.replace(options, n_concurrent=1)
        space = search_space(method.label, sections, options.with_lr)
        search = MethodSearch(method.label, sections, config, spec.federation, space, limited, out)
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
    out, studies = search.out, sorted(search.out.glob(f"*/{STORAGE}"))
    if not studies and out.exists() and any(out.iterdir()):
        raise GpflError(f"--out {out} is not empty and holds no search: choose another --out")
    for path in (storage.with_name(STUDY) for storage in studies):
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


def run_search(search: MethodSearch, callback: Callback) -> Iterator[Candidate]:
    """Search the values of one method: resume the search of its folder, and yield each candidate after its training."""
    if not (search.folder / STUDY).exists():
        _write_study(search)
    if not (search.out / MANIFEST).exists():
        search.federation.save(search.out / MANIFEST)
    study = open_study(search.folder)
    while True:
        pending = [each for each in search.candidates() if not each.finished] or _next_candidates(search, study)
        if not pending:
            return
        for group in _group_concurrent(pending, search.options.n_concurrent):
            failures = _train(search, [(each, seed) for each in group for seed in search.options.seeds], callback)
            for candidate in group:
                trained = _score(search, candidate, failures.get(candidate.number, ""))
                study.tell(trained.trial, trained.score, skip_if_finished=True)
                _store_candidate(study, trained)
                if not search.options.keep_weights:
                    for seed in search.options.seeds:
                        delete_weights(search.run_dir(candidate, seed).path)
                yield trained


def _write_study(search: MethodSearch, result: Mapping[str, object] | None = None) -> None:
    content = {"format_version": FORMAT_VERSION, **search.study, **({"result": result} if result else {})}
    files.write_text(search.folder / STUDY, toml.dump(content))


def _group_concurrent(candidates: Sequence[Candidate], n_concurrent: int) -> list[list[Candidate]]:
    groups: dict[object, list[Candidate]] = {}
    for candidate in candidates:
        integers = tuple((key, value) for key, value in candidate.values.items() if isinstance(value, int))
        groups.setdefault(integers if n_concurrent > 1 else candidate.number, []).append(candidate)
    return list(groups.values())


def _train(search: MethodSearch, runs: Sequence[tuple[Candidate, int]], callback: Callback) -> dict[int, str]:
    """Train candidates and seeds at the same time if memory suffices. Return how candidates diverged, by their number."""
    numbers, prepare = [], []
    for candidate, seed in runs:
        path = search.run_dir(candidate, seed).path
        if not RunDir(path).finished:
            settings = with_seed(search.config_of(candidate.values if candidate.number > 1 else {}), seed)
            numbers.append(candidate.number)
            prepare.append(partial(prepare_trial, path, settings, search.federation, callback))
    ends = train_trials(prepare) if prepare else []
    return {number: end.reason for number, end in zip(numbers, ends, strict=True) if end}


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


def open_study(folder: Path) -> "Study":
    """Return the Optuna study in the folder of a method, new or stored."""
    optuna = _import_optuna()
    path = folder / STORAGE
    try:
        # The lock is a file of its own: the default, a link, is not available everywhere.
        lock = optuna.storages.journal.JournalFileOpenLock(str(path))
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path), lock_obj=lock))
        stored = storage.get_all_studies()  # `create_study` would write even if there is one
        study: Study = (
            optuna.load_study(study_name=None, storage=storage)
            if stored
            else optuna.create_study(study_name=folder.name, storage=storage, direction="maximize")
        )
        return study
    except (OSError, ValueError, KeyError) as error:
        raise GpflError(f"{path} cannot be read: {error}; delete {folder} to search it again") from None


def _read_candidates(study: "Study") -> list[Candidate]:
    attributes = study.user_attrs
    return [Candidate(**attributes[key]) for key in sorted(attributes)]


def _store_candidate(study: "Study", candidate: Candidate) -> None:
    study.set_user_attr(f"candidate-{candidate.number:03}", dataclasses.asdict(candidate))


def _next_candidates(search: MethodSearch, study: "Study") -> list[Candidate]:
    """Return the next candidates, or [] if the budget is spent or all values were tried."""
    known = _read_candidates(study)
    wanted = min(search.options.n_concurrent, search.n_candidates - len(known))
    new: list[Candidate] = []
    if not known:
        records = {"method": search.config.method, "train": search.config.train}
        defaults = {key: getattr(records[key.split(".")[0]], key.split(".")[1]) for key in search.space}
        new.append(Candidate(1, defaults, ask_defaults(study, search.space, defaults)))
    seed = zlib.crc32(f"{search.options.seed} {search.method} {len(known)}".encode())
    tried = [candidate.values for candidate in (*known, *new)]
    for number, values in propose(study, search.space, tried, wanted - len(new), seed, lambda each: _find_error(search, each)):
        new.append(Candidate(len(known) + len(new) + 1, values, number))
    for candidate in new:
        _store_candidate(study, candidate)  # before training, so that interrupted ones are resumed
    return new


def ask_defaults(study: "Study", space: Space, defaults: Values) -> int:
    """Return the number of a new trial with the default values.

    If they lie outside the space, such as 0 on a logarithmic scale, the sampler learns from the nearest values in it.
    """
    nearest = {
        key: min(values, key=lambda value: abs(value - defaults[key]))
        if isinstance(values, tuple)
        else min(max(defaults[key], values.low), values.high)
        for key, values in space.items()
    }
    study.enqueue_trial(nearest)
    return study.ask(_distributions(space)).number


def propose(
    study: "Study", space: Space, tried: Sequence[Values], count: int, seed: int, find_error: Callable[[Values], str]
) -> list[tuple[int, Values]]:
    """Return up to `count` new trials and their values, rounded to three digits, for which `find_error` returns ""."""
    optuna = _import_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    proposals: list[tuple[int, Values]] = []
    known, error = list(tried), ""
    for _ in range(_MAX_PROPOSALS):
        if len(proposals) >= count:
            return proposals
        trial = study.ask(_distributions(space))
        values = {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in trial.params.items()}
        problem = find_error(values)
        if problem or values in known:
            error = problem or error
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            proposals.append((trial.number, values))
            known.append(values)
    if error and not proposals:
        raise GpflError(f"none of {_MAX_PROPOSALS} proposed candidates can be trained: {error}")
    return proposals


def _distributions(space: Space) -> dict[str, "BaseDistribution"]:
    optuna = _import_optuna()
    return {
        key: optuna.distributions.CategoricalDistribution(values)
        if isinstance(values, tuple)
        else optuna.distributions.FloatDistribution(values.low, values.high, log=values.log)
        for key, values in space.items()
    }


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


def read_results(out: Path) -> list[SearchResult]:
    """Return the finished searches in a folder, with the candidates behind their choice."""
    studies = {path.parent: configs.read_sections(path) for path in sorted(out.glob(f"*/{STUDY}"))}
    return [
        SearchResult(folder.name, study, _read_candidates(open_study(folder))[: cast(int, study["result"]["candidates"])])
        for folder, study in studies.items()
        if "result" in study
    ]


def save_result(search: MethodSearch, note: str) -> SearchResult:
    """Write the end of a search into study.toml, with a note on how it was run, and return the result."""
    candidates = search.candidates()
    result = {"budget": search.options.budget, "candidates": len(candidates), "note": note}
    _write_study(search, result)
    return SearchResult(search.method, {**search.study, "result": result}, candidates)


def save_best(search: MethodSearch, best: Candidate, comment: str) -> None:
    """Write the method's best.toml under a comment, and common.toml, which all methods share.

    With different learning rates, methods have no config in common.
    """
    settings = search.config_of(best.values)
    content = _portable_config(search, settings, f"../{MANIFEST}")
    content["method"] = {key: content["method"][key] for key in ("name", *settings["method"]) if key in content["method"]}
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    files.write_text(search.folder / BEST, lines + toml.dump({"format_version": FORMAT_VERSION, **content}))
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
