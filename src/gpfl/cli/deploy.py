"""The command `gpfl deploy`: federations across machines."""

import datetime
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import click
import numpy as np
from rich.table import Table as RichTable

from gpfl.cli.command import Argument, Group
from gpfl.cli.options import out_option
from gpfl.cli.terminal import print_line, table_console
from gpfl.data.files.dataset import ONE_CLIENT
from gpfl.data.files.writer import check_output
from gpfl.data.preprocessing import ClientStatistics
from gpfl.defences.accounting import format_epsilon
from gpfl.deploy import demo as demos
from gpfl.deploy import keys
from gpfl.deploy.card import DataCard, describe_site
from gpfl.deploy.dry_run import dry_run
from gpfl.deploy.init import (
    LINK_PORT,
    PORT,
    draft_policy,
    make_deployment,
    replace_node_key,
    reveals_label_proportions,
    write_card,
)
from gpfl.deploy.policy import Policy
from gpfl.deploy.programs import (
    Control,
    Processes,
    environment,
    is_listening,
    superlink_command,
    supernode_command,
    worker_command,
)
from gpfl.deploy.server import CoordinatorFolder
from gpfl.deploy.status import site_statuses
from gpfl.deploy.supervise import NODE_DELAY, RUN, Program, finish_run, has_ended, keep_running, last_reason, run_number
from gpfl.deploy.worker import CARD, CARD_SIGNATURE, POLICY, SiteFolder, Worker, run_worker
from gpfl.errors import GpflError
from gpfl.methods import METHODS
from gpfl.report.tables import format_bytes
from gpfl.training.config import read_config

EXPIRY_DAYS = 30
"""Days before its certificate expires from which the server warns."""


@click.group(cls=Group)
def deploy() -> None:
    """Train across machines, on Flower with TLS."""


@deploy.command()
@click.option("--data", type=click.Choice(demos.DATA), default="digits", show_default=True, help="Data of the sites.")
@click.option(
    "--method", type=click.Choice(list(METHODS)), metavar="NAME", default="gpfl", show_default=True, help="Method of the run."
)
@click.option("--rounds", type=click.IntRange(1, 50), default=demos.ROUNDS, show_default=True, help="Rounds.")
@out_option("Folder to keep; the files of sites in it are used again, as they are  [default: a temporary one]")
def demo(data: str, method: str, rounds: int, out: Path | None) -> None:
    """Run a whole deployment on this machine, and compare it with the simulation.

    Makes certificates, node keys and folders, starts a server and a pair of processes for each site, trains over TLS, and
    checks that models and accuracies equal those of the simulation of the same files.
    """
    require_flower()
    folder = out or Path(tempfile.mkdtemp(prefix="gpfl-"))
    try:
        with stopped_by_sigterm():
            result = demos.run_demo(data, folder, method=method, rounds=rounds, log=print_line)
    finally:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
    table = RichTable("site", "training samples", "test samples", "deployed", "simulated", "model")
    for site in result.sites:
        equal = "bit-identical" if site.equal else "different"
        table.add_row(site.name, *map(str, site.samples), f"{site.deployed:.2%}", f"{site.simulated:.2%}", equal)
    table_console().print(table)
    if not result.equal:
        raise GpflError("the deployment differs from the simulation: run it again with --out and report the folder's logs")
    print_line(
        f"{method} on {data}: equal to the simulation. {result.seconds:.0f} s; rounds sent {result.bytes_up:,} bytes up and "
        f"{result.bytes_down:,} down."
    )
    if out is not None:
        print_line(f"Run: {folder / 'coordinator' / 'runs' / 'demo'}. Change a file in {folder / 'data'} and run it again.")


folder_argument = click.argument(
    "folder", cls=Argument, metavar="DIR", type=click.Path(path_type=Path, file_okay=False), help="Folder of the coordinator."
)
site_argument = click.argument(
    "folder", cls=Argument, metavar="DIR", type=click.Path(path_type=Path, file_okay=False), help="Folder of the site."
)


