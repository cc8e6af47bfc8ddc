"""The data card: what sites agree on before a run, so that all of them read their files in the same way."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from gpfl.core import options
from gpfl.core.net import InputSpec
from gpfl.data.columns import Schema
from gpfl.data.encoders import ImageFormat
from gpfl.data.files import FileDataset
from gpfl.data.files.raw_table import as_text
from gpfl.data.files.roles import encode_names
from gpfl.data.preprocessing import ClientStatistics, PreprocessingOptions
from gpfl.data.table import Table
from gpfl.defences.aggregation import MIN_COHORT
from gpfl.deploy.messages import Description
from gpfl.deploy.roster import SECTIONS, Roster, SiteData
from gpfl.errors import GpflError, pluralize
from gpfl.federation.federation import Shard, check_nonempty
from gpfl.federation.partition import Natural
from gpfl.federation.preprocessing import FederatedPreprocessing
from gpfl.io import toml
from gpfl.training.config import ConfigDict

SCHEMA = "schema.toml"
"""File at the site with the columns of the card, named in errors about the site's files."""
MIN_CLASSES = 2


@dataclass(frozen=True)
class DataCard:
    """What coordinator and sites agree on before a run.

    Attributes:
        run: Name of the run.
        sites: Names of the sites, in the order of the clients.
        classes: Names of the classes, in order.
        config: The config by section, without the data.
        reading: How files are read: options of [data] in a config.
        split: How a site divides its rows: options of the partition 'natural'.
        columns: Columns as `Schema.to_dict` describes them; empty for arrays and images.
        samples: Shape and kind of samples that are not columns; empty for columns.

    """

    run: str
    sites: tuple[str, ...]
    classes: tuple[str, ...]
    config: ConfigDict
    reading: Mapping[str, object] = field(default_factory=dict)
    split: Mapping[str, object] = field(default_factory=dict)
    columns: Mapping[str, object] = field(default_factory=dict)
    samples: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def make(
        cls, run: str, sites: Sequence[str], config: ConfigDict, example: Table | None = None, *, secure_sum: bool = False
    ) -> "DataCard":
        """Return the card of a config.

        Its section [data] has a schema, which declares columns and classes, or names an example of arrays or images, unless
        one is given. The section [partition] says how each site divides its rows. `secure_sum` sets train.secure_sum.
        """
        reading, split = dict(config.get("data", {})), dict(config.get("partition", {}))
        path, schema = str(reading.pop("name", "")), str(reading.pop("schema", ""))
        if split.pop("name", Natural.name) != Natural.name or "clients" in split:
            raise GpflError("each site is a client: leave partition.name and partition.clients out")
        if config.get("method", {}).get("valve_upload") == "factors":
            raise GpflError("method.valve_upload is 'factors', which cannot be averaged: leave it out, or set it to 'low_rank'")
        split = dict(options.config_values(options.build(Natural, split, "partition")))
        columns: Mapping[str, object] = {}
        samples: Mapping[str, object] = {}
        if schema:
            declared = Schema.read(Path(schema))
            classes, columns = declared.classes, declared.to_dict()
        elif path or example is not None:
            table = example or FileDataset(name=path, description="", path=Path(path), **reading).load()  # type: ignore[arg-type]
            if table.raw is not None:
                raise GpflError(
                    f"{path} holds columns: agree on them with gpfl data show --data {path} --write-schema schema.toml, and "
                    "set data.schema"
                )
            images = table.encoder.to_dict() if isinstance(table.encoder, ImageFormat) else {}
            classes, samples = table.class_names, {**asdict(table.input_spec), "images": images}
        else:
            raise GpflError("the config has neither data.schema nor data.name: name a schema, or an example of the samples")
        if len(classes) < MIN_CLASSES:
            raise GpflError(f"{schema} declares {pluralize(len(classes), 'class')}: list the label and all of its classes")
        if len(set(sites)) != len(sites) or not sites:
            raise GpflError(f"the sites are {', '.join(sites) or 'none'}; give each a name of its own")
        sections = {key: dict(values) for key, values in config.items() if key in SECTIONS}
        if secure_sum:
            sections["train"] = {**sections.get("train", {}), "secure_sum": True}
        sections["run"] = {**sections.get("run", {}), "engine": "loop", "device": "auto"}
        _, names = encode_names(as_text(list(sites)))  # in the order of `gpfl run` on a folder with the files of all sites
        card = cls(run, tuple(names), tuple(classes), sections, reading, split, columns, samples)
        if card.secure_sum and len(sites) < MIN_COHORT:
            raise GpflError(f"a secure sum needs {MIN_COHORT} sites; there are {len(sites)}")
        return card

    @property
    def secure_sum(self) -> bool:
        """Whether the coordinator learns only the sum of uploads."""
        return bool(self.config.get("train", {}).get("secure_sum", False))

    def to_toml(self) -> str:
        """Return the content as a TOML document."""
        return toml.dump(_as_toml(self))

    @classmethod
    def from_toml(cls, path: Path) -> "DataCard":
        """Return the card of a file. Raise if it is none."""
        content = toml.read(path)
        try:
            for key in ("sites", "classes"):
                content[key] = tuple(map(str, cast(list[object], content[key])))
            return cls(**content)  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise GpflError(f"{path} is not a data card of this version of gpfl ({error}): ask for it again") from None

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(json.dumps(_as_toml(self), sort_keys=True).encode()).hexdigest()

    def read(self, site: str, path: Path, folder: Path) -> SiteData:
        """Return a site's samples. Raise, in terms of the site's files, if they do not fit the card.

        Args:
            site: Name of the site.
            path: Its file or folder of files.
            folder: Folder for the schema, which errors name.

        """
        if site not in self.sites:
            raise GpflError(f"site '{site}' is not on the data card of run '{self.run}', which has {', '.join(self.sites)}")
        reading = dict(self.reading)
        if self.columns:
            schema = Schema.from_dict(self.columns)
            schema.write(folder / SCHEMA)
            reading["schema"] = str(folder / SCHEMA)
        source = FileDataset(name=site, description="", path=path, classes=() if self.columns else self.classes, **reading)  # type: ignore[arg-type]
        table = source.load()
        if table.class_names != self.classes:
            raise GpflError(f"{path} has the classes {', '.join(table.class_names)}; the card says {', '.join(self.classes)}")
        if self.samples and (expected := self._input_spec()) != table.input_spec:
            raise GpflError(
                f"{path} has samples of shape {table.shape} ({table.input_spec.kind}); the data card of run '{self.run}' says "
                f"{expected.shape} ({expected.kind}): convert them"
            )
        rows = np.arange(len(table))
        shard = Shard(site, *self._partition().split(table, rows, self.sites.index(site)))
        check_nonempty([shard], "add rows")
        return SiteData(table, shard)

    def roster(self, descriptions: Mapping[str, Description]) -> Roster:
        """Return the roster with which the run begins, from what its sites say of their samples."""
        sites = [site for site in self.sites if site in descriptions]
        sizes = {site: descriptions[site].sizes for site in sites}
        preprocessing: dict[str, object] = {}
        spec, images = self._input_spec() if self.samples else InputSpec((0,)), {}
        if self.columns:
            names = options.options_of(PreprocessingOptions)
            chosen = {key: value for key, value in self.reading.items() if key in names}
            statistics = {site: ClientStatistics.from_dict(descriptions[site].statistics) for site in sites}
            fitted = FederatedPreprocessing.merge(
                Schema.from_dict(self.columns), statistics, options.build(PreprocessingOptions, chosen, "data")
            )
            content = fitted.to_dict()
            preprocessing = {key: content[key] for key in ("options", "preprocessor")}
            preprocessing["statistics"] = fitted.merged.to_dict()
            spec = InputSpec((len(fitted.federated.input_names),))
        else:
            images = cast(dict[str, object], self.samples["images"])
        label = str(self.columns.get("label", self.reading.get("label", "")))
        masks = {site: descriptions[site].mask_key for site in sites} if self.secure_sum else {}
        return Roster(self.run, self.config, spec, len(self.classes), self.classes, label, sizes, preprocessing, images, masks)

    def check_roster(self, roster: Roster, site: str, description: Description) -> None:
        """Raise if a roster is not the one of the card and of what a site said of its samples."""
        label = str(self.columns.get("label", self.reading.get("label", "")))
        agreed = (self.run, self.config, self.classes, label, description.sizes)
        found = (roster.run, roster.config, roster.class_names, roster.label, roster.sites.get(site))
        for name, own, other in zip(("run", "config", "classes", "label", "number of samples"), agreed, found, strict=True):
            if own != other:
                raise GpflError(f"the roster has another {name} than the data card of run '{self.run}': ask the coordinator")
        if unknown := roster.sites.keys() - set(self.sites):
            raise GpflError(f"the roster has sites that are not on the data card of run '{self.run}': {', '.join(unknown)}")
        own_key = description.mask_key if self.secure_sum else ""
        if roster.mask_keys.get(site, "") != own_key or len(set(roster.mask_keys.values())) != len(roster.mask_keys):
            raise GpflError(f"the roster has other mask keys than those of run '{self.run}': ask the coordinator")

    def _partition(self) -> Natural:
        return options.build(Natural, dict(self.split), "partition")

    def _input_spec(self) -> InputSpec:
        values = {key: value for key, value in self.samples.items() if key != "images"}
        return InputSpec(**{**values, "shape": tuple(cast(list[int], values["shape"]))})  # type: ignore[arg-type]


def describe_site(data: SiteData, mask_key: str = "") -> Description:
    """Return what a site says of its samples before a run."""
    statistics = data.statistics()
    sizes = (len(data.shard.train), len(data.shard.validation), len(data.shard.test))
    return Description(sizes=sizes, statistics={} if statistics is None else statistics.to_dict(), mask_key=mask_key)


def _as_toml(card: DataCard) -> dict[str, object]:
    """Return the content as TOML reads it back: with lists in place of tuples."""
    return cast(dict[str, object], json.loads(json.dumps(asdict(card))))
