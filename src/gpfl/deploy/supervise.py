"""Keep programs running, and a run going on after its server or its machine died."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpfl.deploy.programs import Control, Processes, is_listening
from gpfl.deploy.server import CoordinatorFolder
from gpfl.errors import GpflError
from gpfl.io import files

Log = Callable[[str], None]

NODE_DELAY = 5.0
"""Seconds before a SuperNode starts again. The SuperLink refuses the key of one that was killed for half a minute."""
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


def finish_run(folder: CoordinatorFolder, log: Log, attempts: int = 20, check: Callable[[], None] = lambda: None) -> None:
    """Start the run, or join it if it is under way, and start it again from its checkpoint until it is finished.

    Raise if it stopped for a reason that a person must fix. `check`, called all the time, may raise as well.
    """
    control, path = Control(folder), folder.path / "state" / RUN
    number = run_number(folder)
    for _ in range(attempts):
        if (folder.run / "summary.json").exists():
            return
        start = 0
        if not number or has_ended(_call(partial(control.status, number), log)):
            start = folder.log.stat().st_size if folder.log.exists() else 0
            number = _call(control.submit, log)
            files.write_text(path, json.dumps({"run": number}) + "\n")
            log(f"run '{folder.card.run}' submitted")
        status = _wait(folder, control, number, start, log, check)
        if (folder.run / "summary.json").exists():
            return
        if status == "finished:stopped":
            raise GpflError(f"run '{folder.card.run}' was stopped; gpfl deploy run resumes it")
        if reason := last_reason(folder, start):
            raise GpflError(f"run '{folder.card.run}' stopped: {reason}")
        log(f"the run ended as '{status}'; starting it again from its checkpoint")
        if not has_ended(status):  # Flower notices after a minute
            with suppress(GpflError):  # it has ended by now
                control.stop(number)
        number = ""
    raise GpflError(f"run '{folder.card.run}' did not end in {attempts} attempts: see {folder.log}")


def has_ended(status: str) -> bool:
    """Return whether Flower's status of a run says that nothing of it is running: a database that was lost has none."""
    return status == "unknown" or status.startswith("finished")


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


def _wait(folder: CoordinatorFolder, control: Control, number: str, start: int, log: Log, check: Callable[[], None]) -> str:
    """Report rounds until the run has ended, and return Flower's status of it, or what has died.

    `start` is the length of the coordinator's log when the run was submitted.
    """
    path, asked, was_away = folder.run / "metrics.jsonl", time.monotonic(), False
    shown = len(files.read_lines(path))
    while True:
        check()
        status = "finished:completed" if (folder.run / "summary.json").exists() else ""
        is_away = not is_listening(folder.link_port)
        if is_away and not was_away:
            log("the SuperLink does not answer: is gpfl deploy server running?")
        has_died = _has_died(folder, start)
        if not status and not is_away and (was_away or has_died or time.monotonic() - asked > STATUS_SECONDS):
            asked, found = time.monotonic(), _call(partial(control.status, number), log)
            dead = "SuperLink died" if was_away else "coordinator died" if has_died else ""
            status = found if has_ended(found) else dead
        was_away = is_away
        records = [json.loads(line) for line in files.read_lines(path)]
        for record in records[shown:]:
            log(f"round {record['round']}: accuracy {record['accuracy']:.1%}")
        shown = len(records)
        if status:
            return status
        time.sleep(POLL_SECONDS)


def _has_died(folder: CoordinatorFolder, start: int) -> bool:
    """Return whether the coordinator's process has begun its log and holds it no longer."""
    import fcntl

    if not folder.log.exists() or folder.log.stat().st_size <= start or (folder.run / "summary.json").exists():
        return False
    with folder.log.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return not (folder.run / "summary.json").exists()


def _call(call: Callable[[], str], log: Log, seconds: float = 300.0) -> str:
    """Return the answer of the SuperLink, which may be about to start again. Raise if it stays away."""
    end, logged = time.monotonic() + seconds, False
    while True:
        try:
            return call()
        except GpflError as error:
            if time.monotonic() > end:
                raise GpflError(f"{error}; is gpfl deploy server running?") from None
            if not logged:
                log(f"waiting for the SuperLink ({error}): is gpfl deploy server running?")
                logged = True
            time.sleep(3)
