"""Format version of the files that gpfl writes, and the names of version 1.

Files of version 1 carry no version. Their content is upgraded when it is read; the files do not change.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from gpfl.errors import GpflError

T = TypeVar("T")

FORMAT_VERSION = 2  # version of configs, manifests, summaries, checkpoints and models

SECTIONS = {"split": "partition", "made": "result"}

CONFIG_KEYS: Mapping[str, Mapping[str, str]] = {
    "partition": {
        "of": "total_clients",
        "test": "test_fraction",
        "validation": "validation_fraction",
        "draws": "rng",
        "min_rows": "min_samples",
    },
    "train": {"join": "client_fraction"},
    "data": {"part": "split_column", "together": "group"},
    "method": {"own_epochs": "personal_epochs"},
}

CONFIG_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("partition", "rng"): {"own": "gpfl", "reference": "pfllib"},
    ("data", "missing"): {"refuse": "error"},
    ("data", "scale"): {"standard": "federated"},
}

STATE_BRANCHES = {
    "stats": "batch_norm_stats",
    "own": "personal",
    "own_head": "personal_head",
    "stale": "local_gce",
    "before": "previous_gce",
}
"""Branches of shared and private state and of models."""

RECORD_KEYS: Mapping[str, Mapping[str, str]] = {
    "metrics": {"joined": "participants", "clients": "client_accuracies", "validation": "validation_accuracy"},
    "summary": {"rows_needed": "min_samples"},
    "model": {"form": "input_spec", "probe": "probe_logits"},
    "input_spec": {"white": "pixel_max"},
}
"""Keys of the lines of metrics.jsonl, of summary.json and of models."""


def read_version(content: Mapping[str, object], path: Path) -> int:
    """Return the format version of a file's content. Raise if this gpfl is too old to read it."""
    version = content.get("format_version", 1)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise GpflError(f"{path} has format_version {version!r}; it must be an integer from 1 to {FORMAT_VERSION}")
    if version > FORMAT_VERSION:
        raise GpflError(
            f"{path} has format_version {version}; this gpfl reads versions up to {FORMAT_VERSION}: install a newer gpfl"
        )
    return version


def upgrade_section(section: str, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a config section under the current keys."""
    upgraded = _rename(values, CONFIG_KEYS.get(section, {}))
    for key, value in upgraded.items():
        if isinstance(value, str):
            upgraded[key] = CONFIG_VALUES.get((section, key), {}).get(value, value)
    return upgraded


def upgrade_config(content: Mapping[str, object]) -> dict[str, object]:
    """Return a config with the current sections, keys and values."""
    return {
        section: upgrade_section(section, values) if isinstance(values, Mapping) else values
        for section, values in _rename(content, SECTIONS).items()
    }


def upgrade_manifest(content: Mapping[str, object]) -> dict[str, object]:
    """Return a federation's manifest with the current keys."""
    upgraded = upgrade_config(content)
    partition, source = upgraded.get("partition"), upgraded.get("source")
    if isinstance(partition, dict) and "split" in partition:
        upgraded["partition"] = _rename(partition, {"split": "name"})
    if isinstance(source, dict):
        upgraded["source"] = upgrade_section("data", source)
    return upgraded


def upgrade_record(kind: str, record: Mapping[str, object]) -> dict[str, object]:
    """Return a record with the current keys of its kind; lines of metrics.jsonl carry no version."""
    upgraded = _rename(record, RECORD_KEYS[kind])
    return _add_reported_numbers(upgraded) if kind == "summary" else upgraded


def _add_reported_numbers(summary: Mapping[str, object]) -> dict[str, object]:
    """Return a summary with the numbers of the reported round, if it is the best or the last one."""
    if summary.get("selected_round") == summary.get("best_round"):
        reported = {"selected_accuracy": "best_accuracy", "selected_std": "std", "selected_cov": "cov"}
    else:
        reported = {"selected_accuracy": "last_accuracy"} if summary.get("selected_round") == summary.get("rounds") else {}
    return {**{key: summary[old] for key, old in reported.items() if old in summary}, "metric": "accuracy", **summary}


def list_client_accuracies(record: Mapping[str, object]) -> list[float] | None:
    """Return a record's accuracies in the order of the manifest; earlier versions wrote them without the clients' names."""
    content = record.get("client_accuracies")
    values = list(content.values()) if isinstance(content, Mapping) else content
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
        return None
    return values


def upgrade_metadata(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the metadata of a file of tensors with the current keys."""
    upgraded = upgrade_record("model", metadata)
    method, spec, branches = (upgraded.get(key) for key in ("method", "input_spec", "branches"))
    if isinstance(method, dict) and isinstance(spec, dict) and isinstance(branches, list):
        upgraded["method"] = upgrade_section("method", method)
        upgraded["input_spec"] = upgrade_record("input_spec", spec)
        upgraded["branches"] = [STATE_BRANCHES.get(branch, branch) for branch in branches]
    return upgraded


def upgrade_tensors(flat: Mapping[str, T]) -> dict[str, T]:
    """Return tensors under the current names of branches."""
    return {
        "/".join([*(STATE_BRANCHES.get(branch, branch) for branch in branches), name]): tensor
        for path, tensor in flat.items()
        for *branches, name in [path.split("/")]
    }


def _rename(values: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    return {names.get(key, key): value for key, value in values.items()}
