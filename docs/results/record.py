"""Takes runs of `gpfl reproduce` and the studies of `gpfl privacy` into this folder: python docs/results/record.py OUT.

What is large stays out.

Run folders stay run folders, so that `gpfl reproduce … --only-tables --out docs/results` makes the tables of them: config,
summary and metrics of every seed. Metrics lose what no table or figure needs, which is most of them: the accuracies of single
clients but in the best, the selected and the last round, and digits beyond the sixth. Of a trial that diverged, the round and
the curve until then stay. Of the division, its split and the digest of its rows stay, by which runs on one division are told
from others.

Of features, which need weights to be made, what was made stays: the points of t-SNE with their classes and clients, silhouettes
and purities, which `gpfl reproduce features` keeps in features.json beside each run, and the folder features with its pictures.
So `gpfl reproduce features … --only-tables --out docs/results` makes table and pictures again, without weights and data. Draw
them (no --no-figures) where the weights are, before this. Points show no image of the data.

Searches of `gpfl tune` whose values a table was run with, in the folder tuned, stay as they are.

Of the nine columns the numbers of every image that their tables need stay, and the page without pictures: they show images of
the data, which are not ours to publish. Curves of defences and the table of labels and members are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from gpfl.experiments import maps
from gpfl.experiments.privacy_table import read_table
from gpfl.experiments.stored_runs import PROVENANCE_FILE
from gpfl.experiments.trials import read_trials_plan, summarize_trials
from gpfl.privacy.attack_runner import AttackCase, records_to_json
from gpfl.report.privacy_tables import privacy_page
from gpfl.training.run_dir import DIVERGED

HERE = Path(__file__).parent
DIGITS = 6
MEASURES = ("either_psnr", "either_start_psnr", "either_mean_psnr", "either_ssim", "psnr", "ssim", "turned", "reference_start")
NUMBERS = ("column", "best_round", *(field.name for field in fields(AttackCase)), "client", "label", *MEASURES)
"""What is kept of an image."""


def main() -> None:
    out = Path(sys.argv[1])
    for cell in sorted(path.parent for path in out.glob("runs/*/config.toml")):
        seeds = [folder for folder in sorted(cell.glob("seed-*")) if (folder / "summary.json").exists()]
        if seeds:
            record(cell, seeds)
            record_diverged(cell)
            features = [seed.name for seed in seeds if maps.read_map(seed)]
            also = f"; features of {', '.join(features)}" if features else ""
            print(f"{cell.name}: {', '.join(seed.name for seed in seeds)}{also}")
    if any((out / "features").glob("*.json")):
        copy(out / "features", HERE / "features", (".json", ".png", ".pdf"))
        print("features: the pictures")
    if (out / "tuned").is_dir():
        for path in (found for found in (out / "tuned").rglob("*") if found.is_file()):
            to = HERE / path.relative_to(out)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(elsewhere(path.read_text()))
        print("tuned: the searches")
    if (out / "privacy" / "results.json").exists():
        record_columns(out / "privacy")
        print("privacy: the nine columns")
    if (out / "leaks" / "results.json").exists():
        record_page(out / "leaks")
        print("leaks: labels and members")
    if (out / "defences" / "points.json").exists():
        record_page(out / "defences")
        print("defences: the curves")


def record(cell: Path, seeds: list[Path]) -> None:
    to = HERE / "runs" / cell.name
    to.mkdir(parents=True, exist_ok=True)
    if not (to / "config.toml").exists():  # those of other seeds differ in the seed alone
        shutil.copyfile(cell / "config.toml", to / "config.toml")
    for seed in seeds:
        record_note(cell, seed.name)
        (to / seed.name).mkdir(exist_ok=True)
        for name in ("config.toml", "summary.json", *([maps.FILE] if maps.read_map(seed) else [])):
            shutil.copyfile(seed / name, to / seed.name / name)
        (to / seed.name / "federation.toml").write_text(digest((seed / "federation.toml").read_text()))
        summary = json.loads((seed / "summary.json").read_text())
        lines = [json.loads(line) for line in (seed / "metrics.jsonl").read_text().splitlines()]
        kept = {summary["best_round"], summary["selected_round"], lines[-1]["round"]}
        thinned = [json.dumps(thin(line, line["round"] in kept), separators=(",", ":")) for line in lines]
        (to / seed.name / "metrics.jsonl").write_text("\n".join(thinned) + "\n")
    there = sorted(int(path.parent.name.removeprefix("seed-")) for path in to.glob("seed-*/summary.json"))  # some from before
    shutil.copyfile(cell / "trials.json", to / "trials.json")
    summarize_trials(to, read_trials_plan(cell)[0], there, there)


def record_note(cell: Path, seed: str) -> None:
    note = cell / PROVENANCE_FILE.format(seed.removeprefix("seed-"))
    if note.exists():
        held = json.loads(note.read_text())
        text = json.dumps({**held, "command": elsewhere(held["command"])}, indent=2) + "\n"
        (HERE / "runs" / cell.name / note.name).write_text(text)


def record_diverged(cell: Path) -> None:
    """Takes in where a trial diverged: its config and curve until then."""
    for seed in (path.parent for path in sorted(cell.glob(f"seed-*/{DIVERGED}"))):
        to = HERE / "runs" / cell.name / seed.name
        to.mkdir(exist_ok=True)
        record_note(cell, seed.name)
        for name in ("config.toml", DIVERGED):
            shutil.copyfile(seed / name, to / name)
        lines = [json.loads(line) for line in (seed / "metrics.jsonl").read_text().splitlines()]
        thinned = [json.dumps(thin(line, False), separators=(",", ":")) for line in lines]
        (to / "metrics.jsonl").write_text("\n".join(thinned) + "\n")


def record_columns(folder: Path) -> None:
    to = HERE / "privacy"
    to.mkdir(exist_ok=True)
    records = json.loads((folder / "results.json").read_text())
    kept = [{key: short(entry[key]) for key in NUMBERS if key in entry} for entry in records]
    (to / "results.json").write_text(records_to_json(kept))
    made = last_line(folder / "table.md")
    (to / "table.md").write_text(privacy_page(read_table(to / "results.json"), "proper", made))


def record_page(folder: Path) -> None:
    to = HERE / folder.name
    copy(folder, to, (".csv", ".json", ".png", ".pdf"))
    page = (folder / "table.md").read_text()
    made = last_line(folder / "table.md")
    (to / "table.md").write_text(page.replace(made_by(page), made))


def copy(folder: Path, to: Path, endings: tuple[str, ...]) -> None:
    to.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in endings:
            shutil.copyfile(path, to / path.name)


def last_line(page: Path) -> str:
    """The line of a page that says what made it, without the place of its folder."""
    line = made_by(page.read_text())
    command = line.split("`")[1]
    return line.replace(command, elsewhere(command))


def made_by(page: str) -> str:
    return next(line for line in page.splitlines() if line.startswith("Made by `"))


def digest(manifest: str) -> str:
    """A manifest that has instead of its clients' rows their digest."""
    head, _, rest = manifest.partition("[[client]]")
    rows, mark, source = rest.partition("[source]")
    return f'{head}[client]\nsha256 = "{hashlib.sha256(rows.encode()).hexdigest()}"\n{chr(10) * bool(mark)}{mark}{source}'


def elsewhere(text: str) -> str:
    """A command, or a text with one, that has its folders' names alone: where they lay on that machine says nothing."""
    return re.sub(r"(--(?:out|tuned) )\S*/", r"\1", text)


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
