"""Add results to docs/results and rebuild its tables: python scripts/record_results.py [OUT].

OUT is the output folder of `gpfl reproduce` or `gpfl privacy`. Its runs are added to the archive, its searches and
privacy results are copied without reconstructed images, which show the data. Then every table is rebuilt from the archive
by the command in its last line, and the results page is updated. Without OUT only the tables are rebuilt.
"""

from __future__ import annotations

import json
import lzma
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pack_runs
import results_page

from gpfl.experiments import stored_runs
from gpfl.experiments.privacy_table import table_from_records
from gpfl.privacy.attack_runner import AttackCase, records_to_json
from gpfl.report.privacy_tables import privacy_page

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
MEASURES = ("either_psnr", "either_start_psnr", "either_mean_psnr", "either_ssim", "psnr", "ssim", "turned", "reference_start")
IMAGE_KEYS = ("column", "best_round", *(field.name for field in fields(AttackCase)), "client", "label", *MEASURES)
"""What is kept of a reconstructed image."""


def main() -> None:
    """Record the results of a folder, if one is named, and rebuild the tables."""
    if len(sys.argv) > 1:
        record(Path(sys.argv[1]))
    rebuild_tables()
    results_page.main()


def record(out: Path) -> None:
    """Add what a folder holds."""
    if (out / "runs").is_dir():
        count = pack_runs.pack(out / "runs", RESULTS / stored_runs.ARCHIVE)
        print(f"{stored_runs.ARCHIVE}: {count} folders of trials")
    for path in (found for found in (out / "tuned").rglob("*") if found.is_file()):
        target = RESULTS / path.relative_to(out)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(shorten_paths(path.read_text(encoding="utf-8")), encoding="utf-8")
    if (out / "privacy" / "results.json").exists():
        record_privacy(out / "privacy")
    for name, numbers in (("leaks", "results.json"), ("defences", "points.json"), ("features", "*.json")):
        if any((out / name).glob(numbers)):
            copy_page(out / name)


def record_privacy(folder: Path) -> None:
    """Record the attacks of the paper's nine columns: numbers and page."""
    records = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    kept = [{key: rounded(record[key]) for key in IMAGE_KEYS if key in record} for record in records]
    target = RESULTS / folder.name
    target.mkdir(exist_ok=True)
    (target / "results.json.xz").write_bytes(lzma.compress(records_to_json(kept).encode()))
    page = privacy_page(table_from_records(kept), "proper", shorten_paths(origin_line(folder / "table.md")))
    (target / "table.md").write_text(page, encoding="utf-8")


def copy_page(folder: Path) -> None:
    """Copy a page with its numbers and figures."""
    target = RESULTS / folder.name
    target.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.suffix in (".csv", ".json", ".png", ".pdf"):
            shutil.copyfile(path, target / path.name)
    if (folder / "table.md").exists():
        (target / "table.md").write_text(shorten_paths((folder / "table.md").read_text(encoding="utf-8")), encoding="utf-8")


def rebuild_tables() -> None:
    """Run the command of every table that is made from the archive."""
    for page in sorted(RESULTS.glob("*/table.md")):
        if command := table_command(page):
            print(f"{page.parent.name}: gpfl {shlex.join(command)}")
            subprocess.run([sys.executable, "-m", "gpfl", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def table_command(page: Path) -> list[str]:
    """Return the arguments of the command that rebuilds a table; [] if it is made in another way."""
    match = re.search(r"`gpfl (reproduce [^`]*--only-tables[^`]*--out docs/results[^`]*)`", page.read_text(encoding="utf-8"))
    return shlex.split(match[1]) if match else []


def origin_line(page: Path) -> str:
    """Return the line of a page that names the command, commit and device."""
    return next(line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("Made by `"))


def shorten_paths(text: str) -> str:
    """Return a text with the last part of each --out and --tuned folder alone."""
    return re.sub(r"(--(?:out|tuned) )\S*/", r"\1", text)


def rounded(value: object) -> object:
    """Return a number with the digits that are kept."""
    return round(value, pack_runs.DIGITS) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
