"""Runs on the user's files: what they print, record, resume and read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from conftest import Command, CommandResult, metrics_without_time, read_files
from user_files import GOOD_ROWS, VISITS, file_metadata, lines, load, make_csv, write

import gpfl
from gpfl.cli.options import parse_options
from gpfl.data import FileDataset, Table
from gpfl.data.files import dataset as file_dataset
from gpfl.errors import GpflError
from gpfl.federation import Shard
from gpfl.io import toml
from gpfl.training import config

# Descriptions and warnings.


def shards(**rows: tuple[list[int], list[int]]) -> list[Shard]:
    none = np.array([], dtype=np.int64)
    return [Shard(name, np.array(train), none, np.array(test)) for name, (train, test) in rows.items()]


def test_warnings_count_test_labels_without_training_samples() -> None:
    y = [0, 1, 2, 0, 1, 2, 0, 3]
    table = Table(np.zeros((8, 1)), y, metadata={"classes": ["home", "icu", "ward", "gone"]})
    assert gpfl.Federation(table, shards(a=([0, 1, 2], [3, 4, 5]))).data_warnings() == []
    federation = gpfl.Federation(table, shards(a=([0, 1], [3, 2, 5]), b=([6], [4, 7])))
    assert federation.data_warnings() == [
        "2 classes only in test samples: ward, gone.",
        "4 test samples of 2 clients with labels that their client never trains on (most: client a, 2).",
        "1 client with training samples of one class only: b.",
    ]
    plain = gpfl.Federation(Table(np.zeros((8, 1)), y), shards(a=([0, 1], [2]), b=([3, 4], [6])))
    assert plain.data_warnings() == [
        "1 class only in test samples: 2.",
        "1 test sample of 1 client with labels that their client never trains on (most: client a, 1).",
    ]
    single = gpfl.Federation(Table(np.zeros((8, 1)), y), shards(a=([0], [3]), b=([1], [4])))
    assert single.data_warnings() == ["2 clients with training samples of one class only: a, b."]
    assert repr(gpfl.Federation(table, shards(a=([0, 1], [3])))).startswith("Federation of 1 client on 'arrays': ")


def test_descriptions_use_the_singular(tmp_path: Path) -> None:
    rows = [(1, "n", 0, "train"), (2, "n", 1, "train"), (3, "n", 1, "test")]
    path = write(tmp_path / "a.csv", lines(("a", "client", "label", "part"), *rows))
    assert load(path).description.startswith(
        "a.csv: 3 rows; 1 client by 'client' with 3 rows; train and test from the files.\n2 classes of "
    )
    path = write(tmp_path / "b.csv", lines(("a", "client", "label"), (1, "n", 0), (2, "s", 1)))
    assert load(path).description.startswith("b.csv: 2 rows; 2 clients by 'client' with 1 row; ")


# Runs.


FILE_FLAGS = ("--data", "visits.csv", "--client", "site", "--label", "kind")


def assert_fails(result: CommandResult, *texts: str) -> None:
    """Check for one line of error, after at most the description of the files."""
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.out == "" or result.out.startswith(("visits.csv: ", "divided.csv: "))
    assert result.err.startswith("gpfl: ")
    for text in texts:
        assert text in result.err


def test_run_prints_what_it_found_and_records_how_it_read_the_files(command: Command) -> None:
    write(Path("visits.csv"), lines(*VISITS[:1], *VISITS[1:] * 4))
    result = command("run", "--data", "visits.csv", "--client", "hospital", "--label", "outcome", "--rounds", 1)
    assert result.code == 0, result.err
    assert result.out.splitlines()[:2] == [
        "visits.csv: 24 rows; 2 clients by 'hospital' with 12 rows; random train and test split.",
        "3 classes of 'outcome': home, icu, ward. Inputs: 1 numeric column (age), scaled to mean 0 and std 1; "
        "1 categorical column, one-hot: sex (f, m).",
    ]
    folder = Path("runs/visits-gpfl")
    assert {"models/client-north.safetensors", "models/client-south.safetensors"} <= read_files(folder).keys()
    assert toml.read(folder / "federation.toml")["source"] == {
        "classes": ["home", "icu", "ward"],
        **file_metadata("outcome", client="hospital", scale="federated"),
    }
    assert toml.read(folder / "config.toml")["data"] == {
        "name": str(Path("visits.csv").resolve()),
        "label": "outcome",
        "client": "hospital",
        "split_column": "",
        "ignore": [],
        "scale": "federated",
        "missing": "error",
        "image_size": 0,
    }


def test_run_prints_warnings(command: Command) -> None:
    rows = [(k, who, kind, part) for k, (who, kind, part) in enumerate([("a", "x", "train")] * 4 + [("a", "y", "test")] * 2)]
    rows += [(k, "b", "xy"[k % 2], "test" if k > 4 else "train") for k in range(7)]
    write(Path("v.csv"), lines(("a", "client", "label", "part"), *rows))
    result = command("run", "--data", "v.csv", "--method", "local", "--rounds", 1, "--out", "run")
    assert result.code == 0, result.err
    assert result.out.splitlines()[2:4] == [
        "2 test samples of 1 client with labels that their client never trains on (most: client a, 2).",
        "1 client with training samples of one class only: a.",
    ]
    shown = command("data", "show", "--data", "v.csv")
    assert shown.code == 0, shown.err
    assert "2 test samples of 1 client with labels" in shown.out


def unfinish(folder: Path) -> None:
    """Reset a run to its first line, as after a kill in the first round."""
    (folder / "summary.json").unlink()
    (folder / "checkpoint.safetensors").unlink()
    metrics = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(metrics[0])


def test_a_run_resumes_in_another_folder(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("visits.csv"), make_csv())
    result = command(
        "run", *FILE_FLAGS, "--ignore", "b", "--scale", "none", "--method", "fedavg", "--rounds", 2, "--out", "run"
    )
    assert result.code == 0, result.err
    whole = metrics_without_time(Path("run"))
    unfinish(Path("run"))
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    result = command("resume", "../run")
    assert result.code == 0, result.err
    assert metrics_without_time(Path("../run")) == whole
    again = command("run", "../run/config.toml", "--out", "two")
    assert again.code == 0, again.err
    assert metrics_without_time(Path("two")) == whole
    assert Path("two/config.toml").read_bytes() == Path("../run/config.toml").read_bytes()
    loaded = gpfl.load("../run")
    assert [client.name for client in loaded.clients] == ["s0", "s1", "s2"]


def test_resuming_with_changed_or_missing_files_is_an_error(command: Command) -> None:
    write(Path("visits.csv"), make_csv())
    assert command("run", *FILE_FLAGS, "--method", "local", "--rounds", 1, "--out", "run").code == 0
    write(Path("visits.csv"), make_csv(rows=51))
    assert_fails(command("resume", "run"), "run/federation.toml divides a table with sha256 ", "but the data 'visits.csv' has ")
    Path("visits.csv").unlink()
    assert_fails(command("resume", "run"), f"there is no file or folder {Path('visits.csv').resolve()}")


def test_a_manifest_divides_the_same_file_but_not_a_changed_one(command: Command) -> None:
    write(Path("visits.csv"), make_csv())
    rounds = ("--method", "local", "--rounds", 1)
    assert command("run", *FILE_FLAGS, *rounds, "--partition-seed", 7, "--out", "one").code == 0
    result = command("run", *FILE_FLAGS, *rounds, "--federation", "one/federation.toml", "--out", "two")
    assert result.code == 0, result.err
    assert metrics_without_time(Path("two")) == metrics_without_time(Path("one"))
    assert Path("two/federation.toml").read_bytes() == Path("one/federation.toml").read_bytes()
    write(Path("visits.csv"), make_csv().replace("high", "low", 1))
    result = command("run", *FILE_FLAGS, *rounds, "--federation", "one/federation.toml", "--out", "three")
    assert_fails(result, "one/federation.toml divides a table with sha256", "give the table it was made from")
    assert not Path("three").exists()


def test_a_manifest_names_its_dataset(command: Command) -> None:
    rounds = ("--method", "local", "--rounds", 1)
    assert command("run", "--data", "toy", *rounds, "--out", "one").code == 0
    result = command("run", "--federation", "one/federation.toml", *rounds, "--net", "mlp", "--lr", 0.1, "--out", "two")
    assert result.code == 0, result.err
    assert metrics_without_time(Path("two")) == metrics_without_time(Path("one"))
    assert toml.read(Path("two/config.toml"))["data"] == {"name": "toy"}


def test_a_manifest_of_files_needs_their_path(command: Command, tmp_path: Path) -> None:
    write(Path("visits.csv"), make_csv())
    assert command("run", *FILE_FLAGS, "--method", "local", "--rounds", 1, "--out", "one").code == 0
    Path("visits.csv").rename("moved.csv")
    message = "one/federation.toml divides 'visits.csv', files of your own: name the file or folder with --data"
    assert_fails(command("run", "--federation", "one/federation.toml", "--out", "two"), message)
    with pytest.raises(GpflError, match=message):
        gpfl.Federation.load("one/federation.toml")


def test_a_manifest_records_how_its_files_were_read(command: Command) -> None:
    write(Path("visits.csv"), make_csv().replace("0.", ".", 1))
    rounds = ("--method", "local", "--rounds", 1)
    flags = (*FILE_FLAGS, "--ignore", "b", "--scale", "none", "--missing", "mean")
    assert command("run", *flags, *rounds, "--out", "one").code == 0
    Path("visits.csv").rename("moved.csv")
    manifest = ("--federation", "one/federation.toml", "--data", "moved.csv")
    result = command("run", *manifest, *rounds, "--out", "two")
    assert result.code == 0, result.err
    assert metrics_without_time(Path("two")) == metrics_without_time(Path("one"))
    read = toml.read(Path("two/config.toml"))["data"]
    assert read == {
        "name": str(Path("moved.csv").resolve()),
        **file_metadata("kind", client="site", ignore=["b"], scale="none", missing="mean"),
        "image_size": 0,
    }
    assert_fails_after_description(command("run", *manifest, *rounds, "--ignore", "a", "--out", "three"), "sha256")


def assert_fails_after_description(result: CommandResult, message: str) -> None:
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.out.startswith("moved.csv: 48 rows; ")
    assert message in result.err


def test_the_description_is_printed_even_if_the_rows_cannot_be_divided(command: Command) -> None:
    rows = [(k % 5, "big" if k else "small", k % 2) for k in range(13)]
    write(Path("visits.csv"), lines(("a", "client", "label"), *rows))
    result = command("run", "--data", "visits.csv", "--rounds", 1)
    assert result.out.startswith("visits.csv: 13 rows; 2 clients by 'client' with 1 to 12 rows; ")
    assert_fails(result, "client small has no training samples", "--min-samples 2 leaves out 1 of 2 clients")
    result = command("run", "--data", "visits.csv", "--min-samples", 2, "--rounds", 1)
    assert result.code == 0, result.err
    assert "1 client with fewer than 2 samples, left out: small." in result.out.splitlines()


def test_files_that_are_not_read_are_reported(command: Command) -> None:
    for name in ("north.csv", "south.csv"):
        write(Path("d") / name, lines(("a", "label"), *((k % 5, k % 2) for k in range(12))))
    for name in ("east.xlsx", "_old.csv", ".hidden"):
        write(Path("d") / name, "x")
    result = command("data", "show", "--data", "d")
    assert result.code == 0, result.err
    assert "Not read: _old.csv, east.xlsx." in result.out.splitlines()


def test_list_flags_add_up_and_may_hold_commas(command: Command) -> None:
    rows = [(k, k % 5, k % 7, k % 3, "ab"[k % 2]) for k in range(24)]
    write(Path("v.csv"), lines(("id", '"x, y"', "z", "[kg]", "label"), *rows))
    result = command(
        "data",
        "show",
        "--data",
        "v.csv",
        "--partition",
        "dirichlet",
        "--clients",
        2,
        "--ignore",
        "id",
        "--ignore",
        '"x, y", "[kg]"',
    )
    assert result.code == 0, result.err
    assert "1 numeric column (z)" in result.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("visits.csv",), "visits.csv is not a config (.toml): did you mean `gpfl run --data visits.csv`?"),
        (("my data",), "my data is not a config (.toml): did you mean `gpfl run --data 'my data'`?"),
        (("digits",), "digits is not a config (.toml): did you mean `gpfl run --data digits`?"),
        (("fedavg",), "fedavg is not a config (.toml): did you mean `gpfl run --method fedavg`?"),
        (("old",), "old is the folder of a run, not a config: did you mean `gpfl resume old`?"),
        (("nothing",), "cannot read nothing: No such file or directory"),
    ],
)
def test_data_given_as_a_config_is_an_error_with_the_right_command(
    command: Command, flags: tuple[str, ...], message: str
) -> None:
    write(Path("visits.csv"), make_csv())
    Path("my data").mkdir()
    write(Path("old/config.toml"), "")
    assert_fails(command("run", *flags), message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            (*FILE_FLAGS, "--image-size", 64),
            "data.image_size (--image-size) is 64, but visits.csv holds rows, not images: leave it out",
        ),
        (("--data", "./nope"), "there is no file or folder ./nope"),
        (("--data", "visits.csv", "--layout", "channels"), "data.layout (--layout) belongs to data 'har', not to 'visits.csv'"),
        (("--data", "digits", "--label", "y"), "data.label (--label) belongs to your own files, not to 'digits'"),
        (
            ("--data", "visits.csv", "--label", "knd"),
            "data.label (--label) is 'knd', which is not a column; did you mean 'kind'?",
        ),
        (("--data", "visits.csv", "--label", "kind", "--ignore", "c"), "data.ignore names column 'c'; known: a, b, kind, site"),
        (
            ("--data", "visits.csv"),
            "no label column found: which column holds it? candidates: kind (2 values), site (3 values); "
            "choose one with --label kind",
        ),
        (
            ("--data", "visits.csv", "--label", "kind"),
            "data 'visits.csv' does not name the client of each sample: which column does? candidates: site (3 values); "
            "choose one with --client site, or divide the rows at random with --partition dirichlet",
        ),
        (("--data", "visits.csv", "--label", "kind", "--partition", "natural"), "does not name the client of each sample"),
        (
            (*FILE_FLAGS, "--min-samples", 40),
            "partition.min_samples (--min-samples) is 40; the largest client of data 'visits.csv' has 16 samples",
        ),
        (
            ("--data", "visits.csv", "--label", "site", "--client", "site"),
            "column 'site' is named by both --label and --client: remove it from one",
        ),
        (
            ("--data", "divided.csv", "--test-fraction", 0.5),
            "partition.test_fraction (--test-fraction) is 0.5, but data 'divided.csv' has test samples already: leave it out",
        ),
        ((*FILE_FLAGS, "--beta", 1), "partition.beta (--beta) belongs to partition dirichlet, not to natural"),
        (("--data", "qqq"), "unknown data 'qqq'; known: agnews, amazon, "),
        (("--data", "other/visits.csv"), "there is no file or folder other/visits.csv"),
    ],
)
def test_errors_are_one_line_and_come_before_anything_is_written(
    command: Command, flags: tuple[object, ...], message: str
) -> None:
    write(Path("visits.csv"), make_csv())
    write(Path("divided.csv"), lines(("a", "label", "part"), *((k, k % 2, "train" if k % 4 else "test") for k in range(40))))
    assert_fails(command("run", *flags, "--out", "run"), message)
    assert not Path("run").exists()


def test_columns_named_by_numbers_can_be_ignored(command: Command) -> None:
    rows = [(k, k * k, k % 5, k % 2, "ab"[k % 2]) for k in range(24)]
    write(Path("v.csv"), lines(("2023", "2024", "true", "site", "label"), *rows))
    result = command("data", "show", "--data", "v.csv", "--client", "site", "--ignore", "2023, true")
    assert result.code == 0, result.err
    assert "1 numeric column (2024)" in result.out
    assert parse_options({"data__ignore": "2023"}) == {"data": {"ignore": ["2023"]}}
    assert parse_options({"data__ignore": '["a b", c]'}) == {"data": {"ignore": ["a b", "c"]}}


def test_a_config_may_name_data_relative_to_its_folder(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path("study/visits.csv"), make_csv())
    data = '[data]\nname = "visits.csv"\nclient = "site"\nlabel = "kind"\nignore = ["b"]\n'
    text = data + '[train]\nrounds = 1\n[method]\nname = "local"\n'
    write(Path("study/my.toml"), text)
    folder = Path("study").resolve()
    result = command("run", "study/my.toml", "--out", "one")
    assert result.code == 0, result.err
    written = config.read_config(Path("one/config.toml"))["data"]
    assert written["name"] == str(folder / "visits.csv")
    assert written["ignore"] == ["b"]
    resolved = config.resolve_config(config.read_config(Path("one/config.toml")))
    assert resolved.to_toml() == Path("one/config.toml").read_text()
    assert resolved.source == FileDataset(
        name="visits.csv", description="your own files", path=folder / "visits.csv", client="site", label="kind", ignore=("b",)
    )
    monkeypatch.chdir("study")
    assert command("run", "my.toml", "--out", "../two").code == 0
    assert metrics_without_time(Path("../two")) == metrics_without_time(Path("../one"))


def test_a_config_of_version_1_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old = {"name": "visits.csv", "part": "fold", "together": "patient", "missing": "refuse", "scale": "standard"}
    new = {"name": "visits.csv", "split_column": "fold", "group": "patient", "missing": "error", "scale": "federated"}
    Path("config.toml").write_text(toml.dump({"data": old}))
    assert config.read_sections(Path("config.toml"))["data"] == new


def test_another_dataset_by_flag_drops_the_options_of_the_files(command: Command) -> None:
    write(Path("visits.csv"), make_csv())
    write(Path("my.toml"), '[data]\nname = "visits.csv"\nclient = "site"\nlabel = "kind"\n[method]\nname = "local"\n')
    result = command("run", "my.toml", "--data", "toy", "--rounds", 1, "--out", "run")
    assert result.code == 0, result.err
    assert toml.read(Path("run/config.toml"))["data"] == {"name": "toy"}


# Read once.


@pytest.fixture
def parsed_sources(monkeypatch: pytest.MonkeyPatch) -> list[FileDataset]:
    """Return the sources whose files were parsed."""
    parsed: list[FileDataset] = []
    original = FileDataset.parse

    def parse(self: FileDataset) -> Table:
        parsed.append(self)
        return original(self)

    monkeypatch.setattr(FileDataset, "parse", parse)
    file_dataset.read_once.cache_clear()
    return parsed


def test_trials_and_comparisons_read_files_once(command: Command, parsed_sources: list[FileDataset]) -> None:
    write(Path("visits.csv"), make_csv())
    result = command("compare", *FILE_FLAGS, "--methods", "local,fedavg", "--seeds", "0,1", "--rounds", 1, "--out", "all")
    assert result.code == 0, result.err
    assert [source.path for source in parsed_sources] == [Path("visits.csv").resolve()]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--clients", -1), "partition.clients (--clients) is -1; it must be at least 1"),
        (("--beta", -0.5), "partition.beta (--beta) is -0.5; it must be above 0"),
        (("--device", "tpu"), "run.device (--device) is 'tpu'; it must be auto, cpu, cuda, cuda:N or mps"),
        (("--lr", -1), "train.lr (--lr) is -1"),
        (("--partition", "iid"), "unknown partition 'iid'"),
    ],
)
def test_errors_come_before_files_are_read(
    command: Command, parsed_sources: list[FileDataset], flags: tuple[object, ...], message: str
) -> None:
    write(Path("visits.csv"), make_csv())
    result = command("run", *FILE_FLAGS, *flags)
    assert result.code == 2
    assert message in result.err
    assert parsed_sources == []


def test_files_that_change_are_read_again(tmp_path: Path, parsed_sources: list[FileDataset]) -> None:
    d = tmp_path / "d"
    for name in ("a", "b"):
        write(d / f"{name}.csv", lines(("a", "label"), *GOOD_ROWS))
    first = load(d)
    assert load(d) is first
    assert len(parsed_sources) == 1
    write(d / "b.csv", lines(("a", "label"), *GOOD_ROWS, (9, 1)))
    assert len(load(d)) == 9
    write(d / "c.csv", lines(("a", "label"), *GOOD_ROWS))
    assert load(d).client_names == ("a", "b", "c")
    os.utime(d / "a.csv", ns=(1, 1))
    load(d)
    assert len(parsed_sources) == 4
    load(d, scale="none")
    assert len(parsed_sources) == 5, "read otherwise is read anew"
    (d / "c.csv").unlink()
    assert load(d).client_names == ("a", "b")


def test_equal_content_has_an_equal_digest_and_other_clients_another(tmp_path: Path) -> None:
    base = load(write(tmp_path / "a.csv", make_csv()), client="site", label="kind").digest
    assert load(write(tmp_path / "b.csv", make_csv().replace(",", ";")), client="site", label="kind").digest == base
    others: Mapping[str, Table] = {
        "values": load(write(tmp_path / "c.csv", make_csv(rows=45)), client="site", label="kind"),
        "clients": load(write(tmp_path / "d.csv", make_csv().replace("s1", "s2", 1)), client="site", label="kind"),
        "columns": load(tmp_path / "a.csv", client="site", label="kind", ignore=["a"]),
    }
    assert len({base, *(table.digest for table in others.values())}) == 4
    assert load(tmp_path / "a.csv", client="site", label="kind", scale="none").digest == base, "rows are the same"


def test_clients_with_unusual_names_have_separate_model_files(tmp_path: Path) -> None:
    names = ["../up", "a/b", "a b", "é"]
    rows = [(k, name, (k + index) % 2) for index, name in enumerate(names) for k in range(8)]
    path = write(tmp_path / "v.csv", lines(("a", "client", "label"), *rows))
    federation = gpfl.federate(path)
    result = gpfl.fit("local", federation, rounds=1, out=tmp_path / "run")
    assert sorted(client.name for client in result.clients) == sorted(names)
    models = [name for name in read_files(tmp_path / "run") if name.startswith("models/client-")]
    assert len(models) == 4
    assert {file.name for file in tmp_path.iterdir()} == {"v.csv", "run"}
    assert [shard.name for shard in gpfl.Federation.load(tmp_path / "run/federation.toml", federation.table).shards] == sorted(
        names
    )
