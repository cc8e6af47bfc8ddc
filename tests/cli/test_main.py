"""The command: what it prints, what it writes, and what it says about mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, CommandResult, ToyDataset, metrics_without_time, read_files, toy_table

import gpfl
from gpfl.cli import options
from gpfl.core.options import options_of
from gpfl.data import DATASETS, FILES
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.run_dir import RunDir

SRC = Path(gpfl.__file__).parents[1]


def system(*arguments: str, folder: Path) -> CommandResult:
    """The command as another process."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "gpfl", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def config(folder: Path) -> dict[str, dict[str, object]]:
    from gpfl.io import toml

    return toml.read(folder / "config.toml")  # type: ignore[return-value]


# Runs.


def test_run_prints_plain_lines_and_keeps_the_run_where_it_is_told(command: Command) -> None:
    said = command("run", "--data", "toy", "--out", "here")
    assert said.code == 0
    assert said.err == ""
    lines = said.out.splitlines()
    assert re.fullmatch(r"gpfl: round 0/2, accuracy \d+\.\d\d%, loss \d+\.\d{4}", lines[0])
    assert re.fullmatch(r"gpfl: round 2/2, accuracy \d+\.\d\d%, loss \d+\.\d{4}", lines[1])
    assert re.fullmatch(
        r"gpfl: best accuracy \S+% at round \d, last \S+%, std over clients \S+%, \d+\.\d s \(vmap on cpu\)\.", lines[2]
    )
    assert lines[3] == "Run: here. Each client's model (round 2): here/models"
    assert len(lines) == 4
    assert "\x1b" not in said.out
    assert {"config.toml", "summary.json", "metrics.jsonl", "models/client-3.safetensors"} <= read_files(Path("here")).keys()


def test_run_without_out_takes_the_first_free_folder(command: Command) -> None:
    for _ in range(2):
        assert command("run", "--data", "toy", "--method", "local", "--rounds", 1).code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["toy-local", "toy-local-2"]


def test_flags_reach_the_config(command: Command) -> None:
    said = command(
        *("run", "--data", "toy", "--method", "gpfl", "--partition", "dirichlet", "--clients", 3, "--beta", 5, "--rounds", 1),
        *(
            "--seed",
            7,
            "--partition-seed",
            2,
            "--lr",
            0.05,
            "--hidden",
            "8,4",
            "--client-fraction",
            "0.5,1",
            "--no-shuffle",
            "--lam",
            "1e-3",
        ),
        *("--engine", "loop", "--validation-fraction", 0.2, "--out", "run"),
    )
    assert said.code == 0, said.err
    written = config(Path("run"))
    assert written["method"]["name"] == "gpfl"
    assert written["method"]["lam"] == 0.001
    assert (
        written["partition"] | {"name": "dirichlet", "clients": 3, "beta": 5.0, "seed": 2, "validation_fraction": 0.2}
        == written["partition"]
    )
    assert written["train"] | {"rounds": 1, "lr": 0.05, "client_fraction": [0.5, 1.0], "shuffle": False} == written["train"]
    assert written["run"] | {"seed": 7, "engine": "loop"} == written["run"]
    assert written["net"] == {"name": "mlp", "hidden": [8, 4]}
    assert "At the best round on validation samples" in said.out


def test_set_wins_over_flags_and_flags_over_the_file(command: Command) -> None:
    Path("my.toml").write_text(
        '[data]\nname = "toy"\n[train]\nrounds = 3\nlr = 0.3\nepochs = 2\n[method]\nlam = 0.5\nmu = 0.5\n'
    )
    assert command("run", "my.toml", "--lr", 0.2, "--lam", 0.2, "--set", "method.lam=0.1", "--out", "run").code == 0
    written = config(Path("run"))
    assert (written["train"]["rounds"], written["train"]["lr"], written["train"]["epochs"]) == (3, 0.2, 2)
    assert (written["method"]["lam"], written["method"]["mu"]) == (0.1, 0.5)


def test_written_config_run_again_is_the_same_run(command: Command) -> None:
    assert command("run", "--data", "toy", "--clients", 3, "--seed", 3, "--client-fraction", 0.5, "--out", "one").code == 0
    assert command("run", "one/config.toml", "--out", "two").code == 0
    assert metrics_without_time(Path("one")) == metrics_without_time(Path("two"))
    assert Path("one/config.toml").read_bytes() == Path("two/config.toml").read_bytes()


