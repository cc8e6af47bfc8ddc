"""A deployment in one process: its parts called directly, and the simulation that it must equal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

import gpfl
from gpfl.core import tree
from gpfl.core.tree import Tree
from gpfl.defences.defended import Defended
from gpfl.deploy.messages import Answer, RoundRequest, Transport
from gpfl.deploy.roster import Roster, SiteData, make_roster
from gpfl.deploy.site import Site
from gpfl.engine.base import Loop
from gpfl.io.tensors import unpack_tensors
from gpfl.training.config import resolve_config
from gpfl.training.execute import PreparedRun, execute
from gpfl.training.prepare import prepare
from gpfl.training.result import Result

Sections = dict[str, dict[str, object]]
SECRET = b"the same key for simulation and sites"


def simulate(federation: gpfl.Federation, sections: Sections) -> Result:
    run = {"seed": 3, "engine": "loop", "device": "cpu", **sections.get("run", {})}
    config, spec = prepare(resolve_config({**sections, "run": run}, federation=federation), federation)
    if isinstance(spec.method, Defended):
        spec = spec.__class__(**{**vars(spec), "method": spec.method.replace(secret=SECRET)})
    return execute(PreparedRun(config, spec), Loop(spec))


def roster_of(federation: gpfl.Federation, sections: Sections) -> Roster:
    run = {"seed": 3, **sections.get("run", {})}
    config, _ = prepare(resolve_config({**sections, "run": run}, federation=federation), federation)
    sizes = {s.name: (len(s.train), len(s.validation), len(s.test)) for s in federation.shards}
    return make_roster("test", config, federation.table, sizes, federation.preprocessing)


def make_sites(roster: Roster, federation: gpfl.Federation, folder: Path) -> list[Site]:
    return [
        Site(roster, shard.name, SiteData(federation.table, shard), folder / f"site-{shard.name}", lambda: SECRET)
        for shard in federation.shards
    ]


def direct(sites: list[Site]) -> Transport:
    def send(messages: Mapping[int, bytes]) -> dict[int, Answer]:
        answers = {}
        for client in sorted(messages, reverse=True):  # replies come in any order
            flat, header = unpack_tensors(messages[client], "the request")
            answers[client] = Answer(sites[client].run_round(RoundRequest.parse(header, flat)).pack())
        return answers

    return send


def assert_equal(first: Tree, second: Tree) -> None:
    a, b = tree.flatten(first), tree.flatten(second)
    assert a.keys() == b.keys()
    for path in a:
        assert torch.equal(a[path], b[path]), path
