"""Configs: the options of a run, merged from defaults, presets, files and flags, and validated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gpfl.core import options
from gpfl.core.method import Method
from gpfl.core.metrics import METRICS
from gpfl.core.options import BY_NET, SearchRange, option
from gpfl.core.randomness import MAX_SEED
from gpfl.data import DATASETS, DataSource, Table, find_dataset
from gpfl.defences.aggregation import RULES
from gpfl.defences.config import NO_DEFENCE, DefenceConfig
from gpfl.errors import GpflError, did_you_mean
from gpfl.federation import MANIFEST, PARTITIONS, Federation, Partition, partition_table
from gpfl.federation.federation import manifest_data_name, manifest_data_options
from gpfl.inference.threshold import THRESHOLD_METRICS
from gpfl.io import toml
from gpfl.io.legacy import FORMAT_VERSION, read_version, upgrade_config
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.models.architectures import Architecture
from gpfl.models.custom import net_name
from gpfl.training.devices import check_device_name

ConfigDict = dict[str, dict[str, object]]  # values by section and key, as in a TOML file

Defaults = Mapping[str, Mapping[str, object]]  # a dataset's defaults by section and key

SECTIONS = ("run", "data", "partition", "net", "train", "method", "defence")

CUSTOM = "custom"  # name of a net that was given in Python, which no config can build


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is executed."""

    seed: int = option(0, "seed of initial weights, client sampling and batches", min=0, max=MAX_SEED)
    protocol: str = option(
        "corrected",
        "preset for the options in which the paper and the authors' code differ; options you set override it",
        choices=("corrected", "paper", "reference"),
    )
    engine: str = option(
        "auto", "how rounds are executed, see `gpfl list engines`", choices=("auto", "loop", "vmap", "workers")
    )
    precision: str = option(
        "float32",
        "precision of matrix products and convolutions; tf32 needs a GPU, bf16 a GPU or a CPU with AVX512-BF16 or AMX",
        choices=("float32", "tf32", "bf16"),
    )
    compile: str = option(
        "auto",
        "compile training steps: half a minute on a GPU, about 10 s on a CPU with a C++ compiler; auto = only for long runs, "
        "on a CPU only where it was measured to be faster",
        choices=("auto", "on", "off"),
    )
    device: str = option("auto", "device to train on: auto, cpu, cuda, cuda:N or mps")
    eval_every: int = option(1, "rounds between evaluations", min=1)
    checkpoint_every: int = option(10, "rounds between checkpoints", min=1)
    allow_noop: bool = option(False, "accept a value that disables the method, such as FedProx with μ = 0")
    select: str = option(
        "auto",
        "round that is reported and kept: last, or best on validation or test samples; auto = validation, or last without",
        choices=("auto", "last", "validation", "test"),
    )
    private_state: str = option(
        "memory",
        "where the private state of clients that are not training is kept; disk = memory-mapped in the run's folder",
        choices=("memory", "disk"),
        omit_default=True,
    )
    threshold: str = option(
        "balanced_accuracy",
        "metric for which each client's decision threshold is chosen on its validation samples if there are two classes; "
        "none = 0.5. For saved models and `gpfl predict`, not for the metrics of rounds",
        choices=(*THRESHOLD_METRICS, "none"),
        omit_default=True,
    )
    metric: str = option(
        "accuracy",
        "metric over all samples that selects the round, stops by --patience and ranks methods",
        choices=tuple(METRICS),
        omit_default=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Local training, common to all methods."""

    rounds: int = option(100, "training rounds", symbol="T", min=1)
    lr: float = option(
        BY_NET, "learning rate of plain SGD", symbol="η", typical="0.005 to 0.1", above=0.0, search=SearchRange(0.001, 0.3)
    )
    batch_size: int = option(10, "samples in a batch", symbol="B", min=1)
    epochs: int = option(1, "local epochs per round", symbol="E", min=1)
    client_fraction: float | tuple[float, float] = option(
        1.0, "fraction of clients sampled each round, or a range to draw it from, such as 0.5,1", symbol="ρ", above=0.0, max=1.0
    )
    shuffle: bool = option(True, "shuffle the samples every round")
    drop_last: bool = option(True, "drop a last partial batch, unless it is a client's only one")
    class_counts: str = option(
        "all",
        "samples included in a client's label counts: all, or those in full batches (authors' code)",
        choices=("all", "used"),
    )
    batch_norm: str = option("local", "BatchNorm running statistics: kept local, or averaged", choices=("local", "average"))
    aggregation: str = option(
        "mean",
        "how the server combines uploads; all but the mean compare them, so that a malicious client has less influence",
        choices=RULES,
        omit_default=True,
    )
    trim_fraction: float = option(
        0.2,
        "fraction of the largest, and of the smallest, values of each entry that trimmed_mean leaves out",
        symbol="β",
        above=0.0,
        max=0.5,
        omit_default=True,
    )
    krum_byzantine: int = option(
        1, "malicious clients that krum expects; a round needs 2f + 3 clients", symbol="f", min=0, omit_default=True
    )
    secure_sum: bool = option(
        False, "the server sees only the sum of uploads, in integers; needs 3 clients in a round", omit_default=True
    )
    patience: int = option(0, "stop after this many rounds without a better --metric; 0 = never", min=0)


PROTOCOLS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "corrected": {},
    "paper": {"gpfl": {"p_scale": "mean", "cond_source": "global", "mlg_norm": "sample_mean", "reg": "norm"}},
    "reference": {
        "train": {"shuffle": False, "drop_last": True, "class_counts": "used"},
        "gpfl": {"p_scale": "sum", "cond_source": "stale_local", "mlg_norm": "batch", "reg": "wd"},
        "pfedme": {"eval_model": "local_w"},
    },
}
"""Options that a protocol sets, in [train] and for single methods; options that the user sets override them."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The complete config of a run."""

    run: RunOptions
    data: str
    source: DataSource | None  # None: arrays that were given in Python
    partition: Partition | None  # None: a manifest, or a federation that was given in Python
    manifest: str
    net: Architecture | None  # None: a module that was given in Python
    train: TrainOptions
    method: Method
    defence: DefenceConfig = NO_DEFENCE

    def to_toml(self) -> str:
        """Return the text of config.toml, which reproduces the run."""
        return toml.dump({"format_version": FORMAT_VERSION, **self.sections()})

    def sections(self) -> ConfigDict:
        """Return all values by section and key, as in a TOML file."""
        records: dict[str, tuple[str, object]] = {
            "run": ("", self.run),
            "data": (self.source.config_name if self.source else self.data, self.source),
            "partition": (self.partition.name if self.partition else "manifest", self.partition),
            "net": (net_name(self.net) if self.net else CUSTOM, self.net),
            "train": ("", self.train),
            "method": (self.method.name, self.method),
            "defence": ("", self.defence if self.defence.enabled else None),
        }
        sections: ConfigDict = {}
        for section, (name, record) in records.items():
            values = options.config_values(record) if record is not None else {}
            sections[section] = {"name": name} if name else {}
            sections[section] |= {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        if self.partition is None:
            sections["partition"]["file"] = MANIFEST
        return {section: values for section, values in sections.items() if values}

    def federation(self) -> Federation:
        """Return the federation that the config describes."""
        if self.source is None:
            raise GpflError(f"the data '{self.data}' were given in Python: give them again there")
        table = self.source.load()
        if self.partition is None:
            return Federation.load(Path(self.manifest), table)
        return partition_table(table, self.partition)


def read_config(path: Path) -> ConfigDict:
    """Return the sections of a config file. Its paths of a manifest, data or schema are relative to its folder."""
    sections = read_sections(path)
    for section, key in (("partition", "file"), ("data", "schema"), ("data", "name")):
        value = sections.get(section, {}).get(key)
        if isinstance(value, str) and (key != "name" or (value not in DATASETS and (path.parent / value).exists())):
            sections[section][key] = str(path.parent / value)
    return sections


def read_sections(path: Path) -> ConfigDict:
    """Return the sections of a TOML file; keys of earlier versions are renamed."""
    content = toml.read(path)
    version = read_version(content, path)
    sections = {key: value for key, value in content.items() if key != "format_version"}
    for section, values in sections.items():
        if isinstance(values, list):
            raise GpflError(f"{path}: '{section}' is a list of sections, [[{section}]]; write one section, [{section}]")
        if not isinstance(values, dict):
            raise GpflError(f"{path}: '{section}' stands outside a section; the sections are {', '.join(SECTIONS)}")
    return cast(ConfigDict, upgrade_config(sections) if version == 1 else sections)


def resolve_config(settings: ConfigDict, *, federation: Federation | None = None, custom_net: bool = False) -> Config:
    """Return the complete config: the settings, then the protocol's presets, the data's defaults and those of the options."""
    for section in settings:
        if section not in SECTIONS:
            raise GpflError(f"unknown section '{section}'; {did_you_mean(section, SECTIONS)}")
    run = options.build(RunOptions, settings.get("run", {}), "run")
    check_device_name(run.device)
    resolve_method(settings, run)
    defence = options.build(DefenceConfig, settings.get("defence", {}), "defence")
    defence.validate()
    # Checked before the data's defaults are looked up, which reads the user's files and may take long.
    _build_train(settings.get("train", {}))
    _check_partition(settings)
    if "name" in settings.get("net", {}) and not custom_net:
        _resolve_net(settings, {}, None)
    source = federation.table.source if federation else _find_source(settings)
    data = federation.table.name if federation else source.name if source else ""
    defaults = source.defaults if source else DATASETS[data].defaults if data in DATASETS else {}
    partition = None if federation else _resolve_partition(settings, defaults)
    return Config(
        run=run,
        data=data,
        source=source,
        partition=partition,
        manifest=str(settings.get("partition", {}).get("file", "")) if partition is None else "",
        net=None if custom_net else _resolve_net(settings, defaults, federation),
        train=_build_train(
            {**defaults.get("train", {}), **PROTOCOLS[run.protocol].get("train", {}), **settings.get("train", {})}
        ),
        method=resolve_method(settings, run, defaults),
        defence=defence,
    )


def resolve_method(settings: ConfigDict, run: RunOptions, defaults: Defaults | None = None) -> Method:
    """Return the method of [method] with the presets of the protocol; those of `corrected` are the data's defaults."""
    name = _name_in(settings, "method", "gpfl")
    if name not in METHODS:
        raise GpflError(f"unknown method '{name}'; {did_you_mean(name, METHODS)}")
    check_option_owner("method", name, settings.get("method", {}), METHODS)
    presets = (defaults or {}) if run.protocol == "corrected" else PROTOCOLS[run.protocol]
    preset = presets.get(name, {})
    method = options.build(METHODS[name], {**preset, **_without_name(settings.get("method", {}))}, "method")
    if not run.allow_noop:
        options.check_not_disabled(method, "method")
    return method


def check_option_owner(section: str, name: str, values: Iterable[str], records: Mapping[str, type]) -> None:
    """Raise if a value is for another method, net or partition than the chosen one."""
    for key in values:
        owners = [owner for owner, record in records.items() if key in options.options_of(record)]
        if owners and name not in owners:
            raise GpflError(
                f"{section}.{key} belongs to {section} {', '.join(owners)}, not to {name}: "
                f"leave it out, or choose --{section} {owners[0]}"
            )


def load_table(settings: ConfigDict) -> Table | None:
    """Return the table of a run's own config, or None if it was given in Python."""
    name = _name_in(settings, "data", "digits")
    return _find_source(settings).load() if name in DATASETS or Path(name).is_absolute() else None


def _build_train(values: Mapping[str, object]) -> TrainOptions:
    train = options.build(TrainOptions, values, "train")
    if isinstance(train.client_fraction, tuple) and train.client_fraction[0] > train.client_fraction[1]:
        raise GpflError(f"train.client_fraction is {list(train.client_fraction)}; the lower fraction must come first")
    return train


def _check_partition(settings: ConfigDict) -> None:
    """Raise if the options fit none of the partitions that the user's files may select."""
    values = settings.get("partition", {})
    if "name" in values:
        _resolve_partition(settings, {})
    elif "file" not in values and _name_in(settings, "data", "digits") not in DATASETS:
        problems = []
        for name, record in PARTITIONS.items():
            if values.keys() <= options.options_of(record).keys():
                try:
                    _resolve_partition({"partition": {"name": name, **values}}, {})
                except GpflError as error:
                    problems.append(error)
                else:
                    return
        if problems:
            raise problems[0]


def _find_source(settings: ConfigDict) -> DataSource:
    """Return the data source of [data]; a manifest names its own, and how the user's files were read."""
    file = settings.get("partition", {}).get("file")
    manifest = Path(file) if isinstance(file, str) else None
    default = manifest_data_name(manifest) if manifest and "name" not in settings.get("data", {}) else "digits"
    name = _name_in(settings, "data", default)
    if name == "arrays":
        raise GpflError("unknown data 'arrays'; it was given in Python: give it again there")
    recorded = manifest_data_options(manifest, name) if manifest else {}
    return find_dataset(name, {**recorded, **_without_name(settings.get("data", {}))})


def _resolve_net(settings: ConfigDict, defaults: Defaults, federation: Federation | None) -> Architecture:
    images = federation is not None and len(federation.table.shape) == 3
    name = _name_in(settings, "net", str(defaults.get("net", {}).get("name", "cnn4" if images else "mlp")))
    if name == CUSTOM:
        raise GpflError("this run used a net given in Python; give it again: gpfl.resume(folder, net=…) or gpfl.fit(…, net=…)")
    if name not in NETS:
        raise GpflError(f"unknown net '{name}'; {did_you_mean(name, NETS)}, or give it in Python: net=…")
    values = {**known_defaults(defaults, "net", name, NETS[name]), **_without_name(settings.get("net", {}))}
    check_option_owner("net", name, values, NETS)
    return options.build(NETS[name], values, "net")


def _resolve_partition(settings: ConfigDict, defaults: Defaults) -> Partition | None:
    """Return the partition of [partition], or None if it names a manifest."""
    name = _name_in(settings, "partition", str(defaults.get("partition", {}).get("name", "pathological")))
    values = _without_name(settings.get("partition", {}))
    if name == "manifest":
        if not isinstance(values.pop("file", None), str):
            raise GpflError("partition.name is 'manifest', so partition.file must name the file")
        if values:
            raise GpflError(f"partition.{next(iter(values))} cannot be set: partition.name is 'manifest', which fixes it")
        return None
    if name not in PARTITIONS:
        raise GpflError(f"unknown partition '{name}'; {did_you_mean(name, (*PARTITIONS, 'manifest'))}")
    values = {**known_defaults(defaults, "partition", name, PARTITIONS[name]), **values}
    check_option_owner("partition", name, values, PARTITIONS)
    return options.build(PARTITIONS[name], values, "partition")


def known_defaults(defaults: Defaults, section: str, name: str, record: type) -> dict[str, object]:
    """Return the data's defaults of a section that the named record has; of another record, only those of all partitions."""
    values = defaults.get(section, {})
    known = set(options.options_of(record))
    if name != values.get("name"):
        known &= options.options_of(Partition).keys()
    return {key: value for key, value in values.items() if key in known}


def _name_in(settings: ConfigDict, section: str, default: str) -> str:
    name = settings.get(section, {}).get("name", default)
    if not isinstance(name, str):
        raise GpflError(f"{section}.name is {name!r}; it must be text")
    return name


def _without_name(values: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in values.items() if key != "name"}