def test_another_method_by_flag_drops_the_options_of_the_files_method(command: Command) -> None:
    assert command("run", "--data", "toy", "--out", "one").code == 0
    said = command("run", "one/config.toml", "--method", "fedavg", "--out", "two")
    assert said.code == 0, said.err
    assert config(Path("two"))["method"] == {"name": "fedavg"}


def test_federation_manifest_gives_the_same_split_to_another_run(command: Command) -> None:
    assert command("run", "--data", "toy", "--partition-seed", 9, "--rounds", 1, "--out", "one").code == 0
    said = command("run", "--data", "toy", "--federation", "one/federation.toml", "--rounds", 1, "--out", "two")
    assert said.code == 0, said.err
    assert Path("one/federation.toml").read_bytes() == Path("two/federation.toml").read_bytes()
    assert metrics_without_time(Path("one")) == metrics_without_time(Path("two"))
    assert command("run", "two/config.toml", "--out", "three").code == 0
    assert metrics_without_time(Path("three")) == metrics_without_time(Path("one"))


def test_seeds_run_trials_on_one_split_and_report_mean_and_std(command: Command) -> None:
    said = command("run", "--data", "toy", "--method", "local", "--seeds", "0,1,2", "--out", "trials")
    assert said.code == 0, said.err
    folders = [Path("trials") / f"seed-{seed}" for seed in (0, 1, 2)]
    summaries = [RunDir(folder).read_summary() for folder in folders]
    best = np.array([summary["best_accuracy"] for summary in summaries])
    assert [summary["seed"] for summary in summaries] == [0, 1, 2]
    assert len({(folder / "federation.toml").read_bytes() for folder in folders}) == 1
    assert f"{100 * best.mean():.2f} ± {100 * best.std():.2f}" in said.out
    trials = json.loads(Path("trials/trials.json").read_text())
    assert trials["best_accuracy"] == {"mean": pytest.approx(best.mean()), "std": pytest.approx(best.std())}
    alone = command("run", "--data", "toy", "--method", "local", "--seed", 1, "--out", "alone")
    assert alone.code == 0
    assert metrics_without_time(Path("alone")) == metrics_without_time(folders[1])


def test_validation_rows_are_reported_beside_the_best_round(command: Command) -> None:
    said = command("run", "--data", "toy", "--validation-fraction", 0.3, "--out", "run")
    summary = RunDir(Path("run")).read_summary()
    words = f"At the best round on validation samples ({summary['validation_best_round']}): "
    assert f"{words}{summary['validation_best_accuracy']:.2%}." in said.out


# Resume.


def unfinish(folder: Path) -> None:
    """Takes a run of two rounds back to its first checkpoint, as a kill in the first round leaves it."""
    (folder / "summary.json").unlink()
    (folder / "checkpoint.safetensors").unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(lines[0] + lines[1][:20])


def test_resume_goes_on_with_a_run_and_opens_a_finished_one(command: Command) -> None:
    assert command("run", "--data", "toy", "--out", "run").code == 0
    whole = metrics_without_time(Path("run"))
    unfinish(Path("run"))
    said = command("resume", "run")
    assert said.code == 0, said.err
    assert metrics_without_time(Path("run")) == whole
    before = read_files(Path("run"))
    again = command("resume", "run")
    assert again.code == 0
    assert "The run in run was already finished." in again.out
    assert read_files(Path("run")) == before


