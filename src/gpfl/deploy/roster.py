"""The roster: what coordinator and sites agree on before round 0, so that all of them build the same run without any data."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gpfl.core.net import InputSpec
from gpfl.data.encoders import ImageFormat
from gpfl.data.preprocessing import ClientStatistics, PreprocessingOptions, Preprocessor, client_statistics
from gpfl.data.table import SPLITS, Table
from gpfl.engine import RunSpec
from gpfl.errors import GpflError
from gpfl.federation import Federation
from gpfl.federation.federation import Shard
from gpfl.federation.preprocessing import FederatedPreprocessing
from gpfl.training.config import Config, ConfigDict, resolve_config
from gpfl.training.prepare import prepare

PROBE_ROWS = 64
"""Number of placeholder rows per client that are not zeros: checks of a defence run the method on them."""
SECTIONS = ("run", "net", "train", "method", "defence")
"""Sections of a config that a roster holds; the data are described by its other entries."""


@dataclass(frozen=True)
class SiteData:
    """A site's own samples, which never leave it."""

    table: Table
    shard: Shard

    def statistics(self) -> ClientStatistics | None:
        """Return the statistics of the training samples that leave the site before round 0; None if columns need none."""
        raw = self.table.raw
        return None if raw is None else client_statistics(raw, self.shard.train, self.table.preprocessing)


