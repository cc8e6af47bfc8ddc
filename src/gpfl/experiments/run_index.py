"""Stored trials of a folder of results, and their names, which end in a hash of the config and the data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gpfl.experiments.run_archive import ARCHIVE, read_trials
from gpfl.experiments.run_checks import UNCOMPARED, Sections, find_folder_damage
from gpfl.experiments.stored_runs import FolderTrials, StoredTrials
from gpfl.models.custom import net_name
from gpfl.training import config as configs
from gpfl.training.config import Config


def config_hash(config: Sections, data_hash: str) -> str:
    """Return eight hex digits of a complete config without the settings in `UNCOMPARED`, and of the data's hash."""
    compared = {
        section: {key: value for key, value in values.items() if (section, key) not in UNCOMPARED}
        for section, values in config.items()
    }
    return hashlib.sha256(json.dumps([compared, data_hash], sort_keys=True).encode()).hexdigest()[:8]


def folder_name(config: Config, hash_: str) -> str:
    """Return the name of a folder of trials: data, partition, net, method and hash."""
    partition = config.partition
    clients = f"-{partition.clients}" if partition and partition.clients else ""
    total = f"of{partition.total_clients}" if partition and partition.total_clients else ""
    without = "".join(f"-without-{part}" for part in getattr(config.method, "without", ()))
    net = net_name(config.net) if config.net else configs.CUSTOM
    partition_name = partition.name if partition else "manifest"
    return f"{config.data}-{partition_name}{clients}{total}-{net}-{config.method.name}{without}-{hash_}"


def read_stored_trials(out: Path) -> list[StoredTrials]:
    """Return all undamaged trials of a folder of results: its run folders or, if it has none, its archive."""
    if (out / ARCHIVE).exists() and not (out / "runs").exists():
        return [*read_trials(out / ARCHIVE)]
    folders = sorted(path.parent for path in out.glob("runs/*/config.toml"))
    return [FolderTrials(folder) for folder in folders if not find_folder_damage(folder)]


def is_named_by_hash(trials: StoredTrials) -> bool:
    """Return whether the name of trials ends in their hash, so that they are no copy."""
    return trials.path.name.endswith(f"-{config_hash(trials.config, trials.data_hash)}")
