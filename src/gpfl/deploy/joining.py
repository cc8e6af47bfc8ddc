"""The sites of a run: how they describe their samples before round 0, and sites that join between rounds."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from gpfl.data.preprocessing import ClientStatistics
from gpfl.deploy.card import DataCard
from gpfl.deploy.messages import Answer, Description, Transport, pack_describe
from gpfl.deploy.roster import Roster
from gpfl.deploy.worker import versions
from gpfl.errors import GpflError
from gpfl.io import files
from gpfl.training.callbacks import Callback

Log = Callable[[str], None]


class Members(NamedTuple):
    """The sites of a run, in the order in which they joined.

    Attributes:
        descriptions: The description of each site's samples.
        starters: Number of sites that joined before round 0. Their statistics encode columns in all rounds.

    """

    descriptions: Mapping[str, Description]
    starters: int

    @classmethod
    def load(cls, path: Path, card: DataCard) -> Self | None:
        """Return the sites of a run that has started; None if it has not."""
        if not path.exists():
            return None
        content = files.read_json(path, "restore it, or start a new run")
        if content.get("card") != card.digest:
            raise GpflError(f"the data card has changed since run '{card.run}' started: give the new run another name")
        sites, starters = content["sites"], content["starters"]
        assert isinstance(sites, dict)
        assert isinstance(starters, int)
        descriptions = {
            site: Description(sizes=tuple(each["sizes"]), statistics=each["statistics"], mask_key=each["mask_key"])
            for site, each in sites.items()
        }
        return cls(descriptions, starters)

    def save(self, path: Path, card: DataCard) -> None:
        """Save the sites, for a resumed run."""
        sites = {site: dataclasses.asdict(each) for site, each in self.descriptions.items()}
        files.write_text(path, json.dumps({"card": card.digest, "starters": self.starters, "sites": sites}, indent=1) + "\n")

    def roster(self, card: DataCard) -> Roster:
        """Return the roster of these sites."""
        described = list(self.descriptions.items())
        roster = card.roster(dict(described[: self.starters]))
        for site, each in described[self.starters :]:
            roster = roster.join(site, each.sizes, each.mask_key)
        return roster

    @property
    def statistics(self) -> dict[str, ClientStatistics]:
        """Statistics of the columns of each site."""
        return {site: ClientStatistics.from_dict(each.statistics) for site, each in self.descriptions.items()}


def describe_sites(
    card: DataCard, transport: Transport, start_clients: int, max_samples: int, log: Log, attempts: int = 3
) -> Members:
    """Ask the sites of a card to describe their samples. Raise if fewer than `start_clients` answer.

    Args:
        card: The data card.
        transport: Sends messages to the sites of the card.
        start_clients: Sites needed before round 0.
        max_samples: Most samples that a site may claim: they are its weight in every mean.
        log: Called with a line for each event.
        attempts: How often each site is asked.

    """
    found, errors = dict[str, Description](), dict[str, str]()
    message = pack_describe(card.digest, versions())
    for _ in range(attempts):
        missing = {client: site for client, site in enumerate(card.sites) if site not in found}
        answers = transport(dict.fromkeys(missing, message))
        for client, site in missing.items():
            try:
                found[site] = read_description(answers.get(client), max_samples)
            except GpflError as error:
                errors[site] = str(error)
                log(f"before round 0: {site}: {error}")
        if len(found) >= start_clients:
            log(f"before round 0: {len(found)} of {len(card.sites)} sites described their samples")
            return Members({site: found[site] for site in card.sites if site in found}, len(found))
    reasons = "; ".join(f"{site}: {errors[site]}" for site in card.sites if site not in found)
    raise GpflError(f"run '{card.run}' cannot start ({reasons}): make these sites ready, then run again")


def read_description(answer: Answer | None, max_samples: int) -> Description:
    """Return a site's description of its samples. Raise if there is none, or if it claims too many samples."""
    if answer is None or answer.error:
        raise GpflError(answer.error if answer else "no reply before the deadline")
    found = Description.unpack(answer.payload)
    if (claimed := sum(found.sizes)) > max_samples:
        raise GpflError(f"it claims {claimed:,} samples; the limit, max_samples in deployment.toml, is {max_samples:,}")
    return found


class SitesJoinedError(Exception):
    """Raised after a checkpoint if sites have joined, so that the run continues with them.

    Attributes:
        sites: The description of each new site's samples.

    """

    def __init__(self, sites: Mapping[str, Description]) -> None:
        super().__init__(", ".join(sites))
        self.sites = sites


class Joining(Callback):
    """Asks sites that are on the data card but not in the run, along with each round's messages, to describe their samples.

    Once one has, it raises `SitesJoinedError` after the next checkpoint, when no site has been asked for the next round.

    Args:
        transport: Sends messages to the sites of the card.
        card: The data card.
        roster: The roster, whose clients are sent the messages of `send`.
        max_samples: Most samples that a site may claim.
        log: Called with a line for each event.

    """

    def __init__(self, transport: Transport, card: DataCard, roster: Roster, max_samples: int, log: Log) -> None:
        self._transport, self._max_samples, self._log = transport, max_samples, log
        self._numbers = [card.sites.index(site) for site in roster.sites]  # of the roster's clients on the card
        self._absent = {client: site for client, site in enumerate(card.sites) if site not in roster.sites}
        self._message = pack_describe(card.digest, versions())
        self._found: dict[str, Description] = {}
        self._errors: dict[str, str] = {}
        self._is_round_done = False

    def send(self, messages: Mapping[int, bytes]) -> dict[int, Answer]:
        """Return the answers of the roster's clients."""
        asked = {client: site for client, site in self._absent.items() if site not in self._found}
        numbered = {self._numbers[client]: message for client, message in messages.items()}
        answers = self._transport(numbered | dict.fromkeys(asked, self._message))
        for number, site in asked.items():
            try:
                self._found[site] = read_description(answers.get(number), self._max_samples)
                self._log(f"{site} joins the run after the next checkpoint")
            except GpflError as error:
                if self._errors.get(site) != str(error):
                    self._log(f"{site} is not in the run: {error}")
                self._errors[site] = str(error)
        return {client: answers[n] for client in messages if (n := self._numbers[client]) in answers}

    def on_round_end(self, round: int, losses: Mapping[str, float]) -> None:
        """Note that the next checkpoint is that of a new round."""
        self._is_round_done = True

    def on_checkpoint(self, path: Path) -> None:
        """Raise if sites have joined and no replies of the next round are pending."""
        if self._is_round_done and self._found:
            raise SitesJoinedError(self._found)
        self._is_round_done = False
