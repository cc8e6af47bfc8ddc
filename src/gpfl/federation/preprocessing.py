"""The exchange of statistics before round 0, and the table that it encodes."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpfl.core.local_round import Indices
from gpfl.core.options import options_of
from gpfl.data.columns import RawColumns, Schema
from gpfl.data.preprocessing import ClientStatistics, PreprocessingOptions, Preprocessor, client_statistics, merge_statistics
from gpfl.data.table import Table


@dataclass(frozen=True)
class FederatedPreprocessing:
    """The fitted preprocessing of a federation."""

    options: PreprocessingOptions  # how columns are encoded
    statistics: Mapping[str, ClientStatistics]  # what each client sent, by name
    merged: ClientStatistics  # the merged statistics, which each client received
    federated: Preprocessor  # the encoding by merged statistics
    clients: Mapping[str, Preprocessor]  # the encoding of each client; the federated one, unless it is scaled locally

    @classmethod
    def fit(cls, raw: RawColumns, training: Mapping[str, Indices], options: PreprocessingOptions) -> "FederatedPreprocessing":
        """Return the preprocessing by the statistics of each client's training samples."""
        statistics = {name: client_statistics(raw, samples, options) for name, samples in training.items()}
        return cls.merge(raw.schema, statistics, options)

    @classmethod
    def merge(
        cls, schema: Schema, statistics: Mapping[str, ClientStatistics], options: PreprocessingOptions
    ) -> "FederatedPreprocessing":
        """Return the preprocessing by the statistics that clients sent."""
        merged = merge_statistics(list(statistics.values()))
        federated = Preprocessor.fit(schema, merged, options)
        local = options.scale == "local"
        clients = {name: federated.localize(sent, options) if local else federated for name, sent in statistics.items()}
        return cls(options, statistics, merged, federated, clients)

    @property
    def bytes_up(self) -> dict[str, int]:
        """Bytes that each client sent."""
        return {name: sent.n_bytes for name, sent in self.statistics.items()}

    @property
    def bytes_down(self) -> dict[str, int]:
        """Bytes that each client received."""
        return dict.fromkeys(self.statistics, self.merged.n_bytes)

    def encode(self, table: Table, samples: Mapping[str, Indices]) -> Table:
        """Return the table with the samples of each client encoded; samples of no client are zeros."""
        assert table.raw is not None
        x = np.zeros((len(table), len(self.federated.input_names)), dtype=np.float32)
        # One call for all clients with the same encoding: there may be many of them.
        groups = samples if self.options.scale == "local" else {"": np.concatenate(list(samples.values()))}
        for name, indices in groups.items():
            x[indices] = self.clients.get(name, self.federated).transform(table.raw.select(indices))
        return table.encode(x)

    def for_new_client(self, raw: RawColumns) -> Preprocessor:
        """Return the encoding for a client that did not take part, with these training samples."""
        if self.options.scale != "local":
            return self.federated
        if self.federated.schema.declared:
            raw, _ = raw.conform(self.federated.schema)
        return self.federated.localize(client_statistics(raw, np.arange(len(raw)), self.options), self.options)

    def describe(self) -> str:
        """Return a line on the exchange."""
        columns = sum(column.n_bytes > 0 for column in self.merged.columns.values())
        if not columns:
            return "Preprocessing: no statistics are exchanged."
        sent = f"statistics of {columns} of {len(self.federated.schema)} columns, at most {max(self.bytes_up.values()):,} bytes"
        return (
            f"Preprocessing: before round 0 each client sends {sent}, of its training samples, and receives the merged ones, "
            f"{self.merged.n_bytes:,} bytes."
        )

    def to_dict(self) -> dict[str, object]:
        """Return options, bytes, what was sent, and the fitted encodings, as JSON holds them."""
        options = {name: getattr(self.options, name) for name in options_of(PreprocessingOptions)}
        local = self.options.scale == "local"
        return {
            "options": options,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "sent": {name: sent.describe() for name, sent in self.statistics.items()},
            "statistics": {name: sent.to_dict() for name, sent in self.statistics.items()},
            "preprocessor": self.federated.to_dict(),
            "clients": {name: own.to_dict() for name, own in self.clients.items()} if local else {},
        }