@deploy.command()
@click.argument("folder", cls=Argument, metavar="DIR", type=click.Path(path_type=Path), help="New folder.")
@click.option("--config", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Config of the run.")
@click.option("--sites", required=True, metavar="NAME,…", help="Names of the sites.")
@click.option("--server", required=True, metavar="HOST,…", help="Names and addresses of the server; sites use the first.")
@click.option("--port", type=click.IntRange(1, 65535), default=PORT, show_default=True, help="Port that sites reach.")
@click.option(
    "--link-port", type=click.IntRange(1, 65535), default=LINK_PORT, show_default=True, help="Port of the SuperLink, behind it."
)
@click.option("--name", default="run", show_default=True, help="Name of the run.")
@click.option("--min-clients", type=click.IntRange(1), default=None, metavar="N", help="Uploads a round needs  [default: all]")
@click.option(
    "--start-clients",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Sites needed before round 0; others join between rounds  [default: all]",
)
@click.option("--deadline", type=click.FloatRange(1), default=600.0, show_default=True, help="Seconds to wait for replies.")
@click.option("--secure-sum", is_flag=True, help="The coordinator learns only the sum of uploads; needs 3 sites.")
@click.option(
    "--plain-uploads",
    is_flag=True,
    help="Draft policies that allow GPFL's plain uploads, which reveal label proportions.",
)
def init(
    folder: Path,
    config: Path,
    sites: str,
    server: str,
    port: int,
    link_port: int,
    name: str,
    min_clients: int | None,
    start_clients: int | None,
    deadline: float,
    secure_sum: bool,
    plain_uploads: bool,
) -> None:
    """Make the folders of coordinator and sites: certificates, keys, data card, policies."""
    require_flower()
    names = [each.strip() for each in sites.split(",") if each.strip()]
    settings: dict[str, object] = {"link_port": link_port, "deadline": deadline}
    for key, needed in (("start_clients", start_clients), ("min_clients", min_clients)):
        if needed is not None:
            if needed > len(names):
                raise GpflError(f"--{key.replace('_', '-')} is {needed}, but there are {len(names)} sites: lower it")
            settings[key] = needed
    if start_clients is not None and (min_clients is None or start_clients < min_clients):
        raise GpflError(
            f"--start-clients is {start_clients}, but a round needs --min-clients {min_clients or len(names)}: lower that too"
        )
    if secure_sum and plain_uploads:
        raise GpflError("--secure-sum and --plain-uploads exclude each other: leave one out")
    card = DataCard.make(name, names, read_config(config), secure_sum=secure_sum)
    hosts = [each.strip() for each in server.split(",") if each.strip()]
    # Commands at the coordinator reach the SuperLink on the machine itself.
    hosts = list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"]))
    policy = {"secure_sum": False} if plain_uploads else {}
    make_deployment(folder, card, hosts, port=port, policy=policy, settings=settings)
    print_line(f"Coordinator: {folder / 'coordinator'}. Start it with gpfl deploy server {folder / 'coordinator'}")
    for site in card.sites:
        print_line(f"Site {site}: {folder / 'sites' / site}. Send it over a secure channel, then delete it here.")
    if draft_policy(card)["secure_sum"] and not plain_uploads and not secure_sum:
        print_line(
            "Note: a plain upload of GPFL reveals a site's label proportions, so the drafted policies let sites train in a "
            "secure sum only: add --secure-sum, or --plain-uploads if the coordinator may know them."
        )
    if reveals_label_proportions(card) and not plain_uploads:
        print_line(
            "Note: sums of few sites still reveal exact label proportions of some: set alpha_levels = 1 under [method] in the "
            "config."
        )


@deploy.command()
@folder_argument
def server(folder: Path) -> None:
    """Run the SuperLink of a coordinator, supervised, until Ctrl-C."""
    require_flower()
    own = CoordinatorFolder(folder)
    days = (keys.expiry(folder / "certs" / "server.crt") - datetime.datetime.now(datetime.UTC)).days
    if days < 0:
        raise GpflError(f"the certificate of the server has expired: gpfl deploy renew {folder}")
    if days < EXPIRY_DAYS:
        print_line(f"The certificate of the server expires in {days} days: gpfl deploy renew {folder}")
    with stopped_by_sigterm(), Processes(folder / "log") as processes:
        programs = {"superlink": Program(lambda: superlink_command(own), folder / "flwr")}
        threading.Thread(target=_keep_registered, args=(own,), daemon=True).start()
        keep_running(processes, programs, print_line)


def _keep_registered(folder: CoordinatorFolder) -> None:
    """Register node keys whenever the SuperLink has started, since its database may be new."""
    while True:
        while not is_listening(folder.link_port):
            time.sleep(0.2)
        try:
            Control(folder).register()
        except GpflError as error:
            print_line(f"node keys are not registered: {error}")
            time.sleep(5)
            continue
        print_line(f"node keys registered: {', '.join(folder.card.sites)}")
        while is_listening(folder.link_port):
            time.sleep(1)


@deploy.command()
@folder_argument
def run(folder: Path) -> None:
    """Run the training of a deployment to its end, or resume it.

    Starts it again from its last checkpoint if the server or the machine died.
    """
    require_flower()
    own = CoordinatorFolder(folder)
    with stopped_by_sigterm():
        finish_run(own, print_line)
    print_line(f"Finished: {own.run}. Sites get their models with gpfl deploy model.")


@deploy.command()
@folder_argument
def status(folder: Path) -> None:
    """Show for each site: connection, last round, uploads made and their ε, bytes, last error."""
    require_flower()
    own = CoordinatorFolder(folder)
    table = RichTable("site", "connection", "last round", "uploads", "ε", "bytes up", "bytes down", "last error")
    for site in site_statuses(own):
        table.add_row(
            *(site.name, site.connection, str(site.last_round or "none")),
            *(str(site.uploads), format_epsilon(site.epsilon) if site.epsilon else "no noise"),
            *(format_bytes(site.bytes_up), format_bytes(site.bytes_down), site.last_error or "none"),
        )
    table_console().print(table)
    finished = (own.run / "summary.json").exists()
    reason = last_reason(own)
    state = "finished" if finished else f"stopped: {reason}" if reason else "not finished"
    print_line(f"Run '{own.card.run}': {state}.")


@deploy.command()
@click.argument(
    "folder",
    cls=Argument,
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the coordinator or of a site.",
)
@click.option("-n", "--lines", type=click.IntRange(1), default=50, show_default=True, help="Lines of each log.")
def logs(folder: Path, lines: int) -> None:
    """Show the last lines of the logs of a coordinator or a site."""
    paths = sorted((folder / "log").glob("*.log"))
    if not paths:
        raise GpflError(f"there are no logs in {folder / 'log'}: has it been started?")
    for path in paths:
        print_line(f"==> {path} <==")
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]:
            print_line(line)