@pytest.mark.parametrize("stump", [False, True], ids=["cut in a round", "cut before the config"])
def test_resume_goes_on_with_trials_where_they_were_cut_off(command: Command, stump: bool) -> None:
    assert command("run", "--data", "toy", "--seeds", "0,1", "--out", "trials").code == 0
    folders = [Path("trials/seed-0"), Path("trials/seed-1")]
    whole = [metrics_without_time(folder) for folder in folders]
    first = read_files(folders[0])
    if stump:
        for path in sorted(folders[1].rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            elif path.name != "federation.toml":
                path.unlink()
    else:
        unfinish(folders[1])
    said = command("resume", "trials")
    assert said.code == 0, said.err
    assert "2 trials" in said.out
    assert [metrics_without_time(folder) for folder in folders] == whole
    assert read_files(folders[0]) == first


# Words.


def test_list_names_everything_there_is(command: Command) -> None:
    said = command("list")
    assert said.code == 0
    for name in ("gpfl", "fedavg", "local", "digits", "pathological", "dirichlet", "cnn4", "mlp", "loop", "vmap"):
        assert re.search(rf"^  {name} +\S", said.out, re.M), name
    assert all(re.search(rf"^  {name} +\S", said.out, re.M) for name in METHODS)


def test_list_of_one_kind_is_that_kind_alone(command: Command) -> None:
    said = command("list", "nets")
    assert [line.split()[0] for line in said.out.splitlines()] == ["nets", *NETS]


@pytest.mark.parametrize("name", ["", "run", "resume", "list", "quickstart", "compare"])
def test_help_renders(command: Command, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = command(*([name] if name else []), "--help")
    assert said.code == 0
    assert "Usage: gpfl" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    ("words", "said"),
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
def test_help_says_what_arguments_are(command: Command, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = command(*words, "--help").out
    assert said in shown[shown.index("Arguments:") : shown.index("\nOptions:")]


@pytest.mark.parametrize("section", options.DEFAULT_NAMES)
def test_help_of_run_has_the_flags_of_the_chosen_method_and_no_other(command: Command, section: str) -> None:
    for name, record in options.RECORDS[section].items():
        chosen = (f"--{section}", "my.csv" if name == FILES else name)
        for arguments in (("--help", *chosen), (*chosen, "--help")):
            text = command("run", *arguments).out
            listed = {key for key in options.keys_of(section) if re.search(rf"^  {flag_pattern(section, key)} ", text, re.M)}
            assert listed == set(options_of(record)), f"{section} {name}"


def flag_pattern(section: str, key: str) -> str:
    flag = options.flag_name(section, key)
    return rf"--(\[no-\])?{flag[2:]}"


def test_help_of_run_has_a_flag_for_every_other_option_of_a_run(command: Command) -> None:
    text = command("run", "--help").out
    for section in ("train", "defence", "run"):
        missing = [key for key in options.keys_of(section) if not re.search(rf"^  {flag_pattern(section, key)} ", text, re.M)]
        assert missing == [], section
    assert all(f"\n  {flag} " in text for flag in ("--out", "--seeds", "--set", "--federation"))


def test_help_gives_the_defaults_of_the_chosen_data(command: Command) -> None:
    digits, cifar = (" ".join(command("run", "--data", name, "--help").out.split()) for name in ("digits", "cifar100"))
    assert "--rounds N T: rounds of training [default: 40]" in digits
    assert "[default: mlp]" in digits
    assert "[default: cnn4]" in cifar


def test_help_of_an_unknown_method_suggests_one(command: Command) -> None:
    assert_refused(command("run", "--method", "dito", "--help"), "unknown method 'dito'; did you mean 'ditto'?")


def test_command_alone_shows_its_help(command: Command) -> None:
    said = command()
    assert "quickstart" in said.out + said.err


def test_version_is_the_packages(command: Command) -> None:
    assert command("--version").out == f"gpfl {gpfl.__version__}\n"


@pytest.mark.parametrize("name", ["a[bold]b", "a[/b]", "a:smile:b"])
def test_folders_are_printed_as_they_are_named(command: Command, name: str) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--out", name).code == 0
    unfinish(Path(name))
    said = command("resume", name)
    assert said.code == 0, said.err
    assert said.out.splitlines()[0].startswith(f"{name}: round 0/2, ")
    assert f"Run: {name}. " in said.out
    assert_refused(command("resume", f"{name}!"), f"{name}! holds no run")


# Bad input: exit code 2, one line, nothing written.


def assert_refused(said: CommandResult, *words: str) -> None:
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("gpfl: ")
    assert said.err.count("\n") == 1
    assert said.err.endswith("\n")
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err


MISTAKES: list[tuple[str, tuple[str, ...]]] = [
    ("--method gpfll", ("unknown method 'gpfll'", "did you mean 'gpfl'?")),
    ("--data digit", ("unknown data 'digit'", "did you mean 'digits'?")),
    ("--partition dirichlett", ("unknown partition 'dirichlett'", "did you mean 'dirichlet'?")),
    ("--net cnn5", ("unknown net 'cnn5'", "did you mean 'cnn4'?")),
    ("--engine lopo", ("run.engine (--engine) is 'lopo'", "did you mean 'loop'?")),
    ("--set method.lamb=1", ("unknown key 'method.lamb'", "did you mean 'lam'?")),
    ("--set train.round=3", ("unknown key 'train.round'", "did you mean 'rounds'?")),
    ("--set trian.rounds=3", ("unknown section 'trian'", "did you mean 'train'?")),
    ("--set rounds=3", ("--set rounds=3 is not of the form section.key=value",)),
    ("--set train.rounds", ("is not of the form section.key=value",)),
    ("--roundz 3", ("No such option '--roundz'", "Did you mean", "--rounds")),
    ("--rounds", ("'--rounds' requires an argument",)),
    ("--rounds many", ("train.rounds (--rounds) is 'many'; it must be an integer",)),
    ("--rounds 0", ("train.rounds (--rounds) is 0; it must be at least 1",)),
    ("--lr -0.1", ("train.lr (--lr) is -0.1; it must be above 0",)),
    ("--lr nan", ("train.lr (--lr) is nan",)),
    ("--client-fraction 1.5", ("train.client_fraction (--client-fraction) is 1.5", "at most 1")),
    ("--client-fraction 0", ("train.client_fraction (--client-fraction) is 0", "above 0")),
    ("--seed -1", ("run.seed (--seed) is -1; it must be at least 0 and at most 4294967295",)),
    ("--partition-seed -1", ("partition.seed (--partition-seed) is -1",)),
    ("--set train.lr=-1", ("train.lr (--lr) is -1; it must be above 0",)),
    ("--seeds 0,4294967296", ("each must be at least 0 and at most 4294967295",)),
    ("--seeds 0,1 --seed 4", ("--seed and --seeds exclude each other: leave one out",)),
    ("--seeds 0,1 --set run.seed=4", ("--seed and --seeds exclude each other",)),
    ("--federation f.toml --clients 3", ("--federation f.toml already assigns the samples to clients: leave out --clients",)),
    ("--federation f.toml --partition dirichlet", ("leave out --partition",)),
    ("--federation f.toml --beta 0.1", ("leave out --beta",)),
    ("--federation f.toml --set partition.seed=3", ("leave out --partition-seed",)),
    ("--out=", ("--out is empty; name a folder",)),
    ("twice.toml", ("twice.toml: 'train' is a list of sections, [[train]]; write one section, [train]",)),
    ("--seeds 0,x", ("--seeds is '0,x'; it must be integers separated by commas",)),
    ("--seeds 1,1", ("--seeds is '1,1'; each must be given once",)),
    (
        "--method fedavg --lam 0.1",
        ("method.lam (--lam) belongs to method gpfl, pfedme, ditto, fedphp, fedproto, not to fedavg",),
    ),
    ("--personal-epochs 2", ("method.personal_epochs (--personal-epochs) belongs to method ditto, not to gpfl",)),
    ("--net mlp --channels 4,4", ("net.channels (--channels) belongs to net cnn4, not to mlp",)),
    ("--classes-per-client 4", ("partition.classes_per_client (--classes-per-client) is 4; the data has 3 classes",)),
    ("--clients 1 --classes-per-client 2", ("1 clients × 2 classes = 2 places for 3 classes", "raise --clients")),
    ("--clients 4000", ("lower --clients",)),
    ("--partition dirichlet --beta -1", ("partition.beta (--beta) is -1; it must be above 0",)),
    ("--partition dirichlet --beta 0.001 --min-samples 29", ("raise --beta, or lower --clients or --min-samples",)),
    (
        "--partition dirichlet --balanced",
        ("partition.balanced (--balanced) belongs to partition pathological, not to dirichlet",),
    ),
    ("--clients 120 --classes-per-client 1", ("client 0 has no training rows (0 training, 1 test)", "--clients")),
    ("--select validation", ("no client has validation samples: set --validation-fraction",)),
    ("--device abacus", ("run.device (--device) is 'abacus'; it must be auto, cpu, cuda, cuda:N or mps",)),
    ("--device meta", ("run.device (--device) is 'meta'; it must be",)),
    ("--device cuda:99", ("run.device (--device) is 'cuda:99', which cannot be used here",)),
    ("--net cnn4", ("net 'cnn4' takes images", "use 'mlp'")),
    ("--federation nowhere.toml", ("cannot read nowhere.toml",)),
    ("--federation broken.toml", ("broken.toml is not a TOML file",)),
    ("--federation empty.toml", ("empty.toml is not a federation manifest",)),
    ("nowhere.toml", ("cannot read nowhere.toml",)),
    ("broken.toml", ("broken.toml is not a TOML file",)),
]


@pytest.mark.parametrize(("given", "words"), MISTAKES, ids=[given for given, _ in MISTAKES])
def test_mistake_is_one_line_with_exit_code_2_and_nothing_is_written(
    command: Command, given: str, words: tuple[str, ...]
) -> None:
    Path("broken.toml").write_text("[run\nseed = ")
    Path("empty.toml").write_text("")
    Path("twice.toml").write_text("[[train]]\nrounds = 1\n")
    before = read_files(Path())
    data = () if "--data" in given else ("--data", "toy")
    assert_refused(command("run", *data, *given.split()), *words)
    assert read_files(Path()) == before
    assert not Path("runs").exists()


def test_unknown_command_and_list_are_one_line(command: Command) -> None:
    said = command("rnu")
    assert_refused(said, "No such command 'rnu'")
    assert said.err.count("Did you mean") <= 1
    assert_refused(command("list", "method"), "unknown list 'method'; did you mean 'methods'?")


def broken_tables() -> dict[str, tuple[Callable[[], gpfl.Table], str]]:
    x, y = np.zeros((40, 2), dtype=np.float32), np.arange(40) % 2
    holed = x.copy()
    holed[7, 1] = np.nan
    return {
        "nan": (lambda: gpfl.Table(holed, y, name="sick"), "data 'sick' has NaN or infinity in 1 of 40 rows, first in row 7"),
        "labels": (lambda: gpfl.Table(x, y, classes=1, name="sick"), "data 'sick' has label 1 in row 1; labels must be 0 to 0"),
        "negative": (lambda: gpfl.Table(x, -y, name="sick"), "has label -1 in row 1"),
    }


@pytest.mark.parametrize("kind", broken_tables())
def test_broken_data_are_refused_before_anything_is_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    make, words = broken_tables()[kind]
    monkeypatch.setitem(DATASETS, "sick", ToyDataset(make=make))
    assert_refused(command("run", "--data", "sick", "--out", "run"), words)
    assert not Path("run").exists()


@pytest.mark.parametrize(("part", "words"), [("train", "has no training rows"), ("test", "has no test rows")])
def test_manifest_with_a_client_that_lacks_rows_is_refused(command: Command, part: str, words: str) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--out", "run").code == 0
    text = Path("run/federation.toml").read_text()
    Path("bad.toml").write_text(re.sub(rf"^{part} = \[.*\]$", f"{part} = []", text, count=1, flags=re.M))
    assert_refused(command("run", "--data", "toy", "--federation", "bad.toml", "--out", "two"), "client 0", words)
    assert not Path("two").exists()


def test_manifest_of_other_data_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--out", "run").code == 0
    monkeypatch.setitem(DATASETS, "toy", ToyDataset(make=lambda: toy_table(120, seed=5)))
    said = command("run", "--data", "toy", "--federation", "run/federation.toml", "--out", "two")
    assert_refused(said, "divides a table with sha256")
    assert not Path("two").exists()


@pytest.mark.parametrize("extra", [(), ("--seeds", "0,1")], ids=["run", "trials"])
def test_used_folder_is_refused_and_left_as_it_is(command: Command, extra: tuple[str, ...]) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--out", "run").code == 0
    before = read_files(Path("run"))
    said = command("run", "--data", "toy", "--rounds", 2, "--out", "run", *extra)
    assert_refused(said, "--out run is not empty and nothing is overwritten", "gpfl resume run")
    assert read_files(Path("run")) == before


def test_folder_that_cannot_be_made_is_refused(command: Command) -> None:
    Path("file").write_text("mine")
    assert_refused(command("run", "--data", "toy", "--out", "file"), "--out file is a file; choose a folder")
    assert_refused(command("run", "--data", "toy", "--out", "file/below"), "cannot make the folder file/below")
    assert Path("file").read_text() == "mine"


def test_quickstart_refuses_a_used_folder(command: Command) -> None:
    Path("mine").mkdir()
    Path("mine/table.md").write_text("mine")
    assert_refused(command("quickstart", "--out", "mine"), "--out mine is not empty and nothing is overwritten")
    assert read_files(Path("mine")) == {"table.md": b"mine"}


def test_resume_of_no_run_is_refused(command: Command) -> None:
    assert_refused(command("resume", "nowhere"), "nowhere holds no run", "start one with gpfl run --out nowhere")
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("mine")
    full = command("resume", "notes")
    assert_refused(full, "notes holds no run (no config.toml); give the folder of a run")
    assert "gpfl run" not in full.err
    assert_refused(command("resume", "notes/mine.txt"), "notes/mine.txt is a file; give the folder of a run")
    assert_refused(command("resume"), "Missing argument 'DIR'")


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("checkpoint.safetensors", lambda b: b[:-5], "checkpoint.safetensors is damaged"),
        ("checkpoint.safetensors", lambda b: b[:-5] + b"wrong", "checkpoint.safetensors is damaged (its checksum"),
        ("checkpoint.safetensors", lambda b: b"", "checkpoint.safetensors is damaged"),
        ("config.toml", lambda b: b"[run", "config.toml has changed since the run wrote it: restore it"),
        ("config.toml", lambda b: b"[run", "config.toml is not a TOML file"),
        ("config.toml", lambda b: b.replace(b"rounds = 2", b"rounds = 3"), "config.toml has changed since checkpoint"),
        ("config.toml", lambda b: b.replace(b"lr = 0.1", b"lr = 0.2"), "restore it, or start a new run in another folder"),
        ("config.toml", lambda b: b + b"\n", "config.toml has changed since"),
        ("federation.toml", lambda b: b"", "federation.toml has changed since the run wrote it: restore it"),
        ("config.toml", lambda b: b.replace(b"rounds", b"runds"), "unknown key 'train.runds'; did you mean 'rounds'?"),
        ("federation.toml", lambda b: b[:100], "federation.toml is not a"),
        ("federation.toml", lambda b: b.replace(b'sha256 = "', b'sha256 = "0'), "divides a table with sha256 0"),
        ("metrics.jsonl", lambda b: b[: len(b) // 2], "metrics.jsonl is damaged (it lacks round"),
    ],
)
def test_damaged_run_is_refused_and_left_as_it_is(
    command: Command, name: str, damage: Callable[[bytes], bytes], words: str
) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--rounds", 2, "--out", "run").code == 0
    Path("run/summary.json").unlink()
    path = Path("run") / name
    path.write_bytes(damage(path.read_bytes()))
    before = read_files(Path("run"))
    assert_refused(command("resume", "run"), words)
    assert read_files(Path("run")) == before


def test_damaged_list_of_trials_is_refused(command: Command) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--seeds", "0,1", "--out", "trials").code == 0
    path = Path("trials/trials.json")
    for text in (
        '{"method": "gpfl", "seeds": "all"}',
        '{"method": "gpfl", "seeds": []}',
        '{"method": "gpfl", "seeds": [true]}',
    ):
        path.write_text(text)
        assert_refused(command("resume", "trials"), "trials.json does not list seeds", '"seeds": [0, 1, 2]')
    path.write_text('{"method": 3, "seeds": [0]}')
    assert_refused(command("resume", "trials"), "trials.json does not name the method")
    path.write_text("[]")
    assert_refused(command("resume", "trials"), "trials.json is damaged (it holds no JSON object)")
    path.unlink()
    assert_refused(command("resume", "trials"), "cannot read trials/trials.json (No such file or directory)")
    path.mkdir()
    assert_refused(command("resume", "trials"), "cannot read trials/trials.json (Is a directory)")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"best_accuracy": None}, "'best_accuracy' is None, not a number"),
        ({"seconds": "1.0"}, "'seconds' is '1.0', not a number"),
        ({"std": float("nan")}, "'std' is nan, not a number"),
        ({"method": 3}, "'method' is 3, not text"),
        ({"cov": ...}, "it lacks 'cov'"),
    ],
)
@pytest.mark.parametrize("folder", ["run", "trials"])
def test_damaged_summary_is_one_line_and_its_way_out_works(
    command: Command, folder: str, change: dict[str, object], words: str
) -> None:
    seeds = ("--seeds", "0,1") if folder == "trials" else ()
    assert command("run", "--data", "toy", "--rounds", 1, "--method", "local", *seeds, "--out", folder).code == 0
    path = Path(folder, "seed-1" if seeds else "", "summary.json")
    good = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**good, **change}.items() if value is not ...}))
    said = command("resume", folder)
    assert_refused(said, f"summary.json is damaged ({words}): remove it and gpfl resume {path.parent}")
    path.unlink()
    assert command("resume", folder).code == 0
    assert json.loads(path.read_text()) == good


