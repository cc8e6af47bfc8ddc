"""The run directory: config.toml, federation.toml, metrics.jsonl, checkpoints, models and summary.json."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self, cast

from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.engine.distributed import process_group
from gpfl.errors import GpflError
from gpfl.federation import MANIFEST, Federation
from gpfl.io import files, toml
from gpfl.io.legacy import FORMAT_VERSION, read_version, upgrade_record
from gpfl.io.tensors import read_tensors, write_tensors
from gpfl.training import private_files

MetricsRecord = dict[str, object]  # one evaluated round, a line of metrics.jsonl

PREPROCESSING = "preprocessing.json"
"""File with the statistics that clients exchanged before round 0 and the encoding of columns."""

DIVERGED = "diverged.json"  # file that says in which round a run diverged

COUNTERS = ("round", "bytes_up", "bytes_down")


class RunState(NamedTuple):
    """A run between two rounds; private state is stacked over clients."""

    round: int  # rounds done
    shared: Tree
    private: Tree
    bytes_up: int = 0
    bytes_down: int = 0


class RunDir:
    """One run on disk. Files are replaced atomically; metrics.jsonl grows by a line and is truncated on resume."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: str, federation: Federation) -> Self:
        """Create the directory of a new run. Raise if it holds anything."""
        if path == "":
            raise GpflError("out is empty; name a folder")
        run_dir = cls(path)
        if run_dir.is_writer:
            remove_partial_start(run_dir.path)
            make_empty_folder(run_dir.path)
            run_dir._write_federation(federation)
            files.write_text(run_dir.path / "config.toml", config)
        process_group().barrier()
        return run_dir

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the directory of an existing run."""
        run_dir = cls(path)
        if not (run_dir.path / "config.toml").is_file():
            raise GpflError(f"{run_dir.path} {_explain_missing_run(run_dir.path)}")
        return run_dir

    def replace_federation(self, federation: Federation) -> None:
        """Write the federation of a run that has changed, such as after a client joined. Its checkpoints stay valid."""
        if self.finished or toml.dump(federation.manifest()) == (self.path / MANIFEST).read_text(encoding="utf-8"):
            return
        for path in self.path.glob("*.safetensors"):
            flat, metadata = read_tensors(path)
            saved = cast(Mapping[str, object], metadata.get("files", {}))
            write_tensors(path, flat, {**metadata, "files": {key: saved[key] for key in saved if key != MANIFEST}})
        self._write_federation(federation)
        self.__dict__.pop("file_digests", None)

    def _write_federation(self, federation: Federation) -> None:
        federation.save(self.path / MANIFEST)
        if federation.preprocessing is not None:
            self._write_json(PREPROCESSING, federation.preprocessing.to_dict(), indent=1)

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the files: the first of several does, the others read them."""
        return process_group().is_main

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return (self.path / "summary.json").is_file()

    @cached_property
    def file_digests(self) -> dict[str, str]:
        """Digests of config and manifest as they were when this process opened them."""
        return {name: file_digest(self.path / name) for name in ("config.toml", MANIFEST)}

    @property
    def restart_hint(self) -> str:
        """How to run the whole run again, for error messages."""
        names = "summary.json and checkpoint.safetensors" if self.finished else "checkpoint.safetensors"
        return f"remove {names} beside it, then run gpfl resume {self.path} to repeat the run"

    def append_metrics(self, record: MetricsRecord) -> None:
        """Append an evaluated round to metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        if not self.is_writer:
            return
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint must not outlive the rounds before it
        except OSError as error:
            raise GpflError(f"cannot write {path}: {error.strerror}; free space, then run gpfl resume {self.path}") from None

    def read_metrics(self) -> list[MetricsRecord]:
        """Return the evaluated rounds; the last line may be incomplete."""
        path = self.path / "metrics.jsonl"
        records: list[MetricsRecord] = []
        try:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                records.append(upgrade_record("metrics", json.loads(line)))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise GpflError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:  # the line at which a write was interrupted
            pass
        return records

    def read_complete_metrics(self) -> list[MetricsRecord]:
        """Return all evaluated rounds of a finished run. Raise if any are missing."""
        records, last = self.read_metrics(), self.read_summary()["rounds"]
        if not records or records[-1]["round"] != last:
            raise GpflError(f"{self.path / 'metrics.jsonl'} is damaged (it does not reach round {last}): {self.restart_hint}")
        return records

    def truncate_metrics(self, records: Sequence[MetricsRecord]) -> None:
        """Replace the metrics by `records`, since rounds after the checkpoint run again."""
        process_group().barrier()  # all processes have read the metrics
        if self.is_writer:
            files.write_text(self.path / "metrics.jsonl", "".join(json.dumps(record) + "\n" for record in records))

    def save_checkpoint(self, state: RunState, name: str = "checkpoint", *, private_on_disk: bool = False) -> None:
        """Write a state, replacing the one before; private state that is on disk into a folder of its own."""
        if not self.is_writer:
            return
        content: Tree = {"shared": state.shared, "private": {} if private_on_disk else state.private}
        metadata = {**{key: getattr(state, key) for key in COUNTERS}, "files": self.file_digests}
        folder = self._private_folder(state.round)
        if private_on_disk:
            private_files.save(state.private, folder)
        write_tensors(self.path / f"{name}.safetensors", tree.flatten(content), metadata)
        if private_on_disk:  # only now can the one before go
            for other in folder.parent.iterdir():
                if other != folder:
                    shutil.rmtree(other)

    def _private_folder(self, round: int) -> Path:
        return self.path / "private" / f"round-{round}"

    def load_checkpoint(
        self, template: RunState, name: str = "checkpoint", *, private_on_disk: bool = False
    ) -> RunState | None:
        """Return a saved state, or None if there is none. Raise if its tensors are not those of `template`.

        Private state that is on disk is read into that of `template`.
        """
        path = self.path / f"{name}.safetensors"
        if not path.exists():
            return None
        flat, metadata = read_tensors(path)
        for changed in self._changed_since(metadata):
            raise GpflError(
                f"{self.path / changed} has changed since {path.name} was written: restore it, "
                "or start a new run in another folder"
            )
        content: Tree = {"shared": template.shared, "private": {} if private_on_disk else template.private}
        expected = tree.flatten(content)
        if {key: t.shape for key, t in flat.items()} != {key: t.shape for key, t in expected.items()}:
            raise GpflError(f"{path} does not belong to this run's method, net and clients: remove it to start the run over")
        restored = tree.unflatten_like(content, {key: flat[key].to(expected[key]) for key in expected})
        try:
            counters = {key: int(cast(int, metadata[key])) for key in COUNTERS}
        except (KeyError, ValueError, TypeError):
            raise GpflError(f"{path} is not a checkpoint of gpfl: remove it to start the run over") from None
        private = tree.branch(restored, "private")
        if private_on_disk:
            private_files.restore(template.private, self._private_folder(counters["round"]), self.restart_hint)
            private = template.private
        return RunState(shared=tree.branch(restored, "shared"), private=private, **counters)

    def changed_files(self) -> list[str]:
        """Return which of config and manifest have changed since the checkpoint, if there is a readable one."""
        try:
            return self._changed_since(read_tensors(self.path / "checkpoint.safetensors")[1])
        except GpflError:
            return []

    def _changed_since(self, metadata: Mapping[str, object]) -> list[str]:
        saved = metadata.get("files")
        return [name for name, now in self.file_digests.items() if isinstance(saved, dict) and saved.get(name, now) != now]

    def write_metrics_report(self, content: Mapping[str, object]) -> None:
        """Write metrics.json: all metrics of the reported round, per client and overall."""
        self._write_json("metrics.json", content)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write summary.json, which marks the run as finished."""
        if self.is_writer:
            self._write_json("summary.json", summary, indent=2)
            (self.path / DIVERGED).unlink(missing_ok=True)  # from an earlier attempt

    def _write_json(self, name: str, content: Mapping[str, object], indent: int | None = None) -> None:
        text = json.dumps({"format_version": FORMAT_VERSION, **content}, indent=indent, allow_nan=False)
        files.write_text(self.path / name, text + "\n")

    def read_summary(self) -> dict[str, object]:
        """Return the content of summary.json."""
        path = self.path / "summary.json"
        content = files.read_json(path, f"delete it, then run gpfl resume {self.path} to write it again")
        read_version(content, path)
        return {key: value for key, value in upgrade_record("summary", content).items() if key != "format_version"}

    def write_divergence(self, round: int, reason: str) -> None:
        """Write that the run diverged in a round."""
        if self.is_writer:
            files.write_text(self.path / DIVERGED, json.dumps({"round": round, "what": reason}) + "\n")

    @property
    def diverged_round(self) -> int | None:
        """The round in which the run diverged, or None."""
        try:
            return int(json.loads((self.path / DIVERGED).read_text(encoding="utf-8"))["round"])
        except (OSError, ValueError, TypeError, KeyError):
            return None