@dataclass(frozen=True)
class Roster:
    """A run and its sites.

    Attributes:
        run: Name of the run.
        config: The config by section, complete but for the data.
        input_spec: Shape and kind of encoded samples.
        n_classes: Number of classes.
        class_names: Their names, in order; () if they are numbered.
        label: Name of the label.
        sites: Number of training, validation and test samples of each site, in the order of the clients.
        preprocessing: Options, merged statistics and encoding of columns, as JSON holds them; empty for other data.
        images: Format of images, as JSON holds it; empty for other data.
        mask_keys: Public key of each site for secure sums, in hexadecimal digits; empty if uploads are sent as they are.
        first: Digest of the roster with which the run began, if sites have joined since; else "".

    """

    run: str
    config: ConfigDict
    input_spec: InputSpec
    n_classes: int
    class_names: tuple[str, ...]
    label: str
    sites: Mapping[str, tuple[int, int, int]]
    preprocessing: Mapping[str, object] = dataclasses.field(default_factory=dict)
    images: Mapping[str, object] = dataclasses.field(default_factory=dict)
    mask_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    first: str = ""

    def to_json(self) -> str:
        """Return the content as text, the same for equal rosters."""
        content = dataclasses.asdict(self) | {"sites": list(self.sites.items())}  # a list keeps the order of the clients
        return json.dumps(content, sort_keys=True, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Roster":
        """Return the roster that `to_json` wrote. Raise if it is anything else."""
        try:
            content = json.loads(text)
            spec = content["input_spec"]
            spec["shape"] = tuple(spec["shape"])
            content["input_spec"] = InputSpec(**spec)
            content["class_names"] = tuple(content["class_names"])
            content["sites"] = {name: tuple(map(int, sizes)) for name, sizes in content["sites"]}
            return cls(**content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GpflError(f"this is not a roster of this version of gpfl (missing or wrong: {error})") from None

    @property
    def digest(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def origin(self) -> str:
        """Digest of the roster with which the run began, under which sites keep their private state."""
        return self.first or self.digest

    def join(self, site: str, sizes: tuple[int, int, int], mask_key: str) -> "Roster":
        """Return the roster after a site has joined: the last client. What was agreed on before round 0 stays as it is."""
        mask_keys = {**self.mask_keys, site: mask_key} if self.mask_keys else {}
        return dataclasses.replace(self, sites={**self.sites, site: sizes}, mask_keys=mask_keys, first=self.origin)

    def extends(self, earlier: "Roster") -> bool:
        """Return whether this is the earlier roster of the same run with further sites."""
        joined = earlier
        for site in list(self.sites)[len(earlier.sites) :]:
            joined = joined.join(site, self.sites[site], self.mask_keys.get(site, ""))
        return self == joined and list(self.sites) == list(joined.sites)

    def index(self, site: str) -> int:
        """Return the index of a site."""
        if site not in self.sites:
            raise GpflError(f"site '{site}' is not in the roster of run '{self.run}', which has {', '.join(self.sites)}")
        return list(self.sites).index(site)

    def prepare(self, federation: Federation) -> tuple[Config, RunSpec]:
        """Return the config and the run on a federation made by `federation`."""
        return prepare(resolve_config(self.config, federation=federation), federation)

    def federation(
        self, site: str = "", data: SiteData | None = None, statistics: Mapping[str, ClientStatistics] | None = None
    ) -> Federation:
        """Return the federation as one party sees it: sizes of all clients, samples of its own, placeholders for the others.

        Args:
            site: Name of the site; "" for the coordinator, which has no samples.
            data: The site's samples.
            statistics: The statistics that the party knows, by client; the coordinator knows those of all.

        """
        statistics = dict(statistics or {})
        if data is not None and (own := data.statistics()) is not None:
            statistics[site] = own
        preprocessing = self._preprocessing(statistics)
        encoded = None if data is None else self._encode(site, data, preprocessing)
        total = sum(sum(sizes) for sizes in self.sites.values())
        pattern = _pattern(self.input_spec)
        dtype = pattern.dtype if encoded is None else encoded.x.dtype
        # NumPy's zeros take no memory until they are written.
        x = torch.from_numpy(np.zeros((total, *self.input_spec.shape), torch.empty(0, dtype=dtype).numpy().dtype))
        y = torch.from_numpy(np.zeros(total, np.int64))
        shards, start = [], 0
        for name, sizes in self.sites.items():
            ends = np.cumsum([start, *sizes]).tolist()
            shards.append(Shard(name, *(np.arange(a, b) for a, b in itertools.pairwise(ends))))
            if data is not None and encoded is not None and name == site:
                own_rows = torch.from_numpy(data.shard.samples)
                x[start : ends[-1]], y[start : ends[-1]] = encoded.x[own_rows], encoded.y[own_rows]
            else:
                rows = min(PROBE_ROWS, sizes[0])
                x[start : start + rows] = pattern[:rows].to(dtype)
                y[start : start + rows] = torch.arange(rows) % self.n_classes
            start = ends[-1]
        return Federation(self._table().with_tensors(x, y), shards, {"name": "deployment"}, preprocessing)

    def _table(self) -> Table:
        """Return a table of one row that describes the samples."""
        spec = self.input_spec
        metadata = {"classes": list(self.class_names)} if self.class_names else {}
        table = Table(
            _pattern(spec)[:1],
            np.zeros(1, np.int64),
            classes=self.n_classes,
            name="deployment",
            kind=spec.kind,
            pixel_max=spec.pixel_max or 255,
            vocabulary=spec.vocabulary,
            metadata={**metadata, **({"label": self.label} if self.label else {})},
        )
        table.encoder = ImageFormat.from_dict(self.images) if self.images else None
        return table

    def _preprocessing(self, statistics: Mapping[str, ClientStatistics]) -> FederatedPreprocessing | None:
        if not self.preprocessing:
            return None
        values, merged, fitted = (
            cast(Mapping[str, object], self.preprocessing[key]) for key in ("options", "statistics", "preprocessor")
        )
        options = PreprocessingOptions(**values)  # type: ignore[arg-type]
        federated = Preprocessor.from_dict(fitted)
        local = options.scale == "local"
        encoders = {name: federated.localize(own, options) if local else federated for name, own in statistics.items()}
        return FederatedPreprocessing(options, statistics, ClientStatistics.from_dict(merged), federated, encoders)

    def _encode(self, site: str, data: SiteData, preprocessing: FederatedPreprocessing | None) -> Table:
        """Return a site's samples as inputs of the net. Raise if they are not those of the roster."""
        table, shard = data.table, data.shard
        sizes = tuple(len(shard.split(split)) for split in SPLITS)
        if sizes != self.sites[site]:
            raise GpflError(
                f"site '{site}' has {_describe_sizes(sizes)}, but the roster of run '{self.run}' says "
                f"{_describe_sizes(self.sites[site])}: restore the data, or start a new run"
            )
        if preprocessing is not None:
            table = preprocessing.encode(table, {site: shard.samples})
        if table.input_spec != self.input_spec:
            raise GpflError(f"site '{site}' has samples of {table.input_spec}; those of the run are {self.input_spec}")
        if table.classes != self.n_classes or table.class_names != self.class_names:
            raise GpflError(f"site '{site}' numbers its classes differently from run '{self.run}': check its data again")
        return table


def make_roster(
    run: str,
    config: Config,
    table: Table,
    sites: Mapping[str, tuple[int, int, int]],
    preprocessing: FederatedPreprocessing | None,
) -> Roster:
    """Return the roster of a run whose samples are like those of `table`, encoded. `config` is complete."""
    if config.net is None:
        raise GpflError("the net was given in Python, which other sites cannot build: give the name of a net")
    sections: ConfigDict = {key: dict(values) for key, values in config.sections().items() if key in SECTIONS}
    sections["run"] |= {"engine": "loop", "device": "auto"}
    if config.run.metric != "accuracy":
        raise GpflError(
            f"run.metric is '{config.run.metric}', which needs predictions of samples; they stay at the sites: use accuracy"
        )
    content = {}
    if preprocessing is not None:
        values = preprocessing.to_dict()
        content = {
            "options": values["options"],
            "statistics": preprocessing.merged.to_dict(),
            "preprocessor": values["preprocessor"],
        }
    return Roster(
        run,
        sections,
        table.input_spec,
        table.classes,
        table.class_names,
        str(table.metadata.get("label", "")),
        dict(sites),
        content,
        table.encoder.to_dict() if isinstance(table.encoder, ImageFormat) else {},
    )


def _pattern(spec: InputSpec) -> Tensor:
    """Return placeholder rows in the type that a table stores."""
    numbers = torch.arange(PROBE_ROWS * int(np.prod(spec.shape))).reshape(PROBE_ROWS, *spec.shape)
    if spec.kind == "floats":
        return torch.sin(numbers + 1.0)
    limit = {"pixels": spec.pixel_max + 1, "tokens": max(1, spec.vocabulary)}.get(spec.kind, 10)
    return (numbers % limit).to(torch.uint8 if spec.kind == "pixels" else torch.int32)


def _describe_sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in zip(SPLITS, sizes, strict=True)) + " samples"