@pytest.mark.parametrize("line", ['{"round": 1}', '{"round": 1, "accuracy": "high", "loss": 1.0}', "NaN", "3"])
def test_damaged_metrics_of_a_finished_run_are_one_line(command: Command, line: str) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--out", "run").code == 0
    path = Path("run/metrics.jsonl")
    path.write_text(path.read_text().splitlines(keepends=True)[0] + line + "\n")
    said = command("resume", "run")
    assert_refused(said, "metrics.jsonl is damaged (it lacks round 1): remove summary.json and checkpoint.safetensors")
    path.unlink()
    path.mkdir()
    assert_refused(command("resume", "run"), "cannot read run/metrics.jsonl: Is a directory")


def test_line_without_the_validation_accuracy_is_damaged_where_there_are_such_rows(command: Command) -> None:
    assert command("run", "--data", "toy", "--method", "local", "--validation-fraction", 0.3, "--out", "run").code == 0
    path = Path("run/metrics.jsonl")
    path.write_text(path.read_text().replace("validation", "elsewhere"))
    assert_refused(command("resume", "run"), "metrics.jsonl is damaged (it lacks round 0)")


def test_nan_loss_ends_the_command_with_round_client_and_checkpoint_named(command: Command) -> None:
    said = command("run", "--data", "toy", "--lr", "1e30", "--out", "run")
    assert said.code == 2
    assert re.match(r"gpfl: round \d: .* client \d .*: lower train.lr \(--lr or --set train.lr=…, now 1e\+30\)", said.err)
    assert said.err.count("\n") == 1
    assert "the last good checkpoint is kept in run/checkpoint.safetensors" in said.err
    assert Path("run/checkpoint.safetensors").exists()
    assert not Path("run/summary.json").exists()


