"""An archive of finished runs in one compressed file, from which tables and figures are drawn without the run folders.

A line of the archive is one folder of trials as JSON. Metrics are stored by column, rounded to six digits. Accuracies of
single clients are kept for the best, the selected and the last round. Models and checkpoints are left out.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpfl.errors import GpflError
from gpfl.io.legacy import read_version
from gpfl.training.run_dir import MetricsRecord

ARCHIVE = "runs.jsonl.xz"  # name of the archive in a folder of results, in place of the folder `runs`

Content = dict[str, Any]  # a folder of trials, or a run of one, as stored


def read(archive: Path) -> Iterator[Content]:
    """Yield the folders of trials in an archive. Raise if it is damaged or of a newer version."""
    try:
        lines = lzma.decompress(archive.read_bytes()).decode().splitlines()
        for line in lines:
            entry = json.loads(line)
            read_version(entry, archive)
            yield entry
    except (OSError, ValueError, lzma.LZMAError) as problem:
        raise GpflError(f"{archive} cannot be read ({problem}): put a good copy in its place") from None


def unpack_metrics(metrics: Mapping[str, Any]) -> list[MetricsRecord]:
    """Return the records of evaluated rounds."""
    columns, sparse = metrics["columns"], metrics["sparse"]
    records: list[Content] = [{} for _ in columns["round"]]
    for key, values in (*columns.items(), *sparse.items()):
        section, _, name = key.rpartition(".")
        for index, value in values.items() if isinstance(values, dict) else enumerate(values):
            record = records[int(index)]
            if value is not None:
                (record.setdefault(section, {}) if section else record)[name] = value
    return records