def metric(record: MetricsRecord, key: str) -> float:
    """Return a number of a record."""
    return cast(float, record[key])


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a text file without its device line: a run may resume on another machine."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return "missing"
    return hashlib.sha256(b"".join(line for line in lines if not line.startswith(b"device = "))).hexdigest()


def make_empty_folder(path: Path) -> None:
    """Create an output folder. Raise if it holds anything."""
    try:
        if path.exists() and not path.is_dir():
            raise GpflError(f"--out {path} is a file; choose a folder")
        if path.is_dir() and any(path.iterdir()):
            fix = f"gpfl resume {path}, or choose another --out" if (path / "config.toml").exists() else "choose another --out"
            raise GpflError(f"--out {path} is not empty and nothing is overwritten: {fix}")
    except OSError as error:
        raise GpflError(f"cannot make the folder {path}: {error.strerror}; choose another --out") from None
    files.make_folder(path)


def remove_partial_start(path: Path) -> None:
    """Remove the files of a run or of trials that were killed before config.toml was written, and no others."""
    if not path.is_dir() or (path / "config.toml").exists():
        return
    names = (MANIFEST, PREPROCESSING, "trials.json", "config.toml")
    entries = list(path.iterdir())
    if all(file.is_file() and (file.name in names or file.name.startswith(tuple(f".{n}." for n in names))) for file in entries):
        for file in entries:
            file.unlink()


def _explain_missing_run(path: Path) -> str:
    if path.is_file():
        return "is a file; give the folder of a run"
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return f"holds no run (no config.toml): start one with gpfl run --out {path}"
    if any(path.glob("*/trials.json")):
        return f"holds trials of several methods: repeat the command that started them with --out {path}"
    return "holds no run (no config.toml); give the folder of a run"
