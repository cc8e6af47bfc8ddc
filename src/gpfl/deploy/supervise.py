"""Keep programs running, and a run going on after its server or its machine died."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpfl.deploy.programs import Control, Processes
from gpfl.deploy.server import CoordinatorFolder
from gpfl.errors import GpflError
from gpfl.io import files

Log = Callable[[str], None]

NODE_DELAY = 10.0
"""Seconds before a SuperNode starts again. The SuperLink refuses the key of one that was killed for about a minute."""
DELAY = 2.0
POLL_SECONDS, STATUS_SECONDS = 0.5, 10.0
RUN = "run.json"
"""File in the coordinator's state with Flower's number of the run."""


@dataclass(frozen=True)
class Program:
    """A program to keep running: its command, made anew for each start, and the seconds before it starts again."""

    command: Callable[[], list[str]]
    home: Path
    delay: float = DELAY


def keep_running(
    processes: Processes, programs: Mapping[str, Program], log: Log, stop: Callable[[], bool] = lambda: False
) -> None:
    """Start programs, and start them again when they end, until `stop` says so."""
    due = dict.fromkeys(programs, 0.0)
    while not stop():
        now = time.monotonic()
        for name, status in processes.exited().items():
            processes.stop([name])
            due[name] = now + programs[name].delay
            log(f"{name} ended with status {status}; it starts again in {programs[name].delay:.0f} s, see {processes.logs}")
        for name in [name for name, at in due.items() if at <= now]:
            processes.start(name, programs[name].command(), programs[name].home)
            del due[name]
            log(f"{name} started")
        time.sleep(POLL_SECONDS)


def finish_run(folder: CoordinatorFolder, log: Log, attempts: int = 20) -> None:
    """Start the run, or join it if it is under way, and start it again from its checkpoint until it is finished.

    Raise if it stopped for a reason that a person must fix.
    """
    control, path = Control(folder), folder.path / "state" / RUN
    number = run_number(folder)
    for _ in range(attempts):
        if (folder.run / "summary.json").exists():
            return
        if not number or _call(partial(control.status, number), log).startswith("finished"):
            start = folder.log.stat().st_size if folder.log.exists() else 0
            number = _call(control.submit, log)
            files.write_text(path, json.dumps({"run": number}) + "\n")
            log(f"run '{folder.card.run}' submitted")
        else:
            start = 0
        status = _wait(folder, control, number, log)
        if (folder.run / "summary.json").exists():
            return
        if status == "finished:stopped":
            raise GpflError(f"run '{folder.card.run}' was stopped; gpfl deploy run resumes it")
        reason = last_reason(folder, start)
        if reason:
            raise GpflError(f"run '{folder.card.run}' stopped: {reason}")
        log(f"the run ended as '{status}'; starting it again from its checkpoint")
        number = ""
    raise GpflError(f"run '{folder.card.run}' did not end in {attempts} attempts: see {folder.log}")


def run_number(folder: CoordinatorFolder) -> str:
    """Return Flower's number of the run, "" if it was not started."""
    path = folder.path / "state" / RUN
    return str(files.read_json(path, "remove it")["run"]) if path.exists() else ""


def last_reason(folder: CoordinatorFolder, start: int = 0) -> str:
    """Return why the coordinator stopped by itself, "" if it did not."""
    if not folder.log.exists():
        return ""
    lines = folder.log.read_bytes()[start:].decode("utf-8", errors="replace").splitlines()
    return next((line.partition(" stopped: ")[2] for line in reversed(lines) if " stopped: " in line), "")


def _wait(folder: CoordinatorFolder, control: Control, number: str, log: Log) -> str:
    """Report rounds until the run has ended, and return Flower's status of it."""
    path, shown, asked = folder.run / "metrics.jsonl", 0, time.monotonic()
    shown = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
    while True:
        finished = (folder.run / "summary.json").exists()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines[shown:]:
            record = json.loads(line)
            log(f"round {record['round']}: accuracy {record['accuracy']:.1%}")
        shown = len(lines)
        if finished:
            return "finished:completed"
        if time.monotonic() - asked > STATUS_SECONDS:
            asked = time.monotonic()
            if (status := _call(partial(control.status, number), log)).startswith("finished"):
                return status
        time.sleep(POLL_SECONDS)


def _call(call: Callable[[], str], log: Log, seconds: float = 300.0) -> str:
    """Return the answer of the SuperLink, which may be about to start again. Raise if it stays away."""
    end, said = time.monotonic() + seconds, False
    while True:
        try:
            return call()
        except GpflError as error:
            if time.monotonic() > end:
                raise GpflError(f"{error}; is gpfl deploy server running?") from None
            if not said:
                log("waiting for the SuperLink: is gpfl deploy server running?")
                said = True
            time.sleep(3)
