"""TOML: read with the standard library, written here for the few kinds of value that configs and manifests hold."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from gpfl.errors import GpflError


def read(path: Path) -> dict[str, object]:
    """Gives the content of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise GpflError(f"cannot read {path}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise GpflError(f"{path} is not a TOML file ({problem}): mend it, or put a good copy in its place") from None


def parse_value(text: str) -> object:
    """Gives one value as TOML reads it; what is not TOML is taken as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def dump(content: Mapping[str, object], prefix: str = "") -> str:
    """Gives the text of a TOML document: plain values first, then sections, then lists of sections."""
    plain = {key: value for key, value in content.items() if not is_section(value) and not is_sections(value)}
    lines = [f"{key_text(key)} = {value_text(value)}" for key, value in plain.items()]
    for key, value in content.items():
        if is_section(value):
            lines += ["", f"[{prefix}{key}]", dump(value, f"{prefix}{key}.").rstrip()]  # type: ignore[arg-type]
        elif is_sections(value):
            for entry in value:  # type: ignore[attr-defined]
                lines += ["", f"[[{prefix}{key}]]", dump(entry, f"{prefix}{key}.").rstrip()]
    return "\n".join(lines).lstrip("\n") + "\n"


def is_section(value: object) -> bool:
    """Tells whether the value becomes a [section]."""
    return isinstance(value, Mapping)


def is_sections(value: object) -> bool:
    """Tells whether the value becomes a list of [[sections]]."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(entry, Mapping) for entry in value)


def key_text(key: str) -> str:
    """Gives a key as TOML writes it: bare where it may be, else quoted."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else value_text(key)


def value_text(value: object) -> str:
    """Gives a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, float):
        return repr(float(value))  # numpy's floats are floats too, with another repr
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(value_text(entry) for entry in value) + "]"
    raise TypeError(f"a TOML value cannot be {type(value).__name__}")