# The command as a person starts it.


def test_installed_or_not_the_command_runs_as_a_module(tmp_path: Path) -> None:
    said = system("run", "--rounds", "1", "--clients", "4", "--batch-size", "100", "--out", "run", folder=tmp_path)
    assert said.code == 0, said.err
    assert said.err == ""
    assert "\x1b" not in said.out
    assert [line.split(",")[0] for line in said.out.splitlines()[:2]] == ["gpfl: round 0/1", "gpfl: round 1/1"]
    assert RunDir(tmp_path / "run").finished


def stopped_as_soon_as(written: Path, *arguments: str) -> CommandResult:
    """The command as another process that is sent Ctrl-C once a file has a line."""
    # A shell without job control hands SIGINT down as ignored, so it is set anew.
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


def test_ctrl_c_ends_a_run_with_the_command_that_goes_on_with_it(command: Command) -> None:
    given = ("run", "--clients", "2", "--classes-per-client", "5", "--hidden", "4", "--rounds", "100000", "--batch-size", "600")
    said = stopped_as_soon_as(Path("my run/metrics.jsonl"), *given, "--out", "my run")
    assert said.err == "gpfl: stopped; resume with: python -m gpfl resume 'my run'\n"
    assert said.code == 130
    assert not RunDir("my run").finished


