"""A site's worker: the process that alone reads the site's data and private state, and decides what leaves the site.

Flower's SuperNode, which talks to the coordinator, hands it requests over a Unix socket. The two may run as different users of
the machine.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import cast

import torch

import gpfl
from gpfl.defences.accounting import accountant_version
from gpfl.defences.aggregation import MIN_COHORT
from gpfl.deploy import keys
from gpfl.deploy.card import DataCard, describe_site
from gpfl.deploy.messages import FlatTree, RefusedError, RoundReply, RoundRequest, pack_refusal
from gpfl.deploy.policy import Policy
from gpfl.deploy.roster import Roster
from gpfl.deploy.secure_sum import Masker, SumContext
from gpfl.deploy.site import Site
from gpfl.deploy.socket import receive, send, socket_path
from gpfl.errors import GpflError
from gpfl.io import files, toml
from gpfl.io.tensors import read_tensors, unpack_tensors, write_tensors

SITE, CARD, POLICY, ACCEPTED = "site.toml", "card.toml", "outbound.toml", "accepted"
"""Files of a site's folder: its name and data, the data card, its policy, and the digest of the card that it accepts."""
CARD_SIGNATURE, SIGNING_KEY, MASK_KEY = "card.sig", "signing.pub", "mask.key"
"""Files of a site's folder: the coordinator's signature of the card, the key by which signatures are checked, and the site's
own key for secure sums, which is made at the site."""


def versions() -> dict[str, str]:
    """Return the versions that must match everywhere: others may compute different bits or use another protocol."""
    installed = {found.name: found.version for found in metadata.distributions(name="flwr")}
    return {"gpfl": gpfl.__version__, "torch": torch.__version__.partition("+")[0], **installed}


@dataclass(frozen=True)
class SiteFolder:
    """The folder of a site."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the site."""
        return self._value("name")

    @property
    def data(self) -> Path:
        """Path of the site's data."""
        path = Path(self._value("data"))
        return path if path.is_absolute() else self.path / path

    @property
    def server(self) -> str:
        """Host and port of the server."""
        return self._value("server")

    @property
    def card(self) -> DataCard:
        """The data card. Raise if it is not the one that the coordinator signed."""
        try:
            signature = bytes.fromhex((self.path / CARD_SIGNATURE).read_text(encoding="ascii"))
            keys.verify(signature + (self.path / CARD).read_bytes(), self.path / SIGNING_KEY)
        except (OSError, ValueError, GpflError):
            raise GpflError(f"{self.path / CARD} is not the data card that the coordinator signed: ask for it again") from None
        return DataCard.from_toml(self.path / CARD)

    @property
    def accepted(self) -> str:
        """Digest of the card that the site has accepted, or ""."""
        path = self.path / ACCEPTED
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    def accept(self) -> None:
        """Accept the data card."""
        files.write_text(self.path / ACCEPTED, self.card.digest + "\n")

    def _value(self, key: str) -> str:
        value = toml.read(self.path / SITE).get(key)
        if not isinstance(value, str) or not value:
            raise GpflError(f'{self.path / SITE} has no {key}: set it, such as {key} = "…"')
        return value


