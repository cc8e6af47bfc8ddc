"""The command `gpfl run`: options, config, errors and what it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, ToyDataset, assert_error, metrics_without_time, read_files, toy_table

import gpfl
from gpfl.cli import options
from gpfl.core.options import options_of
from gpfl.data import DATASETS, FILES
from gpfl.io import toml
from gpfl.training.run_dir import RunDir, metric


def config(folder: Path) -> dict[str, dict[str, object]]:
    """Return the config that a run wrote."""
    return toml.read(folder / "config.toml")  # type: ignore[return-value]


def test_run_prints_plain_lines_and_writes_to_out(command: Command) -> None:
    result = command("run", "--data", "toy", "--out", "here")
    assert result.code == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert re.fullmatch(r"gpfl: round 0/2, accuracy \d+\.\d\d%, loss \d+\.\d{4}", lines[0])
    assert re.fullmatch(r"gpfl: round 2/2, accuracy \d+\.\d\d%, loss \d+\.\d{4}", lines[1])
    assert re.fullmatch(
        r"gpfl: accuracy \S+% at round 2 \(last round\), std over clients \S+%, \d+\.\d s \(vmap on cpu\)\.", lines[2]
    )
    rows = ["0", "1", "2", "3", "mean over clients", "worst tenth", "all samples"]
    assert [line.split("  ")[0] for line in lines if line.split("  ")[0] in rows] == rows
    assert lines[-1] == "Run: here. Each client's model (round 2): here/models"
    assert "best" not in result.out
    assert "\x1b" not in result.out
    assert {"config.toml", "summary.json", "metrics.jsonl", "models/client-3.safetensors"} <= read_files(Path("here")).keys()


def test_run_without_out_uses_the_first_free_folder(command: Command) -> None:
    for _ in range(2):
        assert command("run", "--data", "toy", "--method", "local", "--rounds", 1).code == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["toy-local", "toy-local-2"]


def test_flags_reach_the_config(command: Command) -> None:
    line = (
        "run --data toy --method gpfl --lam 1e-3 --partition dirichlet --clients 3 --beta 5 --partition-seed 2 "
        "--validation-fraction 0.2 --rounds 1 --lr 0.05 --client-fraction 0.5,1 --no-shuffle --hidden 8,4 "
        "--seed 7 --engine loop --out run"
    )
    result = command(*line.split())
    assert result.code == 0, result.err
    written = config(Path("run"))
    assert written["method"]["name"] == "gpfl"
    assert written["method"]["lam"] == 0.001
    partition = {"name": "dirichlet", "clients": 3, "beta": 5.0, "seed": 2, "validation_fraction": 0.2}
    assert written["partition"] | partition == written["partition"]
    assert written["train"] | {"rounds": 1, "lr": 0.05, "client_fraction": [0.5, 1.0], "shuffle": False} == written["train"]
    assert written["run"] | {"seed": 7, "engine": "loop"} == written["run"]
    assert written["net"] == {"name": "mlp", "hidden": [8, 4]}
    assert "(round chosen on validation samples)" in result.out


def test_name_of_a_method_may_have_a_hyphen(command: Command) -> None:
    assert command("run", "--data", "toy", "--method", "fedavg-ft", "--ft-epochs", 2, "--ft-parts", "head").code == 0
    folder = Path("runs/toy-fedavg-ft")
    assert config(folder)["method"] == {"name": "fedavg-ft", "ft_epochs": 2, "ft_parts": "head", "ft_lr": 0.1}
    assert command("run", folder / "config.toml", "--out", "again").code == 0
    assert metrics_without_time(Path("again")) == metrics_without_time(folder)
    compare = ("compare", "--data", "toy", "--methods", "fedavg,fedavg-ft", "--seeds", 0, "--out", "both")
    assert command(*compare, "--set", "fedavg-ft.ft_epochs=1").code == 0
    assert config(Path("both/fedavg-ft/seed-0"))["method"]["ft_epochs"] == 1
    assert (Path("both/fedavg/seed-0") / "summary.json").exists()


def test_set_overrides_flags_and_flags_override_the_file(command: Command) -> None:
    Path("my.toml").write_text(
        '[data]\nname = "toy"\n[train]\nrounds = 3\nlr = 0.3\nepochs = 2\n[method]\nlam = 0.5\nmu = 0.5\n'
    )
    assert command("run", "my.toml", "--lr", 0.2, "--lam", 0.2, "--set", "method.lam=0.1", "--out", "run").code == 0
    written = config(Path("run"))
    assert (written["train"]["rounds"], written["train"]["lr"], written["train"]["epochs"]) == (3, 0.2, 2)
    assert (written["method"]["lam"], written["method"]["mu"]) == (0.1, 0.5)


def test_the_config_of_a_run_repeats_it(command: Command) -> None:
    assert command("run", "--data", "toy", "--clients", 3, "--seed", 3, "--client-fraction", 0.5, "--out", "one").code == 0
    assert command("run", "one/config.toml", "--out", "two").code == 0
    assert metrics_without_time(Path("one")) == metrics_without_time(Path("two"))
    assert Path("one/config.toml").read_bytes() == Path("two/config.toml").read_bytes()


def test_another_method_by_flag_drops_the_method_options_of_the_file(command: Command) -> None:
    assert command("run", "--data", "toy", "--out", "one").code == 0
    result = command("run", "one/config.toml", "--method", "fedavg", "--out", "two")
    assert result.code == 0, result.err
    assert config(Path("two"))["method"] == {"name": "fedavg"}


def test_a_federation_manifest_repeats_the_partition(command: Command) -> None:
    assert command("run", "--data", "toy", "--partition-seed", 9, "--rounds", 1, "--out", "one").code == 0
    result = command("run", "--data", "toy", "--federation", "one/federation.toml", "--rounds", 1, "--out", "two")
    assert result.code == 0, result.err
    assert Path("one/federation.toml").read_bytes() == Path("two/federation.toml").read_bytes()
    assert metrics_without_time(Path("one")) == metrics_without_time(Path("two"))
    assert command("run", "two/config.toml", "--out", "three").code == 0
    assert metrics_without_time(Path("three")) == metrics_without_time(Path("one"))


def test_seeds_run_trials_on_one_partition_and_report_mean_and_std(command: Command) -> None:
    result = command("run", "--data", "toy", "--method", "local", "--seeds", "0,1,2", "--out", "trials")
    assert result.code == 0, result.err
    folders = [Path("trials") / f"seed-{seed}" for seed in (0, 1, 2)]
    summaries = [RunDir(folder).read_summary() for folder in folders]
    best = np.array([summary["best_accuracy"] for summary in summaries])
    assert [summary["seed"] for summary in summaries] == [0, 1, 2]
    assert len({(folder / "federation.toml").read_bytes() for folder in folders}) == 1
    assert f"{100 * best.mean():.2f} ± {100 * best.std():.2f}" in result.out
    trials = json.loads(Path("trials/trials.json").read_text())
    assert trials["best_accuracy"] == {"mean": pytest.approx(best.mean()), "std": pytest.approx(best.std())}
    alone = command("run", "--data", "toy", "--method", "local", "--seed", 1, "--out", "alone")
    assert alone.code == 0
    assert metrics_without_time(Path("alone")) == metrics_without_time(folders[1])


def test_round_chosen_on_validation_samples_is_reported(command: Command) -> None:
    result = command("run", "--data", "toy", "--validation-fraction", 0.3, "--out", "run")
    summary = RunDir(Path("run")).read_summary()
    number, accuracy = summary["validation_best_round"], summary["validation_best_accuracy"]
    assert f"gpfl: accuracy {accuracy:.2%} at round {number} (round chosen on validation samples), " in result.out
    assert f"Each client's model (round {number})" in result.out


def test_best_round_on_test_samples_has_no_other_name(command: Command) -> None:
    result = command("run", "--data", "toy", "--select", "test", "--out", "run")
    summary = RunDir(Path("run")).read_summary()
    beginning = f"gpfl: accuracy {summary['best_accuracy']:.2%} at round {summary['best_round']} "
    assert f"{beginning}(best round on test samples, as the paper reports), " in result.out


def test_metric_selects_the_round_and_is_reported(command: Command) -> None:
    line = "run --data toy --validation-fraction 0.3 --metric log_loss --rounds 4 --out run"
    result = command(*line.split())
    assert result.code == 0, result.err
    summary = RunDir(Path("run")).read_summary()
    records = RunDir(Path("run")).read_complete_metrics()
    chosen = min(records, key=lambda record: metric(record, "validation_log_loss"))
    assert (summary["selected_round"], summary["selected_log_loss"]) == (chosen["round"], chosen["log_loss"])
    assert chosen["log_loss"] == pytest.approx(chosen["loss"])
    assert f"gpfl: log loss {chosen['log_loss']:.4f}, accuracy " in result.out
    assert config(Path("run"))["run"]["metric"] == "log_loss"


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
    ("--seeds 0,4294967296", ("each number must be at least 0 and at most 4294967295",)),
    ("--seeds 0,1 --seed 4", ("--seed and --seeds exclude each other: leave one out",)),
    ("--seeds 0,1 --set run.seed=4", ("--seed and --seeds exclude each other",)),
    ("--federation f.toml --clients 3", ("--federation f.toml already assigns the samples to clients: leave out --clients",)),
    ("--federation f.toml --partition dirichlet", ("leave out --partition",)),
    ("--federation f.toml --beta 0.1", ("leave out --beta",)),
    ("--federation f.toml --set partition.seed=3", ("leave out --partition-seed",)),
    ("--out=", ("--out is empty; name a folder",)),
    ("twice.toml", ("twice.toml: 'train' is a list of sections, [[train]]; write one section, [train]",)),
    ("--seeds 0,x", ("--seeds is '0,x'; it must be integers separated by commas",)),
    ("--seeds 1,1", ("--seeds is '1,1'; give each only once",)),
    (
        "--method fedavg --lam 0.1",
        ("method.lam (--lam) belongs to method gpfl, pfedme, ditto, fedphp, fedproto, not to fedavg",),
    ),
    ("--personal-epochs 2", ("method.personal_epochs (--personal-epochs) belongs to method ditto, not to gpfl",)),
    ("--net mlp --channels 4,4", ("net.channels (--channels) belongs to net cnn4, not to mlp",)),
    ("--classes-per-client 4", ("partition.classes_per_client (--classes-per-client) is 4; the data has 3 classes",)),
    ("--clients 1 --classes-per-client 2", ("1 clients × 2 classes = 2, but the data has 3 classes", "raise --clients")),
    ("--clients 4000", ("lower --clients",)),
    ("--partition dirichlet --beta -1", ("partition.beta (--beta) is -1; it must be above 0",)),
    ("--partition dirichlet --beta 0.001 --min-samples 29", ("raise --beta, or lower --clients or --min-samples",)),
    (
        "--partition dirichlet --balanced",
        ("partition.balanced (--balanced) belongs to partition pathological, not to dirichlet",),
    ),
    ("--clients 120 --classes-per-client 1", ("client 0 has no training samples (0 training, 1 test)", "--clients")),
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


@pytest.mark.parametrize(("arguments", "phrases"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_with_exit_code_2_and_writes_nothing(
    command: Command, arguments: str, phrases: tuple[str, ...]
) -> None:
    Path("broken.toml").write_text("[run\nseed = ")
    Path("empty.toml").write_text("")
    Path("twice.toml").write_text("[[train]]\nrounds = 1\n")
    before = read_files(Path())
    data = () if "--data" in arguments else ("--data", "toy")
    assert_error(command("run", *data, *arguments.split()), *phrases)
    assert read_files(Path()) == before
    assert not Path("runs").exists()


def invalid_tables() -> dict[str, tuple[Callable[[], gpfl.Table], str]]:
    """Return tables that cannot be trained on, with the error."""
    x, y = np.zeros((40, 2), dtype=np.float32), np.arange(40) % 2
    broken = x.copy()
    broken[7, 1] = np.nan
    return {
        "nan": (
            lambda: gpfl.Table(broken, y, name="sick"),
            "data 'sick' has NaN or infinity in 1 of 40 rows, first in row 7",
        ),
        "labels": (lambda: gpfl.Table(x, y, classes=1, name="sick"), "data 'sick' has label 1 in row 1; labels must be 0 to 0"),
        "negative": (lambda: gpfl.Table(x, -y, name="sick"), "has label -1 in row 1"),
    }


@pytest.mark.parametrize("kind", invalid_tables())
def test_invalid_data_is_an_error_before_anything_is_written(
    command: Command, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    make, message = invalid_tables()[kind]
    monkeypatch.setitem(DATASETS, "sick", ToyDataset(make=make))
    assert_error(command("run", "--data", "sick", "--out", "run"), message)
    assert not Path("run").exists()


@pytest.mark.parametrize(("split", "message"), [("train", "has no training samples"), ("test", "has no test samples")])
def test_a_manifest_with_an_empty_split_of_a_client_is_an_error(command: Command, split: str, message: str) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--out", "run").code == 0
    text = Path("run/federation.toml").read_text()
    Path("bad.toml").write_text(re.sub(rf"^{split} = \[.*\]$", f"{split} = []", text, count=1, flags=re.M))
    assert_error(command("run", "--data", "toy", "--federation", "bad.toml", "--out", "two"), "client 0", message)
    assert not Path("two").exists()


def test_a_manifest_of_other_data_is_an_error(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--out", "run").code == 0
    monkeypatch.setitem(DATASETS, "toy", ToyDataset(make=lambda: toy_table(120, seed=5)))
    result = command("run", "--data", "toy", "--federation", "run/federation.toml", "--out", "two")
    assert_error(result, "divides a table with sha256")
    assert not Path("two").exists()


@pytest.mark.parametrize("extra", [(), ("--seeds", "0,1")], ids=["run", "trials"])
def test_a_used_folder_is_an_error_and_stays_unchanged(command: Command, extra: tuple[str, ...]) -> None:
    assert command("run", "--data", "toy", "--rounds", 1, "--out", "run").code == 0
    before = read_files(Path("run"))
    result = command("run", "--data", "toy", "--rounds", 2, "--out", "run", *extra)
    assert_error(result, "--out run is not empty and nothing is overwritten", "gpfl resume run")
    assert read_files(Path("run")) == before


def test_a_folder_that_cannot_be_created_is_an_error(command: Command) -> None:
    Path("file").write_text("mine")
    assert_error(command("run", "--data", "toy", "--out", "file"), "--out file is a file; choose a folder")
    assert_error(command("run", "--data", "toy", "--out", "file/below"), "cannot make the folder file/below")
    assert Path("file").read_text() == "mine"


def test_a_nan_loss_is_an_error_that_names_round_client_and_checkpoint(command: Command) -> None:
    result = command("run", "--data", "toy", "--lr", "1e30", "--out", "run")
    assert result.code == 2
    assert re.match(r"gpfl: round \d: .* client \d .*: lower train.lr \(--lr or --set train.lr=…, now 1e\+30\)", result.err)
    assert result.err.count("\n") == 1
    assert "the last good checkpoint is kept in run/checkpoint.safetensors" in result.err
    assert Path("run/checkpoint.safetensors").exists()
    assert not Path("run/summary.json").exists()


@pytest.mark.parametrize("section", options.DEFAULT_NAMES)
def test_help_lists_the_options_of_the_chosen_method_only(command: Command, section: str) -> None:
    for name, record in options.RECORDS[section].items():
        chosen = (f"--{section}", "my.csv" if name == FILES else name)
        for arguments in (("--help", *chosen), (*chosen, "--help")):
            text = command("run", *arguments).out
            listed = {key for key in options.keys_of(section) if re.search(rf"^  {flag_pattern(section, key)} ", text, re.M)}
            assert listed == set(options_of(record)), f"{section} {name}"


def flag_pattern(section: str, key: str) -> str:
    """Return a regular expression for a flag in the help."""
    flag = options.flag_name(section, key)
    return rf"--(\[no-\])?{flag[2:]}"


def test_help_lists_every_option_of_training_defence_and_run(command: Command) -> None:
    text = command("run", "--help").out
    for section in ("train", "defence", "run"):
        missing = [key for key in options.keys_of(section) if not re.search(rf"^  {flag_pattern(section, key)} ", text, re.M)]
        assert missing == [], section
    assert all(f"\n  {flag} " in text for flag in ("--out", "--seeds", "--set", "--federation"))


def test_help_gives_the_defaults_of_the_chosen_dataset(command: Command) -> None:
    digits, cifar = (" ".join(command("run", "--data", name, "--help").out.split()) for name in ("digits", "cifar100"))
    assert "--rounds N T: training rounds [default: 40]" in digits
    assert "[default: mlp]" in digits
    assert "[default: cnn4]" in cifar


def test_help_of_an_unknown_method_suggests_one(command: Command) -> None:
    assert_error(command("run", "--method", "dito", "--help"), "unknown method 'dito'; did you mean 'ditto'?")
