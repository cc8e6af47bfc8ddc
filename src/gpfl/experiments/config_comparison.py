"""Compare and merge configs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from gpfl.training.config import ConfigDict

Sections = Mapping[str, Mapping[str, object]]  # a complete config by section and key

UNCOMPARED = (*(("run", key) for key in ("seed", "engine", "device", "compile", "checkpoint_every")), ("partition", "file"))
"""Settings that do not change results, or in which the trials of one config differ."""


def first_difference(old: Sections, new: Sections) -> tuple[str, str, str] | None:
    """Return the first setting in which two configs differ, with both values, or None. Settings in `UNCOMPARED` may differ."""
    for section in {**new, **old}:
        old_values, new_values = old.get(section, {}), new.get(section, {})
        for key in {**new_values, **old_values}:
            before, after = (repr(values[key]) if key in values else "its default" for values in (old_values, new_values))
            if before != after and (section, key) not in UNCOMPARED:
                return f"{section}.{key}", before, after
    return None


def merge_configs(*layers: Sections) -> ConfigDict:
    """Return the sections of several configs in one. Later configs override earlier ones."""
    return {name: {key: value for layer in layers for key, value in layer.get(name, {}).items()} for name in chain(*layers)}