class Worker:
    """The site's side of a deployment.

    Args:
        folder: The site's folder.
        log: Called with a line for each event.
        secret: Returns the key of a round's defence noise; by default one from the operating system.

    """

    def __init__(
        self, folder: SiteFolder, log: Callable[[str], None] = lambda line: None, secret: Callable[[], bytes] | None = None
    ) -> None:
        self.folder, self._log, self._secret = folder, log, secret
        self.name, self._mask_key = folder.name, folder.path / MASK_KEY
        self.policy = Policy.read(folder.path / POLICY)
        self._load(folder.card)

    def _load(self, card: DataCard) -> None:
        """Read the site's data by a card."""
        self.card, self._data = card, card.read(self.name, self.folder.data, self.folder.path)
        if self.card.secure_sum and not self._mask_key.exists():
            keys.make_mask_key(self._mask_key)
        public = keys.public_mask_key(self._mask_key).hex() if self.card.secure_sum else ""
        self._description = describe_site(self._data, public)
        self._site: Site | None = None
        self._masker: Masker | None = None

    def answer(self, signed: bytes) -> bytes:
        """Return the reply to a request. Never raise: errors are logged here; the coordinator gets only a code."""
        start = time.perf_counter()
        try:
            reply, text = self._handle(signed)
        except RefusedError as error:
            self._log(f"refused: {error}")
            return pack_refusal(error.code, error.rule)
        except Exception:
            self._log(f"failed: {traceback.format_exc()}")
            return pack_refusal("failed")
        self._log(f"{text}: {len(reply):,} bytes sent after {time.perf_counter() - start:.2f} s")
        return reply

    def _handle(self, signed: bytes) -> tuple[bytes, str]:
        try:
            message = keys.verify(signed, self.folder.path / SIGNING_KEY)
        except GpflError as error:
            raise RefusedError("signature", str(error)) from None
        self.policy = Policy.read(self.folder.path / POLICY)  # changes take effect at once
        if self.folder.accepted != self.card.digest:
            if (card := self.folder.card).digest != self.folder.accepted:
                raise RefusedError("card", "the data card is not accepted: gpfl deploy site check --accept")
            self._log(f"data card of run '{card.run}' accepted")
            self._load(card)
        tensors, header = unpack_tensors(message, "the request")
        if header.get("kind") == "describe":
            return self._describe(header), "samples described"
        request = RoundRequest.parse(header, tensors)
        site = self._open_site(request)
        ledger = Ledger(self.folder.path / "state", self.card.digest, site.roster.origin)
        if request.train:
            self._check_sum(request, ledger)
        made = ledger.find(request) if request.train else None
        self.policy.check_request(request, site, ledger.count() - (made is not None))
        reply = site.run_round(dataclasses.replace(request, train=request.train and made is None))
        if made is not None:
            reply = dataclasses.replace(reply, upload=made.upload, terms=made.terms)
        elif reply.upload:
            self.policy.check_reply(reply, len(reply.pack()), site, request)
            reply = dataclasses.replace(reply, upload=self._protect(reply.upload, request, site))
        reply = dataclasses.replace(reply, uploads=ledger.count() + (made is None and bool(reply.upload)))
        reply = dataclasses.replace(reply, epsilon=self._epsilon(site, reply.uploads))
        content = reply.pack()
        self.policy.check_size(len(content))
        if made is None and reply.upload:
            ledger.add(request, reply)
        epsilon = f", ε = {reply.epsilon:.3g} of all uploads" if reply.epsilon else ""
        trained = [f"{'trained' if made is None else 'sent again'} (upload {reply.uploads}{epsilon})"] if reply.upload else []
        done = [*(f"{split} evaluated" for split in request.splits), *trained]
        return content, f"round {request.round}: {', '.join(done) or 'nothing'}{', model kept' if request.final else ''}"

    def _epsilon(self, site: Site, uploads: int) -> float:
        """Return the ε of the site's uploads; 0 without noise or without the accountant."""
        defence = site.config.defence
        return site.epsilon(uploads) if (defence.noise or defence.example_noise) and accountant_version() else 0.0

    def _describe(self, header: Mapping[str, object]) -> bytes:
        if header.get("card") != self.card.digest:
            raise RefusedError("card", f"the coordinator has another data card than {self.folder.path / CARD}")
        if header.get("versions") != versions():
            raise RefusedError(
                "version", f"the coordinator has {header.get('versions')}, this site {versions()}: install the same"
            )
        self.policy.check_description(self._description, self.card)
        return self._description.pack()

    def _open_site(self, request: RoundRequest) -> Site:
        if self._site is not None and self._site.roster.digest == request.roster:
            return self._site
        roster = Roster.from_json(request.agreement) if request.agreement else self._find_roster(request.roster)
        if roster.digest != request.roster:
            raise RefusedError("roster", "the request is for another roster than the one in it")
        try:
            self.card.check_roster(roster, self.name, self._description)
        except GpflError as error:
            raise RefusedError("roster", str(error)) from None
        folder = self.folder.path / "state" / roster.origin[:16]
        path = folder / "roster.json"
        if path.exists() and not roster.extends(Roster.from_json(path.read_text(encoding="utf-8"))):
            raise RefusedError("roster", "the roster changes what was agreed on before, rather than letting sites join")
        if roster.mask_keys:
            self._pin_mask_keys(roster)
            public = {client: bytes.fromhex(key) for client, key in enumerate(roster.mask_keys[name] for name in roster.sites)}
            self._masker = Masker(self._mask_key, public, roster.index(self.name))
        files.write_text(path, roster.to_json())
        self._log(f"sites of the run: {', '.join(roster.sites)}")
        site = Site(roster, self.name, self._data, folder, *([self._secret] if self._secret else []))
        self._site = site
        return site

    def _find_roster(self, digest: str) -> Roster:
        """Return a roster that the site has seen."""
        for path in (self.folder.path / "state").glob("*/roster.json"):
            if (roster := Roster.from_json(path.read_text(encoding="utf-8"))).digest == digest:
                return roster
        raise RefusedError("roster", "the request is for a roster that this site has never seen")

    def _check_sum(self, request: RoundRequest, ledger: "Ledger") -> None:
        """Raise if a request could break a secure sum: another one under the same masks, or too small a cohort."""
        if not self.card.secure_sum:
            return
        cohort = request.cohort
        if request.client not in cohort or len(set(cohort)) != len(cohort) or len(cohort) < MIN_COHORT:
            raise RefusedError("sum", f"the cohort is {list(cohort)}; it must have {MIN_COHORT} sites and this one among them")
        if ledger.digest_of(request) not in ("", request.upload_digest):
            raise RefusedError("sum", f"round {request.round}, attempt {request.attempt} was asked for with other content")

    def _protect(self, upload: FlatTree, request: RoundRequest, site: Site) -> FlatTree:
        """Return an upload as it leaves the site: masked, if the card says so."""
        if self._masker is None:
            return upload
        context = SumContext(request.roster, request.round, request.attempt, request.cohort)
        return self._masker.mask(upload, site.upload_weight(request.cohort), context)

    def _pin_mask_keys(self, roster: Roster) -> None:
        """Keep the mask keys of other sites, and raise if one has changed since an earlier run."""
        path = self.folder.path / "state" / "mask_keys.json"
        known = files.read_json(path, "remove it if the other sites have made new keys") if path.exists() else {}
        for site, key in roster.mask_keys.items():
            if known.setdefault(site, key) != key:
                raise RefusedError(
                    "roster", f"the mask key of {site} is not that of {path}: ask that site whether it made a new one"
                )
        files.write_text(path, json.dumps(known, indent=1) + "\n")
        text = " ".join(f"{site}={key}" for site, key in sorted(roster.mask_keys.items()))
        self._log(
            f"mask keys of all sites: SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}, to compare with other sites"
        )

    def model_site(self) -> Site:
        """Return the site in the last run that it took part in."""
        states = sorted((self.folder.path / "state").glob("*/shared.safetensors"), key=lambda path: path.stat().st_mtime)
        if not states:
            raise GpflError(f"site '{self.name}' has taken part in no run yet: wait for round 0")
        roster = Roster.from_json((states[-1].parent / "roster.json").read_text(encoding="utf-8"))
        return Site(roster, self.name, self._data, states[-1].parent)


