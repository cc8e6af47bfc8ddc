"""Comparisons: several methods on one federation, each with the same seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpfl.core import options
from gpfl.errors import DivergenceError, GpflError, did_you_mean
from gpfl.experiments.stored_runs import Trials
from gpfl.experiments.trials import NEGLIGIBLE, CallbackFactory, check_trials, read_trials, read_trials_plan, run_trials
from gpfl.methods import METHODS
from gpfl.training import config as configs
from gpfl.training.config import Config, ConfigDict, RunOptions


@dataclass(frozen=True)
class ComparisonResult:
    """What a comparison's folder holds of its methods: trials, best mean accuracy first, and what is missing among them."""

    rows: list[Trials]
    unended: list[str]  # sentences about methods of which not all trials have ended
    diverged: Mapping[str, DivergenceError]  # by label: why trials of this call have not


@dataclass(frozen=True)
class MethodVariant:
    """A method with settings of its own, under the name it has in the table."""

    label: str
    method: Mapping[str, object] = field(hash=False)

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return self.label.replace(" ", "-").replace("+", "-")


ABLATIONS = (("pci",), ("cov",), ("mlg",), ("gce",), ("cov", "gce"))
"""The paper's five: without personal context, valve, magnitude loss, embeddings, and both of valve and embeddings."""


def parse_methods(words: str) -> list[MethodVariant]:
    """Gives the methods of a list such as "gpfl,fedrep", "all" or "ablations"."""
    found: list[MethodVariant] = []
    for word in (word.strip() for word in words.split(",")):
        if word == "all":
            found += [MethodVariant(name, {"name": name}) for name in METHODS]
        elif word == "ablations":
            found.append(MethodVariant("gpfl", {"name": "gpfl"}))
            found += [
                MethodVariant(f"gpfl without {'+'.join(parts)}", {"name": "gpfl", "without": list(parts)})
                for parts in ABLATIONS
            ]
        elif word in METHODS:
            found.append(MethodVariant(word, {"name": word}))
        else:
            raise GpflError(f"unknown method '{word}'; {did_you_mean(word, (*METHODS, 'all', 'ablations'))}")
    return list({entrant.label: entrant for entrant in found}.values())


def sections(
    given: ConfigDict, methods: Sequence[MethodVariant], own: Mapping[str, Mapping[str, object]]
) -> dict[MethodVariant, ConfigDict]:
    """Gives every method's config; `own` holds settings of single methods by name."""
    return {entrant: {**given, "method": {**own.get(str(entrant.method["name"]), {}), **entrant.method}} for entrant in methods}


def check_methods(given: ConfigDict, methods: Sequence[MethodVariant], own: Mapping[str, Mapping[str, object]]) -> None:
    """Refuses mistakes in the methods' settings, for which no data are needed."""
    run = options.build(RunOptions, given.get("run", {}), "run")
    for entrant, section in sections(given, methods, own).items():
        try:
            configs.resolve_method(section, run)
        except GpflError as problem:
            raise GpflError(f"{entrant.label}: {problem}") from None


def compare(
    given: ConfigDict,
    methods: Sequence[MethodVariant],
    own: Mapping[str, Mapping[str, object]],
    seeds: Sequence[int],
    out: Path,
    make_callback: CallbackFactory,
) -> ComparisonResult:
    """Gives every method's trials; what `out` holds already is not run again.

    `own` holds settings of single methods by name.
    """
    each = sections(given, methods, own)
    complete = []
    for entrant, section in each.items():  # all are checked before the first is run
        try:
            complete.append(check_trials(section, seeds, out / entrant.folder)[0])
        except GpflError as problem:
            raise GpflError(f"{entrant.label}: {problem}") from None
    diverged = {}
    for entrant, section in each.items():
        try:
            run_trials(section, seeds, out / entrant.folder, make_callback, label=entrant.label)
        except DivergenceError as end:
            diverged[entrant.label] = end
    folders = held(out, complete[0])
    trials = [read_trials(folder) for folder in folders]
    rows = sorted((one for one in trials if one.summaries), key=lambda one: -one.mean("best_accuracy"))
    missing = [words for folder, one in zip(folders, trials, strict=True) if (words := unended(folder, one))]
    return ComparisonResult(rows, missing, diverged)


def unended(folder: Path, trials: Trials) -> str:
    """Gives the sentence that not all trials planned in a folder have ended; "" where they have."""
    name, seeds = read_trials_plan(folder)
    ended = [str(summary["seed"]) for summary in trials.summaries]
    if len(ended) == len(seeds):
        return ""
    planned = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    return f"{name}: of {planned} {'only ' + ', '.join(ended) if ended else 'none'} ended."


def held(out: Path, like: Config) -> list[Path]:
    """Gives the folders of all trials that a folder holds and that were run like a complete config, their methods aside."""
    common = {**like.sections(), "method": {}}
    found = []
    for folder in sorted(path.parent for path in out.glob("*/trials.json")):
        config = configs.read_config(folder / "config.toml")
        same = ("defence" in config) == ("defence" in common) and all(
            config.get(section, {}).get(key) == values.get(key)
            for section, values in common.items()
            for key in (values if section == "method" else values.keys() | config.get(section, {}).keys())
            if (section, key) not in NEGLIGIBLE
        )
        if same:
            found.append(folder)
    return found
