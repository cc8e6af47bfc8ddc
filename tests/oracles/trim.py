"""Writes the trimmed recordings of this folder: python tests/oracles/trim.py SOURCE, where SOURCE holds the full ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

METHODS = ("fedavg", "fedprox", "fedper", "ditto", "pfedme", "gpfl", "gpfl_paper_sum", "gpfl_paper_mean")
WIDEST = "base.fc1.0.weight"


def wanted(key: str, method: str) -> bool:
    """Keeps evaluations, losses, contexts and server states; of clients their private parts; wide layers in round 3 alone."""
    if key.startswith("init/") or key == "n_train":
        return False
    if re.search(r"/local/", key):
        return "/local/head." in key and method.startswith(("gpfl", "fedper"))
    if key.startswith("round3/"):
        return True
    if "/personal/" in key:
        return not key.endswith((WIDEST, "base.conv2.0.weight"))
    return method == "fedavg" or not key.endswith(WIDEST)


def main(source: Path) -> None:
    """Reads the full recordings and writes the trimmed ones beside this file."""
    here = Path(__file__).parent
    data = np.load(source / "data.npz", allow_pickle=False)
    kept = {}
    for key in data.files:
        if key.endswith("/x"):
            pixels = np.rint((data[key] * 0.5 + 0.5) * 255).astype(np.uint8)
            assert np.abs(pixels / np.float32(127.5) - 1 - data[key]).max() < 2e-7
            kept[key] = pixels
        elif key.endswith("/y"):
            kept[key] = data[key].astype(np.uint8)
    np.savez_compressed(here / "data.npz", **kept)
    start = np.load(source / "gpfl.npz", allow_pickle=False)
    init = {k.removeprefix("init/"): start[k] for k in start.files if k.startswith("init/") and "client" not in k}
    np.savez_compressed(here / "init.npz", **init)
    for method in METHODS:
        full = np.load(source / f"{method}.npz", allow_pickle=False)
        np.savez_compressed(here / f"{method}.npz", **{key: full[key] for key in full.files if wanted(key, method)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
