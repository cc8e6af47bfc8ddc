"""Takes runs of `gpfl reproduce` into this folder, without what is large: python docs/results/record.py OUT.

Run folders stay run folders, so that `gpfl reproduce … --only-tables --out docs/results` makes the tables of them: config,
summary and metrics of every seed. Metrics lose what no table or figure needs, which is most of them: the accuracies of single
clients but in the best, the selected and the last round, and digits beyond the sixth. Of the division, its split and the digest
of its rows stay, by which runs on one division are told from others.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DIGITS = 6


def main() -> None:
    out = Path(sys.argv[1])
    for cell in sorted(path.parent for path in out.glob("runs/*/config.toml")):
        seeds = [folder for folder in sorted(cell.glob("seed-*")) if (folder / "summary.json").exists()]
        if seeds:
            record(cell, seeds)
            print(f"{cell.name}: {', '.join(seed.name for seed in seeds)}")


def record(cell: Path, seeds: list[Path]) -> None:
    to = HERE / "runs" / cell.name
    to.mkdir(parents=True, exist_ok=True)
    for name in ("config.toml", "trials.json"):
        shutil.copyfile(cell / name, to / name)
    for note in cell.glob("made-*.json"):
        held = json.loads(note.read_text())
        (to / note.name).write_text(json.dumps({**held, "command": elsewhere(held["command"])}, indent=2) + "\n")
    for seed in seeds:
        (to / seed.name).mkdir(exist_ok=True)
        for name in ("config.toml", "summary.json"):
            shutil.copyfile(seed / name, to / seed.name / name)
        (to / seed.name / "federation.toml").write_text(digest((seed / "federation.toml").read_text()))
        summary = json.loads((seed / "summary.json").read_text())
        lines = [json.loads(line) for line in (seed / "metrics.jsonl").read_text().splitlines()]
        kept = {summary["best_round"], summary["selected_round"], lines[-1]["round"]}
        thinned = [json.dumps(thin(line, line["round"] in kept), separators=(",", ":")) for line in lines]
        (to / seed.name / "metrics.jsonl").write_text("\n".join(thinned) + "\n")


def digest(manifest: str) -> str:
    """A manifest that has instead of its clients' rows their digest."""
    head, _, rest = manifest.partition("[[client]]")
    rows, mark, source = rest.partition("[source]")
    return f'{head}[client]\nsha256 = "{hashlib.sha256(rows.encode()).hexdigest()}"\n{chr(10) * bool(mark)}{mark}{source}'


def elsewhere(command: str) -> str:
    """The command with its folder's name alone: where it lay on that machine says nothing."""
    words = command.split()
    return " ".join(Path(word).name if before == "--out" else word for before, word in zip(["", *words], words, strict=False))


def thin(line: dict[str, Any], whole: bool) -> dict[str, Any]:
    wanted = {key: value for key, value in line.items() if whole or key != "clients"}
    return {key: short(value) for key, value in wanted.items()}


def short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: short(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [short(entry) for entry in value]
    return round(value, DIGITS) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
