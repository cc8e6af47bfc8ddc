"""What is known of a deployment's sites: connection, rounds, errors, bytes."""

import json
import re
from dataclasses import dataclass

from gpfl.deploy.programs import Control
from gpfl.deploy.remote import CLIENTS_LOG
from gpfl.deploy.server import NODES, CoordinatorFolder
from gpfl.errors import GpflError
from gpfl.io import files


@dataclass(frozen=True)
class SiteStatus:
    """A site as the coordinator knows it: rounds are counted from 1, 0 = none."""

    name: str
    connection: str
    last_round: int
    last_error: str
    bytes_up: int
    bytes_down: int
    uploads: int  # also of rounds that were lost
    epsilon: float  # of all of them; 0 without noise


def site_statuses(folder: CoordinatorFolder) -> list[SiteStatus]:
    """Return the status of each site."""
    try:
        states, connection = Control(folder).nodes(), ""
    except GpflError:
        states, connection = {}, "server not running"
    numbers = files.read_json(folder.path / NODES, "remove it") if (folder.path / NODES).exists() else {}
    records = [json.loads(line) for line in files.read_lines(folder.run / CLIENTS_LOG)]
    log = files.read_lines(folder.log)
    statuses = []
    for site in folder.card.sites:
        traffic = [record["bytes_up_down"].get(site, (0, 0)) for record in records]
        up, down = (sum(pair[i] for pair in traffic) for i in (0, 1))
        last = max((record["round"] + 1 for record in records if site in record["averaged"]), default=0)
        number = str(numbers.get(site, ""))
        node = connection or (states.get(number, "offline") if number else "not registered")
        uploads = max((record["uploads"].get(site, 0) for record in records), default=0)
        epsilon = max((record["epsilon"].get(site, 0.0) for record in records), default=0.0)
        statuses.append(SiteStatus(site, node, last, last_error(site, log), up, down, uploads, epsilon))
    return statuses


def last_error(site: str, log: list[str]) -> str:
    """Return the last error of a site in the coordinator's log, with its time, or ""."""
    name = re.escape(site)
    pattern = re.compile(rf"^(\S+) ((?:round \d+|before round 0): (?:{name}: |upload of {name} dropped: ).*)$")
    return next((f"{match[2]} ({match[1]})" for line in reversed(log) if (match := pattern.match(line))), "")
