"""The values that finished searches chose, and the budgets of the searches. None of it needs Optuna."""

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gpfl.errors import GpflError, pluralize
from gpfl.io import toml
from gpfl.training import config as configs
from gpfl.training.config import ConfigDict

STUDY, BEST, COMMON = "study.toml", "best.toml", "common.toml"
STORAGE = "optuna.log"

_SAME_SETTINGS = (("net", "name"), ("train", "lr"), ("train", "batch_size"), ("train", "epochs"), ("run", "protocol"))
"""Settings besides data and partition under which tuned values were chosen and must be used."""


def describe_unequal_budgets(studies: Mapping[str, ConfigDict]) -> str:
    """Return how the budgets of finished searches differ and how to make them equal, or "" if they are equal.

    `studies` has the content of study.toml by method. A method whose space holds fewer values than its budget was
    searched completely.
    """
    counts = {method: cast(int, study["result"]["candidates"]) for method, study in studies.items() if study["space"]}
    most = max(counts.values(), default=0)
    short = [method for method, count in counts.items() if cast(int, studies[method]["result"]["budget"]) == count < most]
    if not short:
        return ""
    least = min(counts[method] for method in short)
    listed = ", ".join(f"{method} {pluralize(count, 'candidate')}" for method, count in counts.items())
    larger = ", ".join(method for method, count in counts.items() if count > least)
    return (
        f"unequal budgets ({listed}): search {', '.join(short)} with --budget {most}, or {larger} with --budget {least}, "
        "which trains nothing"
    )


@dataclass(frozen=True)
class TunedValues:
    """The values that the searches of a folder chose, for `gpfl reproduce --tuned`."""

    folder: Path
    studies: Mapping[str, ConfigDict]  # content of study.toml by method
    values: Mapping[str, ConfigDict]  # by method: the options in its best.toml, and the learning rate if that was searched

    @classmethod
    def read(cls, folder: Path) -> "TunedValues":
        """Read a folder of `gpfl tune`. Raise if nothing was chosen in it, or with unequal budgets."""
        studies: dict[str, ConfigDict] = {}
        values: dict[str, ConfigDict] = {}
        for path in sorted(folder.glob(f"*/{BEST}")):
            name, best, study = path.parent.name, configs.read_sections(path), configs.read_sections(path.with_name(STUDY))
            try:
                values[name] = {"method": {key: value for key, value in best["method"].items() if key != "name"}}
                if "train.lr" in study["space"]:
                    values[name]["train"] = {"lr": best["train"]["lr"]}
                for section, key in (*_SAME_SETTINGS, ("tune", "seeds"), ("result", "budget"), ("result", "candidates")):
                    study[section][key]
            except KeyError as error:
                raise GpflError(f"{path.parent} cannot be read: {error} is missing; delete it to search it again") from None
            studies[name] = study
        if not values:
            raise GpflError(f"--tuned {folder} holds no finished search: give the --out of a gpfl tune that has ended")
        if text := describe_unequal_budgets(studies):
            raise GpflError(f"--tuned {folder} was searched with {text}")
        return cls(folder, studies, values)

    def config_for(self, method: str, settings: ConfigDict, column: str) -> ConfigDict:
        """Return the tuned options of a method. Raise if it was not searched under the config of this column of a table."""
        if method not in self.values:
            raise GpflError(f"--tuned {self.folder} holds no search of {method}: search it with the same budget, or omit it")
        config, study = configs.resolve_config(settings), self.studies[method]
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
        study = self.studies[names[0]]
        counts = ", ".join(f"{name} {self.studies[name]['result']['candidates']}" for name in names)
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
        target = out / "tuned" / self.folder.resolve().name
        shutil.rmtree(target, ignore_errors=True)  # an earlier search of that name
        omit = shutil.ignore_patterns("candidate-*", f"{STORAGE}*")
        return shutil.copytree(self.folder, target, ignore=omit)


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else "nothing" if value is None else toml.format_value(value)
