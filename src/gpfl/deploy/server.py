"""The coordinator's side: its folder, the exchange before round 0, and the run."""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpfl.deploy import keys
from gpfl.deploy.card import DataCard
from gpfl.deploy.coordinator import coordinate
from gpfl.deploy.joining import Joining, Members, SitesJoinedError, describe_sites
from gpfl.deploy.messages import Answer, Transport
from gpfl.deploy.worker import CARD, versions
from gpfl.errors import GpflError
from gpfl.io import files, toml
from gpfl.training.round_loop import RunOutcome

DEPLOYMENT, NODES = "deployment.toml", "nodes.json"
"""Files of the coordinator's folder: settings, and the node ID of each site."""
MAX_SAMPLES = 1_000_000
"""Most samples that a site may claim, unless deployment.toml says otherwise."""

Connect = Callable[[Mapping[int, int], float, float, int], Transport]
"""Returns the transport to nodes by client, with deadline, seconds to wait for connections, and clients needed."""


@dataclass(frozen=True)
class CoordinatorFolder:
    """The folder of a coordinator."""

    path: Path

    @property
    def settings(self) -> dict[str, object]:
        """Content of deployment.toml."""
        return toml.read(self.path / DEPLOYMENT)

    @property
    def card(self) -> DataCard:
        """The data card."""
        return DataCard.from_toml(self.path / CARD)

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return self.path / "runs" / self.card.run

    @property
    def log(self) -> Path:
        """Log of the run, beside its folder."""
        return self.path / "log" / f"{self.card.run}.log"

    @property
    def link_port(self) -> int:
        """Port of the SuperLink on this machine."""
        return int(self.number("link_port", 0))

    def nodes(self) -> dict[int, int]:
        """Return the node ID of each client. Raise if a site has none."""
        path = self.path / NODES
        numbers = files.read_json(path, "register the sites with gpfl deploy server") if path.exists() else {}
        lacking = [site for site in self.card.sites if site not in numbers]
        if lacking:
            raise GpflError(
                f"no node key is registered for {', '.join(lacking)}: start gpfl deploy server, which registers them"
            )
        return {client: int(str(numbers[site])) for client, site in enumerate(self.card.sites)}

    def number(self, key: str, default: float) -> float:
        """Return a number of deployment.toml."""
        value = self.settings.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise GpflError(f"{self.path / DEPLOYMENT}: {key} is {value!r}; it must be a number, at least 0")
        return float(value)


def run_coordinator(path: Path, connect: Connect, nodes: Mapping[int, int] | None = None) -> RunOutcome:
    """Run to the end, resuming if the run has started, and return the outcome.

    Args:
        path: Folder of the coordinator.
        connect: Makes the transport.
        nodes: Node of each client; by default those of the registered keys.

    """
    import fcntl  # not on Windows

    folder = CoordinatorFolder(path)
    folder.log.parent.mkdir(parents=True, exist_ok=True)
    with folder.log.open("a", encoding="utf-8", buffering=1) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the process ends: there is one coordinator at a time

        def log(text: str) -> None:
            line = f"{datetime.datetime.now().astimezone().isoformat(timespec='seconds')} {text}"
            print(line, flush=True)
            file.write(line + "\n")

        try:
            min_clients = int(folder.number("min_clients", 1))
            nodes = folder.nodes() if nodes is None else nodes
            transport = connect(nodes, folder.number("deadline", 600), folder.number("connect", 60), min_clients)
            signed = _signed(transport, path / "signing.key")
            log(f"coordinator of run '{folder.card.run}' started, gpfl {versions()['gpfl']}, torch {versions()['torch']}")
            outcome = _run_rounds(folder, signed, min_clients, log)
        except GpflError as error:
            log(f"stopped: {error}")
            raise
        log(f"finished: accuracy {outcome.summary['selected_accuracy']:.4f} at round {outcome.summary['selected_round']}")
        return outcome


def _run_rounds(folder: CoordinatorFolder, transport: Transport, min_clients: int, log: Callable[[str], None]) -> RunOutcome:
    """Run to the end with the sites of the data card that are there, and those that join between rounds."""
    card, path = folder.card, folder.path / "state" / f"{folder.card.run}-descriptions.json"
    members, max_samples = Members.load(path, card), int(folder.number("max_samples", MAX_SAMPLES))
    if members is None:
        members = describe_sites(card, transport, int(folder.number("start_clients", len(card.sites))), max_samples, log)
        members.save(path, card)
    while True:
        roster = members.roster(card)
        joining = Joining(transport, card, roster, max_samples, log)
        statistics = members.statistics if roster.preprocessing else None
        try:
            return coordinate(
                roster,
                joining.send,
                folder.run,
                statistics=statistics,
                min_clients=min_clients,
                callbacks=[joining],
                log=log,
            )
        except SitesJoinedError as joined:
            members = members._replace(descriptions={**members.descriptions, **joined.sites})
            members.save(path, card)
            log(f"sites of the run: {', '.join(members.descriptions)}")


def _signed(transport: Transport, key: Path) -> Transport:
    def send(messages: Mapping[int, bytes]) -> Mapping[int, Answer]:
        return transport({client: keys.sign(message, key) for client, message in messages.items()})

    return send
