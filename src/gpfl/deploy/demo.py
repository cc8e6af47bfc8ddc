"""A deployment on this machine, with everything a real one has, beside the simulation of the same files."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from gpfl.core import options, tree
from gpfl.data import DATASETS
from gpfl.data.files import FileDataset
from gpfl.data.files.raw_table import Array
from gpfl.data.files.writer import format_table
from gpfl.data.table import Table
from gpfl.deploy.card import DataCard
from gpfl.deploy.init import make_deployment
from gpfl.deploy.programs import (
    Control,
    Processes,
    free_port,
    superlink_command,
    supernode_command,
    wait_for_superlink,
    worker_command,
)
from gpfl.deploy.server import CoordinatorFolder
from gpfl.deploy.supervise import finish_run
from gpfl.deploy.worker import SITE, SiteFolder
from gpfl.engine.base import Loop
from gpfl.federation import PARTITIONS, partition_table
from gpfl.federation.partition import Natural
from gpfl.inference.load import load_model
from gpfl.io import files, toml
from gpfl.training.config import ConfigDict, resolve_config
from gpfl.training.execute import PreparedRun, execute
from gpfl.training.prepare import prepare
from gpfl.training.result import Result
from gpfl.training.run_dir import make_empty_folder

DATA = ("digits", "heart")
ROUNDS = 3

DIGITS_SITES = ("east", "north", "south")
CONFIGS: Mapping[str, ConfigDict] = {
    "digits": {
        "net": {"name": "mlp", "hidden": [64]},
        "train": {"lr": 0.05, "epochs": 5},
        "partition": {"test_fraction": 0.25, "seed": 1},
    },
    "heart": {
        "net": {"name": "mlp", "hidden": [32]},
        "train": {"lr": 0.05, "epochs": 5},
        "data": {"missing": "mean"},
        "partition": {"test_fraction": 0.25, "seed": 1},
    },
}


@dataclass(frozen=True)
class SiteResult:
    """A site of the demo: accuracy on its test samples, deployed and simulated, and whether its models are bit-identical."""

    name: str
    samples: tuple[int, int]
    deployed: float
    simulated: float
    equal: bool


@dataclass(frozen=True)
class DemoResult:
    """The result of the demo. `bytes_up` and `bytes_down` are those of all messages of rounds."""

    sites: list[SiteResult]
    seconds: float
    bytes_up: int
    bytes_down: int

    @property
    def equal(self) -> bool:
        """Whether all sites have the models and accuracies of the simulation."""
        return all(site.equal and site.deployed == site.simulated for site in self.sites)


def run_demo(
    data: str, folder: Path, *, method: str = "gpfl", rounds: int = ROUNDS, log: Callable[[str], None] = lambda line: None
) -> DemoResult:
    """Run a deployment in a folder and compare it with the simulation.

    Args:
        data: One of `DATA`.
        folder: New folder, or that of an earlier demo, whose files of sites are used again as they are now.
        method: Name of the method.
        rounds: Rounds.
        log: Called with a line for each step.

    """
    start = time.monotonic()

    def report(text: str) -> None:
        log(f"[{time.monotonic() - start:5.1f} s] {text}")

    card = _prepare_folder(data, folder, method, rounds)
    report(f"{len(card.sites)} sites, each with keys, a data card and a policy: {', '.join(card.sites)}")
    coordinator = CoordinatorFolder(folder / "coordinator")
    with deployed(folder, card, report) as processes:
        finish_run(coordinator, report, attempts=1, check=processes.check)
    report("all processes stopped; simulating the same files")
    result = _compare(folder, card, simulate(folder, card))
    records = [json.loads(line) for line in (coordinator.run / "clients.jsonl").read_text(encoding="utf-8").splitlines()]
    traffic = [pair for record in records for pair in record["bytes_up_down"].values()]
    up, down = (sum(pair[i] for pair in traffic) for i in (0, 1))
    return DemoResult(result, time.monotonic() - start, up, down)


@contextmanager
def deployed(folder: Path, card: DataCard, report: Callable[[str], None] = lambda text: None) -> Iterator[Processes]:
    """Run SuperLink, workers and SuperNodes of a deployment on this machine, all of which stop at the end of the block."""
    coordinator = CoordinatorFolder(folder / "coordinator")
    sites = [SiteFolder(folder / "sites" / name) for name in card.sites]
    with Processes(folder / "log") as processes:
        processes.start("superlink", superlink_command(coordinator), coordinator.path / "flwr")
        for site in sites:
            processes.start(f"worker-{site.name}", worker_command(site), site.path / "flwr")
        wait_for_superlink(coordinator, processes)
        report("SuperLink up, with TLS and node keys")
        Control(coordinator).register()
        report("node keys registered")
        for site in sites:
            processes.start(f"supernode-{site.name}", supernode_command(site), site.path / "flwr")
        yield processes


def simulate(folder: Path, card: DataCard) -> Result:
    """Return the simulation by engine `loop` on the files of all sites."""
    schema = folder / "schema.toml"
    reading = {**card.reading, "schema": str(schema)} if card.columns else dict(card.reading)
    classes = () if card.columns else card.classes
    source = FileDataset(name="demo", description="", path=folder / "data", classes=classes, **reading)  # type: ignore[arg-type]
    federation = partition_table(source.load(), options.build(Natural, dict(card.split), "partition"))
    config, spec = prepare(resolve_config(card.config, federation=federation), federation)
    return execute(PreparedRun(config, spec), Loop(spec))


def write_files(data: str, folder: Path) -> None:
    """Write one file for each site, and the schema of columns."""
    table = DATASETS[data].load()
    if table.raw is not None:
        table.raw.schema.write(folder / "schema.toml")
        assert table.client_ids is not None
        for client, name in enumerate(table.client_names):
            rows = table.select(np.flatnonzero(table.client_ids == client))
            files.write_bytes(folder / "data" / f"{name}.csv", format_table(_columns(rows)))
        return
    partition = {"clients": len(DIGITS_SITES), "classes_per_client": 4, "seed": 1}
    federation = partition_table(table, options.build(PARTITIONS["pathological"], partition, "partition"))
    (folder / "data").mkdir(parents=True)
    for name, shard in zip(DIGITS_SITES, federation.shards, strict=True):
        rows_of_site = np.sort(shard.samples)
        x = (table.x[rows_of_site].flatten(1).numpy() / np.float32(16)).astype(np.float32)
        np.savez(folder / "data" / f"{name}.npz", x=x, y=table.y[rows_of_site].numpy())


def _columns(table: Table) -> dict[str, Array]:
    """Return the raw columns of a table and its label as a file holds them; empty texts are missing values."""
    assert table.raw is not None
    columns: dict[str, Array] = {}
    for i, column in enumerate(table.raw.schema.columns):
        values = table.raw.values[:, i]
        if column.is_categorical:
            texts = ["" if np.isnan(value) else column.categories[int(value)] for value in values]
        else:
            texts = ["" if np.isnan(value) else repr(float(value)) for value in values]
        columns[column.name] = np.array(texts, dtype=object)
    columns[str(table.metadata["label"])] = np.array([table.class_names[int(label)] for label in table.y], dtype=object)
    return columns


def _prepare_folder(data: str, folder: Path, method: str, rounds: int) -> DataCard:
    if (folder / "data").is_dir():
        for name in ("coordinator", "sites", "log"):
            shutil.rmtree(folder / name, ignore_errors=True)
    else:
        make_empty_folder(folder)
        write_files(data, folder)
    names = [path.stem for path in sorted((folder / "data").iterdir())]
    config: ConfigDict = {section: dict(values) for section, values in CONFIGS[data].items()}
    config["method"] = {"name": method}
    config["train"] = {**config["train"], "rounds": rounds}
    config["run"] = {"seed": 0}
    own = config.setdefault("data", {})
    schema = folder / "schema.toml"
    if schema.exists():
        own["schema"] = str(schema)
        card = DataCard.make("demo", names, config)
    else:
        # With all ten classes, of which each site has only some.
        classes = tuple(map(str, range(10)))
        example = FileDataset(name="digits", description="", path=folder / "data", classes=classes).load()
        card = DataCard.make("demo", names, config, example)
    # Secure sums round: the models would not be bit-identical to those of a simulation without them.
    policy: dict[str, object] = {"secure_sum": False}
    settings: dict[str, object] = {"link_port": free_port(), "connect": 120.0, "deadline": 300.0}
    make_deployment(folder, card, ["localhost", "127.0.0.1"], policy=policy, settings=settings)
    for name in names:
        (path,) = (folder / "data").glob(f"{name}.*")
        site = folder / "sites" / name
        server = f"127.0.0.1:{settings['link_port']}"
        files.write_text(site / SITE, toml.dump({"name": name, "server": server, "data": str(path.resolve())}))
        SiteFolder(site).accept()
    return card


def _compare(folder: Path, card: DataCard, expected: Result) -> list[SiteResult]:
    """Return the results of sites beside those of the simulation."""
    lines = (folder / "coordinator" / "runs" / card.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    deployed = cast(Mapping[str, float], json.loads(lines[-1])["client_accuracies"])
    simulated = cast(Mapping[str, float], expected.history[-1]["client_accuracies"])
    found = []
    for shard, model in zip(expected.federation.shards, expected.clients, strict=True):
        (path,) = (folder / "sites" / shard.name / "state").glob("*/model.safetensors")
        own, other = tree.flatten(load_model(path).weights), tree.flatten(model.weights)
        equal = own.keys() == other.keys() and all(bool((own[key] == other[key]).all()) for key in own)
        sizes = (len(shard.train), len(shard.test))
        found.append(SiteResult(shard.name, sizes, deployed[shard.name], simulated[shard.name], equal))
    return found
