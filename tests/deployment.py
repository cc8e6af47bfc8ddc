"""A deployment of three hospitals in one folder, and the simulation on the same files."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from direct_sites import SECRET, Sections, simulate
from patients import make_rows, write_rows

import gpfl
from gpfl.deploy.card import DataCard
from gpfl.deploy.init import draft_policy, format_policy, make_deployment, write_card
from gpfl.deploy.messages import Answer, Transport
from gpfl.deploy.programs import free_port
from gpfl.deploy.server import Connect
from gpfl.deploy.worker import CARD, CARD_SIGNATURE, SiteFolder, Worker
from gpfl.deploy.worker import POLICY as POLICY_FILE
from gpfl.training.result import Result

SITES = ("east", "north", "south")
COLUMNS = ("chol", "pain", "age", "outcome")
SCHEMA = """label = "outcome"
classes = ["ill", "well"]
[[column]]
name = "age"
low = 0.0
high = 120.0
[[column]]
name = "chol"
low = 0.0
high = 700.0
[[column]]
name = "pain"
kind = "categorical"
categories = ["absent", "atypical", "typical"]
"""
CONFIG: Sections = {
    "run": {"seed": 3},
    "method": {"name": "gpfl"},
    "net": {"name": "mlp", "hidden": [8]},
    "train": {"rounds": 2, "lr": 0.1},
    "data": {"missing": "mean", "missing_indicator": True},
    "partition": {"test_fraction": 0.3, "seed": 5},
}
POLICY: Mapping[str, object] = {"secure_sum": False}


def write_data(folder: Path, sites: Sequence[str] = SITES) -> Path:
    """Write one file for each hospital, and return the schema."""
    rows = make_rows()
    for k, site in enumerate(sites):
        write_rows(folder / f"{site}.csv", rows[k::3], COLUMNS)
    schema = folder.parent / "schema.toml"
    schema.write_text(SCHEMA)
    return schema


def make(
    folder: Path,
    config: Sections | None = None,
    policy: Mapping[str, object] = POLICY,
    *,
    secure_sum: bool = False,
    names: Sequence[str] = ("localhost", "127.0.0.1"),
    port: int = 0,
    settings: Mapping[str, object] | None = None,
    sites: Sequence[str] = SITES,
) -> DataCard:
    """Make a deployment of `folder/d` whose sites have accepted the card. By default sites connect to the SuperLink itself."""
    (folder / "pooled").mkdir(parents=True)
    sections = {**CONFIG, **(config or {})}
    sections["data"] = {**sections["data"], "schema": str(write_data(folder / "pooled", sites))}
    card = DataCard.make("test", sites[::-1], sections, secure_sum=secure_sum)
    settings = {"link_port": free_port(), **(settings or {})}
    port = port or cast(int, settings["link_port"])
    make_deployment(folder / "d", card, names, port=port, policy=policy, settings=settings)
    for site in sites:
        data = folder / "d" / "sites" / site / "data"
        data.mkdir()
        (data / "rows.csv").write_bytes((folder / "pooled" / f"{site}.csv").read_bytes())
        SiteFolder(data.parent).accept()
    return card


def next_card(folder: Path, name: str, config: Sections) -> DataCard:
    """Issue a card for another run, which all sites accept."""
    sections = {**CONFIG, **config}
    sections["data"] = {**sections["data"], "schema": str(folder / "schema.toml")}
    card = DataCard.make(name, SITES, sections)
    coordinator = folder / "d" / "coordinator"
    write_card(coordinator, card)
    for site in SITES:
        own = folder / "d" / "sites" / site
        for file in (CARD, CARD_SIGNATURE):
            shutil.copy(coordinator / file, own / file)
        (own / POLICY_FILE).write_text(format_policy({**draft_policy(card), **POLICY}))
        SiteFolder(own).accept()
    return card


def make_workers(folder: Path, log: Callable[[str], None] = lambda line: None) -> list[Worker]:
    """Return the workers of all sites."""
    return [Worker(SiteFolder(folder / "d" / "sites" / site), log, lambda: SECRET) for site in SITES]


def connect_directly(workers: list[Worker]) -> Connect:
    """Return a transport that calls workers."""

    def connect(nodes: Mapping[int, int], deadline: float, patience: float, min_clients: int) -> Transport:
        return lambda messages: {client: Answer(workers[client].answer(message)) for client, message in messages.items()}

    return connect


def simulate_files(folder: Path, card: DataCard) -> Result:
    """Return the simulation on the files of all sites."""
    federation = gpfl.federate(
        folder / "pooled",
        schema=str(folder / "schema.toml"),
        **{**card.reading, **card.split},  # type: ignore[arg-type]
    )
    return simulate(federation, card.config)