class Ledger:
    """The uploads of a site under one data card: the digests of their requests, and the last one as it was sent.

    An upload is made once: the last request, if it comes again, gets the same bytes, with the same noise and the same masks,
    without training again. Every other request counts as a new upload.
    """

    def __init__(self, folder: Path, card: str, origin: str) -> None:
        self._origin = origin  # the same for all rosters of a run: uploads stay known when a site joins
        self._path, self._last = folder / f"uploads-{card[:16]}.json", folder / f"uploads-{card[:16]}.safetensors"

    def count(self) -> int:
        """Return how many uploads were made, whether they arrived or not."""
        return len(self._read())

    def digest_of(self, request: RoundRequest) -> str:
        """Return the digest of the upload of a round and attempt, "" if there was none."""
        return str(self._read().get(self._key(request), ""))

    def find(self, request: RoundRequest) -> RoundReply | None:
        """Return the last upload and its loss terms, if they were made for the same request."""
        if not self._last.exists():
            return None
        upload, metadata = read_tensors(self._last)
        if metadata.get("digest") != request.upload_digest:
            return None
        return RoundReply(round=request.round, upload=upload, terms=cast(dict[str, float], metadata["terms"]), scores={})

    def add(self, request: RoundRequest, reply: RoundReply) -> None:
        """Keep an upload, and count it before it leaves."""
        entries, key = self._read(), self._key(request)
        while key in entries:  # requests for plain uploads may repeat a round with other content
            key += "'"
        files.write_text(self._path, json.dumps({**entries, key: request.upload_digest}, indent=1) + "\n")
        write_tensors(self._last, reply.upload, {"digest": request.upload_digest, "terms": reply.terms})

    def _read(self) -> dict[str, object]:
        return files.read_json(self._path, "restore it from a backup of the site") if self._path.exists() else {}

    def _key(self, request: RoundRequest) -> str:
        return f"{self._origin[:16]} round {request.round} attempt {request.attempt}"


def serve(worker: Worker, stop: Callable[[], bool] = lambda: False) -> None:
    """Answer requests on the site's socket, one at a time, until `stop` says so."""
    path = socket_path(worker.folder.path)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        mask = os.umask(0o117)  # owner and group
        try:
            server.bind(str(path))
        finally:
            os.umask(mask)
        server.listen()
        server.settimeout(0.5)
        try:
            while not stop():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(60)
                    try:
                        send(connection, worker.answer(receive(connection)))
                    except (OSError, EOFError):
                        continue  # the SuperNode is gone; its request will come again
        finally:
            path.unlink(missing_ok=True)


def run_worker(folder: Path) -> None:
    """Run the worker of a site's folder until SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))

    def log(text: str) -> None:
        print(f"{datetime.datetime.now().astimezone().isoformat(timespec='seconds')} {text}", flush=True)

    try:
        worker = Worker(SiteFolder(folder), log)
    except GpflError as error:
        log(f"stopped: {error}")
        sys.exit(2)
    log(f"ready: site {worker.name}, data card {worker.card.digest[:12]}, {versions()}, python {platform.python_version()}")
    serve(worker)


if __name__ == "__main__":
    run_worker(Path(sys.argv[1]))
