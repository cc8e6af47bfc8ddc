"""The command as a whole: help, version, errors, Ctrl-C."""

from __future__ import annotations

import os
import pkgutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from conftest import Command, CommandResult, assert_error, read_files

import gpfl
from gpfl.cli.main import COMMANDS
from gpfl.training.run_dir import RunDir

SRC = Path(gpfl.__file__).parents[1]


def run_module(*arguments: str, folder: Path) -> CommandResult:
    """Run the command in another process."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gpfl", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def all_commands() -> list[tuple[str, ...]]:
    """Every command and subcommand, as words after `gpfl`."""
    found: list[tuple[str, ...]] = [()]
    for name, (path, _) in COMMANDS.items():
        each = pkgutil.resolve_name(path)
        found += [(name,), *((name, below) for below in getattr(each, "commands", {}))]
    return found


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_help_of_every_command_fits_80_columns(
    command: Command, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = command(*words, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(" ".join(("Usage: gpfl", *words)))
    assert [line for line in result.out.splitlines() if len(line) > 80] == []


def test_summaries_of_commands_match_their_help(command: Command) -> None:
    for path, summary in COMMANDS.values():
        described = pkgutil.resolve_name(path).get_short_help_str(limit=200)
        assert described == summary


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run"], "Config file."),
        (["compare"], "Config file."),
        (["reproduce"], "Without one they are listed"),
        (["tune"], "Names separated by commas"),
        (["attack"], "Folder of a finished run."),
        (["resume"], "Folder of a run or of trials."),
        (["list"], "all are listed"),
        (["data", "get"], "One of "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_describes_arguments(command: Command, words: list[str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = command(*words, "--help").out
    assert text in shown[shown.index("Arguments:") : shown.index("\nOptions:")]


def test_command_without_arguments_shows_its_help(command: Command) -> None:
    result = command()
    assert "quickstart" in result.out + result.err


def test_version_is_that_of_the_package(command: Command) -> None:
    assert command("--version").out == f"gpfl {gpfl.__version__}\n"


def test_an_unknown_command_or_list_is_one_line(command: Command) -> None:
    result = command("rnu")
    assert_error(result, "No such command 'rnu'")
    assert result.err.count("Did you mean") <= 1
    assert_error(command("list", "method"), "unknown list 'method'; did you mean 'methods'?")


def test_quickstart_in_a_used_folder_is_an_error(command: Command) -> None:
    Path("mine").mkdir()
    Path("mine/table.md").write_text("mine")
    assert_error(command("quickstart", "--out", "mine"), "--out mine is not empty and nothing is overwritten")
    assert read_files(Path("mine")) == {"table.md": b"mine"}


def test_the_command_runs_as_a_module(tmp_path: Path) -> None:
    result = run_module("run", "--rounds", "1", "--clients", "4", "--batch-size", "100", "--out", "run", folder=tmp_path)
    assert result.code == 0, result.err
    assert result.err == ""
    assert "\x1b" not in result.out
    assert [line.split(",")[0] for line in result.out.splitlines()[:2]] == ["gpfl: round 0/1", "gpfl: round 1/1"]
    assert RunDir(tmp_path / "run").finished


def interrupt_when_written(written: Path, *arguments: str) -> CommandResult:
    """Run the command in another process and send it Ctrl-C once a file has content."""
    # A shell without job control starts processes that ignore SIGINT.
    start = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "runpy.run_module('gpfl', None, '__main__', True)"
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", start, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline and not (written.exists() and written.stat().st_size):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return CommandResult(process.returncode, out, err)


def test_ctrl_c_prints_the_command_that_resumes_the_run(command: Command) -> None:
    line = "run --clients 2 --classes-per-client 5 --hidden 4 --rounds 100000 --batch-size 600 --out"
    result = interrupt_when_written(Path("my run/metrics.jsonl"), *line.split(), "my run")
    assert result.err == "gpfl: stopped; resume with: python -m gpfl resume 'my run'\n"
    assert result.code == 130
    assert not RunDir("my run").finished


def entry_point() -> str:
    """Return the code that the installed script runs."""
    entry = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]["gpfl"]
    module, _, function = entry.partition(":")
    return f"from {module} import {function}; {function}()"


@pytest.mark.parametrize(
    "start", ["runpy.run_module('gpfl', None, '__main__', True)", entry_point()], ids=["module", "entry_point"]
)
@pytest.mark.parametrize(
    ("module", "rank", "message"),
    [("gpfl.cli.main", "0", "gpfl: stopped\n"), ("torch", "0", "gpfl: stopped\n"), ("torch", "1", "")],
)
def test_ctrl_c_during_imports_exits_with_one_line(tmp_path: Path, start: str, module: str, rank: str, message: str) -> None:
    code = f"""
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # like third-party modules with a bare except
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["gpfl", "run", "--help"]
{start}
"""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "RANK": rank}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", message)


def test_ctrl_c_that_is_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    code = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "gpfl.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["gpfl", "--version"]
try:
    runpy.run_module("gpfl", None, "__main__", True)
finally:
    print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
"""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, f"gpfl {gpfl.__version__}\nTrue\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--data", "toy", "--out", "run"), "gpfl: stopped\n"),
        (("list",), "gpfl: stopped\n"),
        (("quickstart", "--out", "quick"), "gpfl: stopped; resume with: gpfl quickstart --out quick\n"),
        (("compare", "--data", "toy", "--out", "all"), "gpfl: stopped\n"),
    ],
)
def test_ctrl_c_before_anything_is_written_suggests_no_resume(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpfl.training.config.find_dataset", stop)
    monkeypatch.setattr("gpfl.cli.list.write_groups", stop)
    result = command(*arguments)
    assert (result.code, result.err) == (130, message)


@pytest.mark.parametrize("seeds", [(), ("--seeds", "3,4")], ids=["run", "trials"])
def test_ctrl_c_while_resuming_names_the_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch, seeds: tuple[str, ...]
) -> None:
    def stop(folder: RunDir, line: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "append_metrics", stop)
    for arguments in (("run", "--data", "toy", *seeds, "--out", "here"), ("resume", "here")):
        result = command(*arguments)
        assert (result.code, result.err) == (130, "gpfl: stopped; resume with: gpfl resume here\n")


def test_a_mistake_in_another_process_is_one_line(tmp_path: Path) -> None:
    assert_error(run_module("run", "--method", "fedavgg", folder=tmp_path), "did you mean 'fedavg'?")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "run --data toy --out {}",
        "run --data {}.csv",
        "run {}.toml",
        "compare --methods gpfl --data toy --out {}",
        "tune gpfl --data toy --budget 1 --out {}",
        "reproduce real-world --only-tables --out {}",
        "reproduce real-world --only-tables --tuned {}",
        "data show --data {}.csv",
    ],
)
def test_a_path_that_the_file_system_rejects_is_one_line(command: Command, line: str) -> None:
    result = command(*line.format("x" * 300).split())
    assert result.code == 2
    assert "xxx" in result.err
    assert "File name too long" in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_no_torch(flag: str) -> None:
    code = f"""
import sys
sys.argv = ["gpfl", "{flag}"]
from gpfl.__main__ import main
try:
    main()
except SystemExit:
    print("torch" in sys.modules, "numpy" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("False False\n")