@deploy.command()
@folder_argument
def stop(folder: Path) -> None:
    """Stop the run. `gpfl deploy run` resumes it."""
    require_flower()
    own = CoordinatorFolder(folder)
    number = run_number(own)
    if not number or has_ended(Control(own).status(number)):
        raise GpflError(f"run '{own.card.run}' is not running")
    Control(own).stop(number)
    print_line(f"Run '{own.card.run}' stopped after its last checkpoint; resume it with gpfl deploy run {folder}")


@deploy.command()
@folder_argument
@click.option("--config", type=click.Path(path_type=Path), required=True, metavar="FILE", help="Config of the next run.")
@click.option("--name", required=True, help="Name of the next run.")
def card(folder: Path, config: Path, name: str) -> None:
    """Issue a data card for another run of the same sites."""
    require_flower()
    own = CoordinatorFolder(folder)
    if (folder / "runs" / name).exists() or own.card.run == name:
        raise GpflError(f"there is a run '{name}' already: choose another --name")
    write_card(folder, DataCard.make(name, own.card.sites, read_config(config), secure_sum=own.card.secure_sum))
    (folder / "state" / RUN).unlink(missing_ok=True)
    print_line(f"Send {folder / CARD} and {folder / CARD_SIGNATURE} to the sites, which check and accept them.")


@deploy.command()
@folder_argument
def renew(folder: Path) -> None:
    """Make a new certificate of the server, for another year. Restart the server afterwards; sites need nothing."""
    require_flower()
    names = CoordinatorFolder(folder).settings["names"]
    assert isinstance(names, list)
    keys.make_server_certificate(folder / "certs", [str(each) for each in names])
    print_line(
        f"Certificate until {keys.expiry(folder / 'certs' / 'server.crt'):%Y-%m-%d}. Restart gpfl deploy server and nginx."
    )


@deploy.command()
@folder_argument
@click.option("--site", required=True, metavar="NAME", help="Name of the site.")
@click.option("--key", required=True, type=click.Path(path_type=Path), metavar="FILE", help="File node.pub of the site.")
def register(folder: Path, site: str, key: Path) -> None:
    """Register another node key of a site, and revoke the old one."""
    require_flower()
    Control(CoordinatorFolder(folder)).replace_key(site, key)
    print_line(f"The node key of site {site} is replaced. A run in progress continues with it after gpfl deploy run.")


@deploy.command()
@site_argument
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, metavar="FILE", help="New .safetensors file.")
def model(folder: Path, out: Path) -> None:
    """Write a site's personal model, with its preprocessing, for gpfl predict."""
    require_flower()
    check_output(out, (".safetensors",), overwrite=False)
    made = Worker(SiteFolder(folder)).model_site().model()
    made.save(out)
    print_line(f"Model of site {made.name}: {out}. Use it with gpfl predict {out} FILE")


# A site.


@deploy.group(cls=Group)
def site() -> None:
    """Check, start and maintain a site."""


