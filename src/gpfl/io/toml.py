"""Read TOML with the standard library, and write the kinds of value that configs and manifests hold."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from gpfl.errors import GpflError


def read(path: Path) -> dict[str, object]:
    """Return the content of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GpflError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise GpflError(f"{path} is not a TOML file ({error}): fix it, or replace it with a good copy") from None


def parse_value(text: str) -> object:
    """Return one value as TOML reads it, or the text itself if it is not a TOML value."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def dump(content: Mapping[str, object], prefix: str = "") -> str:
    """Return the text of a TOML document."""
    lines, sections = [], []
    for key, value in content.items():
        if isinstance(value, Mapping):
            sections += ["", f"[{prefix}{key}]", dump(value, f"{prefix}{key}.").rstrip()]
        elif isinstance(value, (list, tuple)) and value and all(isinstance(entry, Mapping) for entry in value):
            for entry in value:
                sections += ["", f"[[{prefix}{key}]]", dump(entry, f"{prefix}{key}.").rstrip()]
        else:
            name = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else format_value(key)
            lines.append(f"{name} = {format_value(value)}")
    return "\n".join([*lines, *sections]).lstrip("\n") + "\n"


def format_value(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, float):
        return repr(float(value))  # NumPy's floats have another repr
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(format_value(entry) for entry in value) + "]"
    raise TypeError(f"a TOML value cannot be {type(value).__name__}")