def script() -> str:
    """What the installed command calls."""
    entry = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]["gpfl"]
    module, _, function = entry.partition(":")
    return f"from {module} import {function}; {function}()"


@pytest.mark.parametrize("start", ["runpy.run_module('gpfl', None, '__main__', True)", script()], ids=["module", "script"])
@pytest.mark.parametrize(
    ("module", "rank", "words"),
    [("gpfl.cli.main", "0", "gpfl: stopped\n"), ("torch", "0", "gpfl: stopped\n"), ("torch", "1", "")],
)
def test_ctrl_c_while_modules_are_loaded_ends_the_command_in_the_same_words(
    tmp_path: Path, start: str, module: str, rank: str, words: str
) -> None:
    code = f"""
import os, runpy, signal, sys

class Stopping:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:  # as modules of others do that try what there is
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Stopping())
sys.argv = ["gpfl", "list"]
{start}
"""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "RANK": rank}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", words)


def test_ctrl_c_that_is_ignored_from_the_start_stays_so(tmp_path: Path) -> None:
    code = """
import os, runpy, signal, sys

class Stopping:
    def find_spec(self, name, path=None, target=None):
        if name == "gpfl.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.meta_path.insert(0, Stopping())
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
    ("arguments", "words"),
    [
        (("run", "--data", "toy", "--out", "run"), "gpfl: stopped\n"),
        (("list",), "gpfl: stopped\n"),
        (("quickstart", "--out", "quick"), "gpfl: stopped; resume with: gpfl quickstart --out quick\n"),
        (("compare", "--data", "toy", "--out", "all"), "gpfl: stopped\n"),
    ],
)
def test_ctrl_c_before_anything_is_written_advises_nothing_that_would_be_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    def stop(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpfl.training.config.find_dataset", stop)
    monkeypatch.setattr("gpfl.cli.list.first_line", stop)
    said = command(*arguments)
    assert (said.code, said.err) == (130, words)


@pytest.mark.parametrize("seeds", [(), ("--seeds", "3,4")], ids=["run", "trials"])
def test_ctrl_c_while_resuming_names_the_folder(
    command: Command, monkeypatch: pytest.MonkeyPatch, seeds: tuple[str, ...]
) -> None:
    def stop(folder: RunDir, line: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunDir, "append", stop)
    for arguments in (("run", "--data", "toy", *seeds, "--out", "here"), ("resume", "here")):
        said = command(*arguments)
        assert (said.code, said.err) == (130, "gpfl: stopped; resume with: gpfl resume here\n")


def test_mistake_in_another_process_is_one_line_too(tmp_path: Path) -> None:
    assert_refused(system("run", "--method", "fedavgg", folder=tmp_path), "did you mean 'fedavg'?")
    assert list(tmp_path.iterdir()) == []


def test_data_sets_are_listed_with_what_is_here_and_their_licence(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GPFL_DATA", str(tmp_path))
    said = command("data", "list")
    assert said.code == 0
    for name in DATASETS:
        assert name in said.out
    assert "CC BY 4.0" in said.out


def test_data_show_prints_sizes_and_draws_the_picture(command: Command, tmp_path: Path) -> None:
    picture = tmp_path / "bubbles.png"
    said = command("data", "show", "--data", "digits", "--clients", "5", "--classes-per-client", "3", "--out", str(picture))
    assert said.code == 0, said.err
    assert "Federation of 5 clients on 'digits'" in said.out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("get", "cifar10"), "did you mean 'cifar100'"),
        (("get", "har", "--from", "nowhere"), "--from nowhere does not exist"),
        (("get", "har", "--from", "."), "does not hold the files of 'har'"),
        (("show", "--data", "digits", "--partition", "natural"), "does not tell the group of a row"),
    ],
)
def test_mistake_about_data_is_one_line(
    command: Command, words: tuple[str, ...], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    said = command("data", *words)
    assert said.code == 2
    assert part in said.err
    assert said.err.count("\n") == 1


def test_data_inside_a_package_needs_no_getting(command: Command) -> None:
    assert "nothing to get" in command("data", "get", "digits").out


# Paths that a machine refuses.


@pytest.mark.parametrize(
    "words",
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
def test_path_that_no_machine_takes_is_named_in_one_line(command: Command, words: str) -> None:
    said = command(*words.format("x" * 300).split())
    assert said.code == 2
    assert "xxx" in said.err
    assert "File name too long" in said.err
    assert said.err.count("\n") == 1