@site.command()
@site_argument
@click.option("--data", type=click.Path(path_type=Path), metavar="PATH", help="File or folder  [default: that of site.toml]")
@click.option("--accept", is_flag=True, help="Accept the data card if the data fit it.")
def check(folder: Path, data: Path | None, accept: bool) -> None:
    """Check a site's data against the data card."""
    require_flower()
    own = SiteFolder(folder)
    card = own.card
    found = card.read(own.name, data or own.data, own.path)
    described = describe_site(found)
    print_line(found.table.description.replace(f"\n{ONE_CLIENT}", ""))
    train, validation, test = described.sizes
    print_line(
        f"Site {own.name}: {train:,} training, {validation:,} validation and {test:,} test samples. They fit the data card."
    )
    counts = np.bincount(found.table.y.numpy(), minlength=len(card.classes))
    print_line("Classes: " + ", ".join(f"{name} {count:,}" for name, count in zip(card.classes, counts, strict=True)))
    print_line(f"Data card of run '{card.run}', signed by the coordinator: {folder / CARD}, SHA-256 {card.digest}")
    if accept:
        own.accept()
        print_line("Accepted.")
        allowed = Policy.read(folder / POLICY).card
        if allowed not in ("", card.digest):
            print_line(f'{folder / POLICY} still names another card: set its rule card to this SHA-256 if you agree, or to "".')
    elif own.accepted != card.digest:
        print_line("Not accepted yet: read the card, then run this again with --accept.")


@site.command("dry-run")
@site_argument
def dry(folder: Path) -> None:
    """Show what would leave a site in a round: names, shapes, bytes. Nothing is sent."""
    require_flower()
    own = SiteFolder(folder)
    card = own.card
    found = dry_run(card, own.name, card.read(own.name, own.data, own.path), Policy.read(folder / POLICY))
    print_line(f"Before round 0, {found.description_bytes:,} bytes: numbers of samples {list(found.description.sizes)}")
    for line in ClientStatistics.from_dict(found.description.statistics).describe():
        print_line(f"  {line}")
    title = f"Each round, {found.reply_bytes:,} bytes; norm of the update {found.norm:.4g}"
    table = RichTable("tensor", "shape", "bytes", title=title)
    for path, (shape, size) in found.tensors.items():
        table.add_row(path, "×".join(map(str, shape)) or "1", f"{size:,}")
    table_console().print(table)
    for split, (correct, loss, n) in found.scores.items():
        print_line(f"Scores of {split} samples: {correct:.0f} of {n} correct, loss {loss:.4g} summed.")
    if found.labels is not None and found.labels.guess is not None:
        masked = ", were it not masked" if card.secure_sum else ""
        print_line(
            f"From this upload{masked}, an attack guesses the site's label proportions at a total variation distance of "
            f"{found.labels.guess:.3f} (0 = exact; the uniform guess: {found.labels.uniform:.3f})."
        )
    if card.secure_sum:
        print_line("Tensors leave masked, 8 bytes a number; the coordinator learns only their sum over sites.")
    elif reveals_label_proportions(card):
        print_line(
            "GPFL's valve reveals the label proportions to the coordinator exactly, unless noise or a secure sum of many sites "
            "hides them; with alpha_levels = 1 it does not."
        )
    for reason in found.refused:
        print_line(f"Refused by {folder / POLICY}: {reason}")
    if not found.refused:
        print_line(f"{folder / POLICY} allows all of this to leave.")


@site.command()
@site_argument
def start(folder: Path) -> None:
    """Run the worker and the SuperNode of a site, supervised, until Ctrl-C."""
    require_flower()
    own = SiteFolder(folder)
    if own.accepted != own.card.digest:
        raise GpflError(f"the data card of {folder} is not accepted: gpfl deploy site check {folder} --accept")
    programs = {
        "worker": Program(lambda: worker_command(own), folder / "flwr"),
        "supernode": Program(lambda: supernode_command(own), folder / "flwr", NODE_DELAY),
    }
    with stopped_by_sigterm(), Processes(folder / "log") as processes:
        keep_running(processes, programs, print_line)


@site.command()
@site_argument
def worker(folder: Path) -> None:
    """Run a site's worker alone, as a user who may read its data."""
    require_flower()
    run_worker(folder)


@site.command()
@site_argument
def node(folder: Path) -> None:
    """Run a site's SuperNode alone, as a user who may not read its data."""
    require_flower()
    command = supernode_command(SiteFolder(folder))
    os.execve(command[0], command, environment(folder / "flwr"))


@site.command("new-key")
@site_argument
def new_key(folder: Path) -> None:
    """Make a new node key of a site. The old one is kept until the coordinator has replaced it."""
    require_flower()
    replace_node_key(folder)
    print_line(
        f"Send {folder / 'node.pub'} to the coordinator, then restart the site. {folder / 'node.key.old'} can be deleted then."
    )


def require_flower() -> None:
    """Raise if Flower is not installed."""
    for name in ("flwr", "cryptography"):
        if find_spec(name) is None:
            raise GpflError(f"the package {name} is missing, which deployments need: pip install 'gpfl[flower]'")


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """On SIGTERM in the block, leave it as on Ctrl-C, so that processes it has started are stopped."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
