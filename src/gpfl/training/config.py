"""Configurations: what a run is made of, gathered from defaults, protocol, file and flags, checked, and written down whole."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gpfl.core import options
from gpfl.core.method import Method
from gpfl.core.options import BY_NET, SearchRange, option
from gpfl.core.randomness import MAX_SEED
from gpfl.data import DATASETS, DataSource, Table, find_dataset
from gpfl.data.files.layout import SUFFIXES
from gpfl.defences.config import NO_DEFENCE, DefenceConfig
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation.federation import MANIFEST, Federation, named_in, partition_table, read_in
from gpfl.federation.partition import PARTITIONS, Partition
from gpfl.io import toml
from gpfl.io.legacy import FORMAT_VERSION, read_version, upgrade_config
from gpfl.methods import METHODS
from gpfl.methods.presets import METHOD_PRESETS
from gpfl.models import NETS
from gpfl.models.architecture import Architecture

ConfigDict = dict[str, dict[str, object]]
"""Values by section and key, as a TOML file holds them."""

CUSTOM = "custom"
"""The name of a net that was given in Python and cannot be built from a config."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is executed."""

    seed: int = option(0, "seed of weights, cohorts and batches", min=0, max=MAX_SEED)
    protocol: str = option(
        "corrected",
        "preset of options where paper and authors' code differ; options set by hand win over it",
        choices=("corrected", "paper", "reference"),
    )
    engine: str = option("auto", "how rounds are executed", choices=("auto", "loop", "vmap", "workers"))
    precision: str = option(
        "float32", "arithmetic: exact float32, or with tf32 or bf16 products on a GPU", choices=("float32", "tf32", "bf16")
    )
    compile: str = option(
        "auto",
        "GPU: compile the steps of engine vmap, which takes half a minute; auto: where a run is long enough",
        choices=("auto", "on", "off"),
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:N or mps")
    eval_every: int = option(1, "rounds between evaluations", min=1)
    checkpoint_every: int = option(10, "rounds between checkpoints", min=1)
    allow_noop: bool = option(False, "accept a value that switches the method off, such as FedProx with μ = 0")
    select: str = option(
        "auto",
        "round whose models are kept: the last, or the best on validation or test rows; auto: validation, if there is any",
        choices=("auto", "last", "validation", "test"),
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Local training, common to all methods."""

    rounds: int = option(100, "rounds of training", symbol="T", min=1)
    lr: float = option(
        BY_NET, "learning rate of plain SGD", symbol="η", typical="0.005 to 0.1", above=0.0, search=SearchRange(0.001, 0.3)
    )
    batch_size: int = option(10, "rows in a batch", symbol="B", min=1)
    epochs: int = option(1, "local epochs a round", symbol="E", min=1)
    client_fraction: float | tuple[float, float] = option(
        1.0, "share of clients that join a round, or a range it is drawn from", symbol="ρ", above=0.0, max=1.0
    )
    shuffle: bool = option(True, "new order of rows each round")
    drop_last: bool = option(True, "leave out a last partial batch, unless it is a client's only one")
    class_counts: str = option(
        "all",
        "rows counted for a client's label counts: all, or those in whole batches (authors' code)",
        choices=("all", "used"),
    )
    batch_norm: str = option("local", "BatchNorm running statistics: kept local, or averaged", choices=("local", "average"))
    patience: int = option(0, "stop after this many rounds without a better accuracy; 0 = never", min=0)


PROTOCOLS: Mapping[str, Mapping[str, object]] = {
    "corrected": {},
    "paper": {},
    "reference": {"shuffle": False, "drop_last": True, "class_counts": "used"},
}
"""What a protocol sets for every method; `METHOD_PRESETS` adds the options of single methods."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run, complete. `partition` is None where a federation or its manifest was given, `net` where a module was.

    `source` is None where arrays were given in Python; `data` is what they are called in any case.
    """

    run: RunOptions
    data: str
    source: DataSource | None
    partition: Partition | None
    manifest: str
    net: Architecture | None
    train: TrainOptions
    method: Method
    defence: DefenceConfig = NO_DEFENCE

    def to_toml(self) -> str:
        """Return the text of config.toml, which runs the same again."""
        return toml.dump({"format_version": FORMAT_VERSION, **self.sections()})

    def sections(self) -> ConfigDict:
        """Return all values by section and key, as TOML holds them."""
        sections: dict[str, dict[str, object]] = {
            "run": {},
            "data": {"name": self.source.config_name if self.source else self.data},
            "partition": {"name": self.partition.name} if self.partition else {"name": "manifest", "file": MANIFEST},
            "net": {"name": name_of(self.net) if self.net else CUSTOM},
            "train": {},
            "method": {"name": self.method.name},
        }
        records = {
            "run": self.run,
            "data": self.source,
            "partition": self.partition,
            "net": self.net,
            "train": self.train,
            "method": self.method,
            "defence": self.defence if self.defence.enabled else None,
        }
        for section, record in records.items():
            for key, value in (options.config_values(record) if record is not None else {}).items():
                sections.setdefault(section, {})[key] = list(value) if isinstance(value, tuple) else value
        return sections

    def federation(self) -> Federation:
        """Gives the federation that the config describes."""
        if self.source is None:
            raise GpflError(f"the data '{self.data}' were given in Python: give them again there")
        table = self.source.load()
        if self.partition is None:
            return Federation.load(Path(self.manifest), table)
        return partition_table(table, self.partition)


def name_of(net: Architecture) -> str:
    """Gives the name of an architecture, or its class's where it is not a named one."""
    return next((name for name, kind in NETS.items() if type(net) is kind), type(net).__name__)


def read_config(path: Path) -> ConfigDict:
    """Return the sections of a config file; its manifest and data files are relative to its folder."""
    given = read_sections(path)
    manifest, data = given.get("partition", {}).get("file"), given.get("data", {}).get("name")
    if isinstance(manifest, str):
        given["partition"]["file"] = str(path.parent / manifest)
    if isinstance(data, str) and data not in DATASETS and (path.parent / data).exists():
        given["data"]["name"] = str(path.parent / data)
    return given


def read_sections(path: Path) -> ConfigDict:
    """Return the sections of a TOML file, older names replaced by today's."""
    return parse_sections(toml.read(path), path)


def parse_sections(content: Mapping[str, object], path: Path) -> ConfigDict:
    """Return the sections of a config's content, older names replaced by today's."""
    version = read_version(content, path)
    sections = {key: value for key, value in content.items() if key != "format_version"}
    for section, values in sections.items():
        if toml.is_sections(values):
            raise GpflError(f"{path}: '{section}' is a list of sections, [[{section}]]; write one section, [{section}]")
        if not isinstance(values, dict):
            raise GpflError(f"{path}: '{section}' stands outside a section; the sections are {', '.join(SECTIONS)}")
    return cast(ConfigDict, upgrade_config(sections) if version == 1 else sections)


def refuse_data(config: str, command: str) -> None:
    """Refuses data, a method or a run's folder where a config should be, with the command that may be meant."""
    path, quoted = Path(config), shlex.quote(config)
    if path.suffix.lower() == ".toml" and not path.is_dir():
        return
    flag = ""
    if config in METHODS and not path.exists():
        flag = "--method"
    elif config in DATASETS or path.suffix.lower() in SUFFIXES or path.is_dir():
        flag = "--data"
    if (path / "config.toml").is_file():
        raise GpflError(f"{config} is the folder of a run, not a config: did you mean `gpfl resume {quoted}`?")
    if flag:
        raise GpflError(f"{config} is not a config (.toml): did you mean `gpfl {command} {flag} {quoted}`?")


SECTIONS = ("run", "data", "partition", "net", "train", "method", "defence")


def resolve_config(given: ConfigDict, *, federation: Federation | None = None, custom_net: bool = False) -> Config:
    """Gives the config: what was given, then the protocol's presets, then the data's defaults, then our own."""
    for section in given:
        if section not in SECTIONS:
            raise GpflError(f"unknown section '{section}'; {did_you_mean(section, SECTIONS)}")
    run = options.build(RunOptions, given.get("run", {}), "run")
    check_device(run.device)
    method = chosen_method(given, run)
    defence = options.build(DefenceConfig, given.get("defence", {}), "defence")
    defence.validate()
    look_over(given, custom_net)
    source = federation.table.source if federation else chosen_source(given)
    data = federation.table.name if federation else source.name if source else ""
    usual = source.defaults if source else DATASETS[data].defaults if data in DATASETS else {}
    net = None if custom_net else chosen_net(given, usual, federation)
    train = options.build(
        TrainOptions, {**usual.get("train", {}), **PROTOCOLS[run.protocol], **given.get("train", {})}, "train"
    )
    refuse_wrong_join(train)
    partition = None if federation else chosen_partition(given, usual)
    manifest = str(given.get("partition", {}).get("file", "")) if partition is None else ""
    return Config(
        run=run,
        data=data,
        source=source,
        partition=partition,
        manifest=manifest,
        net=net,
        train=train,
        method=method,
        defence=defence,
    )


def look_over(given: ConfigDict, custom_net: bool) -> None:
    """Refuses what can be before data are asked for their defaults: own files are read for that, which may take long."""
    refuse_wrong_join(options.build(TrainOptions, given.get("train", {}), "train"))
    look_over_partition(given)
    if "name" in given.get("net", {}) and not custom_net:
        chosen_net(given, {}, None)


def look_over_partition(given: ConfigDict) -> None:
    """Refuses a partition, or where own files are to choose it, what none of those takes that know all of its options."""
    values = given.get("partition", {})
    if "name" in values:
        chosen_partition(given, {})
    elif "file" not in values and name_in(given, "data", "digits") not in DATASETS:
        problems = []
        for name, record in PARTITIONS.items():
            if values.keys() <= options.options_of(record).keys():
                try:
                    chosen_partition({"partition": {"name": name, **values}}, {})
                except GpflError as problem:
                    problems.append(problem)
                else:
                    return
        if problems:
            raise problems[0]


def check_device(name: str) -> None:
    """Refuses what is no name of a device; whether it is there is not looked at."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?|mps", name):
        raise GpflError(f"run.device is '{name}'; it must be auto, cpu, cuda, cuda:N or mps")


def refuse_wrong_join(train: TrainOptions) -> None:
    """Refuses shares of clients that are the wrong way round."""
    if isinstance(train.client_fraction, tuple) and train.client_fraction[0] > train.client_fraction[1]:
        raise GpflError(f"train.client_fraction is {list(train.client_fraction)}; the lower share must come first")


def chosen_source(given: ConfigDict) -> DataSource:
    """Gives the data of the section [data]; a manifest names its own, or says how own files were read."""
    manifest = given.get("partition", {}).get("file")
    divided = Path(manifest) if isinstance(manifest, str) else None
    usual = named_in(divided) if divided and "name" not in given.get("data", {}) else "digits"
    name = name_in(given, "data", usual)
    if name == "arrays":
        raise GpflError("unknown data 'arrays'; it was given in Python: give it again there")
    read_before = read_in(divided, name) if divided else {}
    return find_dataset(name, {**read_before, **without_name(given.get("data", {}))})


def table_of(given: ConfigDict) -> Table | None:
    """Gives the table of a run's own config; None where it was given in Python."""
    name = name_in(given, "data", "digits")
    return chosen_source(given).load() if name in DATASETS or Path(name).is_absolute() else None


def name_in(given: ConfigDict, section: str, default: str) -> str:
    """Gives the `name` of a section."""
    name = given.get(section, {}).get("name", default)
    if not isinstance(name, str):
        raise GpflError(f"{section}.name is {name!r}; it must be text")
    return name


def without_name(values: Mapping[str, object]) -> dict[str, object]:
    """Gives a section's options without its name."""
    return {key: value for key, value in values.items() if key != "name"}


def chosen_method(given: ConfigDict, run: RunOptions) -> Method:
    """Gives the method of the section [method]."""
    name = name_in(given, "method", "gpfl")
    if name not in METHODS:
        raise GpflError(f"unknown method '{name}'; {did_you_mean(name, METHODS)}")
    check_option_owner("method", name, given.get("method", {}), METHODS)
    preset = METHOD_PRESETS[run.protocol].get(name, {})
    method = options.build(METHODS[name], {**preset, **without_name(given.get("method", {}))}, "method")
    if not run.allow_noop:
        options.check_not_disabled(method, "method")
    return method


def chosen_net(given: ConfigDict, usual: Mapping[str, Mapping[str, object]], federation: Federation | None) -> Architecture:
    """Gives the net of the section [net], by default the data's, else one for the shape of its rows."""
    fitting = "cnn4" if federation is not None and len(federation.table.shape) == 3 else "mlp"
    name = name_in(given, "net", str(usual.get("net", {}).get("name", fitting)))
    if name == CUSTOM:
        raise GpflError("this run used a net given in Python; give it again: gpfl.resume(folder, net=…) or gpfl.fit(…, net=…)")
    if name not in NETS:
        raise GpflError(f"unknown net '{name}'; {did_you_mean(name, NETS)}, or give it in Python: net=…")
    values = {**fitting_defaults(usual, "net", name, NETS[name]), **without_name(given.get("net", {}))}
    check_option_owner("net", name, values, NETS)
    return options.build(NETS[name], values, "net")


def check_option_owner(section: str, name: str, values: Iterable[str], records: Mapping[str, type]) -> None:
    """Raise if a value is for another method, net or partition than the chosen one."""
    for key in values:
        owners = [owner for owner, record in records.items() if key in options.options_of(record)]
        if owners and name not in owners:
            raise GpflError(
                f"{section}.{key} belongs to {section} {', '.join(owners)}, not to {name}: "
                f"leave it out, or choose --{section} {owners[0]}"
            )


def chosen_partition(given: ConfigDict, usual: Mapping[str, Mapping[str, object]]) -> Partition | None:
    """Gives the partition of the section [partition], or None where it names a manifest."""
    name = name_in(given, "partition", str(usual.get("partition", {}).get("name", "pathological")))
    if name == "manifest":
        if not isinstance(given["partition"].get("file"), str):
            raise GpflError("partition.name is 'manifest', so partition.file must name the file")
        extra = [key for key in given["partition"] if key not in ("name", "file")]
        if extra:
            raise GpflError(
                f"partition.{extra[0]} cannot be set: partition.name is 'manifest', which says how the rows are divided"
            )
        return None
    if name not in PARTITIONS:
        raise GpflError(f"unknown partition '{name}'; {did_you_mean(name, (*PARTITIONS, 'manifest'))}")
    values = {**fitting_defaults(usual, "partition", name, PARTITIONS[name]), **without_name(given.get("partition", {}))}
    check_option_owner("partition", name, values, PARTITIONS)
    return options.build(PARTITIONS[name], values, "partition")


def fitting_defaults(usual: Mapping[str, Mapping[str, object]], section: str, name: str, record: type) -> dict[str, object]:
    """Gives the data's defaults for a section, as far as the named record has them."""
    values = usual.get(section, {})
    known = options.options_of(record)
    if name != values.get("name"):
        known = {key: described for key, described in known.items() if key in options.options_of(Partition)}
    return {key: value for key, value in values.items() if key in known}
