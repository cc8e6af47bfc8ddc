"""The run folder: config.toml, federation.toml, metrics.jsonl, checkpoint, models and summary.json."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

import torch

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError
from gpfl.federation.federation import MANIFEST, Federation
from gpfl.io import files
from gpfl.io.tensors import read_tensors, write_tensors

MetricsRecord = dict[str, object]
"""One evaluated round of metrics.jsonl."""


DIVERGED = "diverged.json"
"""The file that says in which round a run diverged."""

COUNTERS = ("round", "bytes_up", "bytes_down")

LINE_NUMBERS = ("round", "accuracy", "loss", "mean", "std", "cov", "bytes_up", "bytes_down", "seconds")
"""What every line of metrics.jsonl holds."""

SUMMARY_TEXTS = ("method", "engine", "device")
SUMMARY_NUMBERS = (
    *("best_round", "best_accuracy", "std", "cov", "last_accuracy", "last_ten_accuracy", "selected_round", "rounds"),
    *("clients", "idle_clients", "rows_needed", "bytes_up", "bytes_down", "seconds", "seed"),
)
"""What every summary.json holds."""


class RunState(NamedTuple):
    """A run between two rounds: rounds done, the shared state, all clients' private state stacked, and the traffic so far."""

    round: int
    shared: Tree
    private: Tree
    bytes_up: int = 0
    bytes_down: int = 0


