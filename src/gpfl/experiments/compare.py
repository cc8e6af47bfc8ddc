"""Comparisons: several methods on one federation, each with the same seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpfl.core import options
from gpfl.core.metrics import METRICS
from gpfl.errors import DivergenceError, GpflError, did_you_mean, error_prefix
from gpfl.experiments.stored_runs import Trials, first_difference
from gpfl.experiments.trials import TRIALS_FILE, CallbackFactory, check_trials, read_trials, read_trials_plan, run_trials
from gpfl.methods import METHODS
from gpfl.training import config as configs
from gpfl.training.config import Config, ConfigDict, RunOptions

ABLATIONS = (("pci",), ("cov",), ("mlg",), ("gce",), ("cov", "gce"))  # parts that the paper's five ablations of GPFL leave out


@dataclass(frozen=True)
class ComparisonResult:
    """Trials of all methods in the folder of a comparison, best mean accuracy first."""

    rows: list[Trials]
    unfinished: list[str]  # a sentence about each method with unfinished trials
    diverged: Mapping[str, DivergenceError]  # by label: trials that diverged in this call


@dataclass(frozen=True)
class MethodVariant:
    """A method with its own settings and its label in tables."""

    label: str
    method: Mapping[str, object] = field(hash=False)

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return self.label.replace(" ", "-").replace("+", "-")

    def config(self, settings: ConfigDict) -> ConfigDict:
        """Return a config with this method."""
        return {**settings, "method": dict(self.method)}


def parse_methods(text: str) -> list[MethodVariant]:
    """Return the methods of a list such as "gpfl,fedrep", "all" or "ablations", each once."""
    variants: list[MethodVariant] = []
    for name in (name.strip() for name in text.split(",")):
        if name == "all":
            variants += [MethodVariant(method, {"name": method}) for method in METHODS]
        elif name == "ablations":
            variants.append(MethodVariant("gpfl", {"name": "gpfl"}))
            variants += [
                MethodVariant(f"gpfl without {'+'.join(parts)}", {"name": "gpfl", "without": list(parts)})
                for parts in ABLATIONS
            ]
        elif name in METHODS:
            variants.append(MethodVariant(name, {"name": name}))
        else:
            raise GpflError(f"unknown method '{name}'; {did_you_mean(name, (*METHODS, 'all', 'ablations'))}")
    return list({variant.label: variant for variant in variants}.values())


def check_methods(settings: ConfigDict, methods: Sequence[MethodVariant]) -> None:
    """Raise if the settings of a method are invalid. No data is read."""
    run = options.build(RunOptions, settings.get("run", {}), "run")
    for variant in methods:
        with error_prefix(variant.label):
            configs.resolve_method(variant.config(settings), run)


def compare(
    settings: ConfigDict, methods: Sequence[MethodVariant], seeds: Sequence[int], out: Path, make_callback: CallbackFactory
) -> ComparisonResult:
    """Run the trials of every method that `out` does not hold yet."""
    complete = []
    for variant in methods:  # all are checked before the first is run
        with error_prefix(variant.label):
            complete.append(check_trials(variant.config(settings), seeds, out / variant.folder)[0])
    diverged = {}
    for variant in methods:
        try:
            run_trials(variant.config(settings), seeds, out / variant.folder, make_callback, label=variant.label)
        except DivergenceError as error:
            diverged[variant.label] = error
    folders = _find_trials(out, complete[0])
    trials = [read_trials(folder) for folder in folders]
    metric = complete[0].run.metric
    rows = sorted(
        (each for each in trials if each.runs), key=lambda each: -METRICS[metric].sign * each.mean(f"selected_{metric}")
    )
    unfinished = [text for folder, each in zip(folders, trials, strict=True) if (text := _describe_unfinished(folder, each))]
    return ComparisonResult(rows, unfinished, diverged)


def _describe_unfinished(folder: Path, trials: Trials) -> str:
    label, seeds = read_trials_plan(folder)
    finished = [str(run.seed) for run in trials.runs]
    if len(finished) == len(seeds):
        return ""
    planned = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    return f"{label}: of {planned}, {'only ' + ', '.join(finished) if finished else 'none'} finished."


def _find_trials(out: Path, reference: Config) -> list[Path]:
    common = {**reference.sections(), "method": {}}
    folders = sorted(path.parent for path in out.glob(f"*/{TRIALS_FILE}"))
    stored = {folder: configs.read_config(folder / "config.toml") for folder in folders}
    return [folder for folder, config in stored.items() if not first_difference({**config, "method": {}}, common)]
