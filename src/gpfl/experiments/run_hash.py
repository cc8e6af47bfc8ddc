"""Runs by their content: what a folder of trials is called, and how one is found whatever it is called."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from contextlib import suppress
from pathlib import Path

from gpfl.experiments.run_checks import UNCOMPARED, Sections, find_folder_damage
from gpfl.federation import MANIFEST
from gpfl.models.custom import net_name
from gpfl.training import config as configs
from gpfl.training.config import Config


def folder_name(config: Config, sections: Sections, data: str) -> str:
    """Gives the name of a folder of trials: readable words, and a digest of what they are."""
    return f"{readable(config)}-{digest(sections, data)}"


def digest(sections: Sections, data: str) -> str:
    """Gives eight hex digits of a complete config, but for what changes no number, and of the data's own digest."""
    kept = {
        section: {key: value for key, value in values.items() if (section, key) not in UNCOMPARED}
        for section, values in sections.items()
    }
    return hashlib.sha256(json.dumps([kept, data], sort_keys=True).encode()).hexdigest()[:8]


def readable(config: Config) -> str:
    """Gives the words of a folder's name: data, partition, net and method."""
    partition = config.partition
    clients = f"-{partition.clients}" if partition and partition.clients else ""
    of = f"of{partition.total_clients}" if partition and partition.total_clients else ""
    without = "".join(f"-without-{part}" for part in getattr(config.method, "without", ()))
    net = net_name(config.net) if config.net else configs.CUSTOM
    return f"{config.data}-{partition.name if partition else 'manifest'}{clients}{of}-{net}-{config.method.name}{without}"


def held_configs(out: Path) -> dict[Path, Sections]:
    """Gives the complete configs of the folders of trials in `out`; damaged ones are left out."""
    folders = sorted(path.parent for path in out.glob("runs/*/config.toml"))
    return {folder: configs.read_sections(folder / "config.toml") for folder in folders if not find_folder_damage(folder)}


def named_by_content(named: Path, sections: Sections, folder: Path) -> bool:
    """Tells whether one folder has the name that the content of another gives."""
    return named.name.endswith(f"-{digest(sections, data_digest(folder))}")


def data_digest(folder: Path) -> str:
    """Gives the digest of the rows that trials were run on; "" where their folder does not tell it."""
    for path in (folder / MANIFEST, *sorted(folder.glob(f"seed-*/{MANIFEST}"))):
        with suppress(OSError, ValueError, KeyError):
            # Row numbers of clients are long and follow these sections.
            head = re.split(r"\n\[(?:partition|split)\]", path.read_text(encoding="utf-8"), maxsplit=1)[0]
            return str(tomllib.loads(head)["table"]["sha256"])
    return ""