class RunDir:
    """One run on disk. Everything but the metrics is replaced whole; metrics grow by a line and are cut back on resume."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: str, federation: Federation) -> RunDir:
        """Gives a new run's folder; one that holds anything is refused."""
        if path == "":
            raise GpflError("out is empty; name a folder")
        folder = cls(path)
        if folder.writes:
            clear_stump(folder.path)
            refuse_used(folder.path)
            federation.save(folder.path / MANIFEST)
            files.write_text(folder.path / "config.toml", config)
        process_group().barrier()
        return folder

    @property
    def writes(self) -> bool:
        """Tells whether this process writes: of several, the first does, and the others read what it wrote."""
        return process_group().is_main

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """Gives the folder of a run that was begun."""
        folder = cls(path)
        if not (folder.path / "config.toml").is_file():
            raise GpflError(f"{folder.path} {no_run(folder.path)}")
        return folder

    @property
    def finished(self) -> bool:
        """Tells whether the run has ended."""
        return (self.path / "summary.json").is_file()

    @cached_property
    def digests(self) -> dict[str, str]:
        """The content of the files that say what the run is, as it was when it was begun or gone on with."""
        return {name: digest(self.path / name) for name in ("config.toml", MANIFEST)}

    @property
    def start_over(self) -> str:
        """The words that start the run over."""
        state = "summary.json and checkpoint.safetensors" if self.finished else "checkpoint.safetensors"
        return f"remove {state} beside it and gpfl resume {self.path} to run it anew"

    # Metrics.

    def append(self, line: MetricsRecord) -> None:
        """Adds an evaluated round."""
        path = self.path / "metrics.jsonl"
        if not self.writes:
            return
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint must not outlive the rounds before it
        except OSError as problem:
            raise GpflError(f"cannot write {path}: {problem.strerror}; make room and gpfl resume {self.path}") from None

    def lines(self, also: Iterable[str] = ()) -> list[MetricsRecord]:
        """Gives the evaluated rounds up to the first line that is damaged: the last may have been cut off in writing.

        `also` names numbers that a line must hold besides the usual ones.
        """
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as problem:
            raise GpflError(f"cannot read {path}: {problem.strerror}") from None
        lines: list[MetricsRecord] = []
        for row in text.splitlines():
            try:
                line = json.loads(row)
            except ValueError:
                break
            if not isinstance(line, dict) or fault(line, (*LINE_NUMBERS, *also)):
                break
            lines.append(line)
        return lines

    def whole_curve(self) -> list[MetricsRecord]:
        """Gives the evaluated rounds of a finished run, all of them."""
        lines, last = self.lines(), self.summary()["rounds"]
        if not lines or lines[-1]["round"] != last:
            raise GpflError(f"{self.path / 'metrics.jsonl'} is damaged (it does not reach round {last}): {self.start_over}")
        return lines

    def cut_back(self, lines: list[MetricsRecord]) -> None:
        """Replaces the metrics by `lines`: rounds after the checkpoint are run again."""
        process_group().barrier()  # all have read what is cut back
        if self.writes:
            files.write_text(self.path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    # Checkpoints.

    def save_state(self, state: RunState, name: str = "checkpoint") -> None:
        """Writes a state; the one before stays until this one is whole."""
        if not self.writes:
            return
        content: Tree = {"shared": state.shared, "private": state.private}
        facts = {**{name: getattr(state, name) for name in COUNTERS}, "files": self.digests}
        write_tensors(self.path / f"{name}.safetensors", tree.flatten(content), facts)

    def load_state(self, like: RunState, name: str = "checkpoint") -> RunState | None:
        """Gives a saved state, checked against one of the same run; None where there is none."""
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            return None
        flat, facts = read_tensors(path)
        for changed in self.changed(facts):
            raise GpflError(
                f"{self.path / changed} is not as it was when {path.name} was written: restore it, "
                "or start a new run in another folder"
            )
        content: Tree = {"shared": like.shared, "private": like.private}
        expected = tree.flatten(content)
        if {key: t.shape for key, t in flat.items()} != {key: t.shape for key, t in expected.items()}:
            raise GpflError(f"{path} does not belong to this run's method, net and clients: remove it to start the run over")
        restored = tree.unflatten_like(content, {key: flat[key].to(expected[key]) for key in expected})
        try:
            counters = {name: int(cast(int, facts[name])) for name in COUNTERS}
        except (KeyError, ValueError, TypeError):
            raise GpflError(f"{path} is not a checkpoint of gpfl: remove it to start the run over") from None
        return RunState(shared=tree.branch(restored, "shared"), private=tree.branch(restored, "private"), **counters)

    def changed_files(self) -> list[str]:
        """Gives the files that are not those the checkpoint was written under, as far as there is a good one."""
        try:
            return self.changed(read_tensors(self.path / "checkpoint.safetensors")[1])
        except GpflError:
            return []

    def changed(self, facts: Mapping[str, object]) -> list[str]:
        """Gives the files that are not those a checkpoint with these facts was written under."""
        then = facts.get("files")
        return [name for name, now in self.digests.items() if isinstance(then, dict) and then.get(name, now) != now]

    # Results.

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Writes summary.json; its presence says that the run has ended."""
        if not self.writes:
            return
        files.write_text(self.path / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
        (self.path / DIVERGED).unlink(missing_ok=True)  # of an earlier sitting

    def write_divergence(self, round: int, what: str) -> None:
        """Writes that the run diverged in a round."""
        if self.writes:
            files.write_text(self.path / DIVERGED, json.dumps({"round": round, "what": what}) + "\n")

    @property
    def diverged(self) -> int | None:
        """The round in which the run diverged; None where it did not, as far as can be read."""
        try:
            content = json.loads((self.path / DIVERGED).read_text(encoding="utf-8"))
            return int(content["round"])
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def summary(self, way: str = "") -> dict[str, object]:
        """Gives summary.json; the way out of a damaged one is to resume, unless the caller knows another."""
        path = self.path / "summary.json"
        way = way or f"remove it and gpfl resume {self.path} to have it written anew"
        content = read_json(path, way)
        wrong = fault(content, SUMMARY_NUMBERS, SUMMARY_TEXTS)
        if wrong:
            raise GpflError(f"{path} is damaged ({wrong}): {way}")
        return content


def no_run(path: Path) -> str:
    """Gives the end of the sentence about a folder that holds no run, with a way out that is open."""
    if path.is_file():
        return "is a file; give the folder of a run"
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return f"holds no run (no config.toml): start one with gpfl run --out {path}"
    if any(path.glob("*/trials.json")):
        return f"holds trials of several methods: go on with the command that began them and --out {path}"
    return "holds no run (no config.toml); give the folder of a run"


def digest(path: Path) -> str:
    """Gives the sha256 of a text, but for the device: a run may go on on another machine."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return "missing"
    return hashlib.sha256(b"".join(line for line in lines if not line.startswith(b"device = "))).hexdigest()


def fault(content: Mapping[str, object], numbers: Iterable[str], texts: Iterable[str] = ()) -> str:
    """Gives the first thing that is wrong with an object that must hold these numbers and texts; "" where nothing is."""
    for key, kinds, words in (*((key, (int, float), "a number") for key in numbers), *((key, (str,), "text") for key in texts)):
        value = content.get(key)
        if key not in content:
            return f"it lacks '{key}'"
        if not isinstance(value, kinds) or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            return f"'{key}' is {value!r}, not {words}"
    return ""


def refuse_used(path: Path) -> None:
    """Refuses an output folder that cannot be made or that holds anything."""
    try:
        if path.exists() and not path.is_dir():
            raise GpflError(f"--out {path} is a file; choose a folder")
        if path.is_dir() and any(path.iterdir()):
            way = f"gpfl resume {path}, or choose another --out" if (path / "config.toml").exists() else "choose another --out"
            raise GpflError(f"--out {path} is not empty and nothing is overwritten: {way}")
    except OSError as problem:
        raise GpflError(f"cannot make the folder {path}: {problem.strerror}; choose another --out") from None
    files.make_folder(path)


def clear_stump(path: Path) -> None:
    """Removes what a run or trials leave that were killed before config.toml was written, and nothing else."""
    if not path.is_dir() or (path / "config.toml").exists():
        return
    left = list(path.iterdir())
    early = (MANIFEST, "trials.json", "config.toml")
    if all(file.is_file() and (file.name in early or file.name.startswith(tuple(f".{n}." for n in early))) for file in left):
        for file in left:
            file.unlink()


def read_json(path: Path, way: str) -> dict[str, object]:
    """Gives the content of a JSON file that holds an object, or says that it is damaged and the way out."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise GpflError(f"cannot read {path} ({problem.strerror}): {way}") from None
    except ValueError as problem:
        raise GpflError(f"{path} is damaged ({problem}): {way}") from None
    if not isinstance(content, dict):
        raise GpflError(f"{path} is damaged (it holds no JSON object): {way}")
    return content


def device_name(device: torch.device) -> str:
    """Gives the device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
