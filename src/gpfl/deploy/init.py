"""Make the folders of a deployment: one for the coordinator and one for each site, with keys, data card and policy."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from gpfl.core.options import options_of
from gpfl.deploy import keys
from gpfl.deploy.admin_files import nginx_config, server_units, site_page, site_units
from gpfl.deploy.card import DataCard
from gpfl.deploy.policy import Policy
from gpfl.deploy.server import DEPLOYMENT
from gpfl.deploy.worker import CARD, CARD_SIGNATURE, POLICY, SIGNING_KEY, SITE, versions
from gpfl.errors import GpflError
from gpfl.io import files, toml

FLWR_RANGE = "flwr>=1.41,<1.43"
PORT, LINK_PORT = 8443, 8444
"""Ports of the server: the one that sites reach, at the proxy, and that of the SuperLink, on the machine itself."""

APP = f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "gpfl"
version = "1.0.0"
description = "Personalised federated learning; the code is in the package gpfl, which every site installs itself"
license = {{ file = "LICENSE" }}
dependencies = ["{FLWR_RANGE}"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "gpfl"
fab-format-version = 1
flwr-version-target = "1.41.0"
fab-include = ["LICENSE", "README.md"]

[tool.flwr.app.components]
serverapp = "gpfl.deploy.flower:server_app"
clientapp = "gpfl.deploy.flower:client_app"

[tool.flwr.app.config]
folder = ""
simulation = false
"""
"""The app that Flower sends to sites. It holds no code: its components are in the installed package."""

APP_PAGE = """# gpfl

Personalised federated learning, deployed by the package gpfl (`pip install 'gpfl[flower]'`). This app holds
no code: its components, `gpfl.deploy.flower:server_app` and `client_app`, are in the package that every site installs itself.
`gpfl deploy run` starts it with the folder of a coordinator, which `gpfl deploy init` makes.

In Flower's simulation, with the folders of all sites beside the coordinator's, each with its data and an accepted data card:

    flwr run . local --stream --run-config 'folder="/path/to/coordinator" simulation=true' \\
        --federation-config 'num-supernodes=3 client-resources-num-cpus=1'
"""

LICENSE = "Licensed under the Apache License, Version 2.0: https://www.apache.org/licenses/LICENSE-2.0\n"

GPFL_UPLOADS = """
The run trains GPFL. A single upload of GPFL's conditional valve reveals this site's label proportions exactly to the
coordinator, in any round: the update of its weights spans the mean of the class embeddings weighted by these proportions. With
alpha_levels = 1 under [method] in the config of the run the valve reveals only which classes are present, with
valve_gradient = "global" not even that; but the class embeddings still allow a close guess. A secure sum hides single uploads,
so with secure_sum = true this site trains in a run with one and in no other. A sum of few sites still reveals the exact
proportions of some, unless the config has one of these options: ask for both. Set secure_sum to false if the coordinator may
know how frequent each class is here.
""".strip()


def make_deployment(
    folder: Path,
    card: DataCard,
    names: Sequence[str],
    *,
    port: int = PORT,
    policy: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Make the folders of a deployment, all or none.

    Args:
        folder: Folder for `coordinator` and `sites/NAME`.
        card: The data card.
        names: Host names and addresses of the server; sites connect to the first.
        port: Port of the server.
        policy: Rules of the sites' policies besides those made from the card.
        settings: Further settings of the coordinator, such as `min_clients` and `deadline`.

    """
    for name in ("coordinator", "sites"):
        if (folder / name).exists():
            raise GpflError(f"{folder / name} exists and nothing is overwritten: choose another folder")
    files.make_folder(folder)
    temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".new-"))
    try:
        _write_coordinator(temporary / "coordinator", card, names, port, settings or {})
        for site in card.sites:
            _write_site(temporary / "sites" / site, temporary / "coordinator", card, site, f"{names[0]}:{port}", policy or {})
        for each in ("coordinator", "sites"):
            (temporary / each).rename(folder / each)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_app(folder: Path) -> None:
    """Write the Flower app, which could also be published on Flower Hub."""
    for name, content in (("pyproject.toml", APP), ("LICENSE", LICENSE), ("README.md", APP_PAGE)):
        files.write_text(folder / name, content)


def write_card(folder: Path, card: DataCard) -> None:
    """Write a data card and its signature into the coordinator's folder, in place of the last one."""
    text = card.to_toml()
    signature = keys.sign(text.encode(), folder / "signing.key")[: keys.SIGNATURE_BYTES]
    files.write_text(folder / CARD, text)
    files.write_text(folder / CARD_SIGNATURE, signature.hex() + "\n")


def replace_node_key(folder: Path) -> None:
    """Write a new node key into a site's folder; the old one is kept beside it until it is no longer registered."""
    for name in ("node.key", "node.pub"):
        if (folder / name).exists():
            (folder / name).replace(folder / f"{name}.old")
    keys.make_node_key(folder)


def draft_policy(card: DataCard) -> dict[str, object]:
    """Return the rules that follow from a data card."""
    method, rounds = str(card.config.get("method", {}).get("name", "gpfl")), card.config.get("train", {}).get("rounds", 100)
    most = int(str(rounds)) + max(5, int(str(rounds)) // 10)  # rounds may be repeated
    secure_sum = card.secure_sum or shares_embeddings(card)
    return {"card": card.digest, "methods": [method], "max_rounds": most, "min_samples": 10, "secure_sum": secure_sum}


def shares_embeddings(card: DataCard) -> bool:
    """Return whether uploads of a run hold GPFL's category embeddings, which allow a close guess of label proportions."""
    method = card.config.get("method", {})
    return method.get("name", "gpfl") == "gpfl" and "gce" not in cast(list[str], method.get("without", ()))


def reveals_label_proportions(card: DataCard) -> bool:
    """Return whether single uploads of a run reveal label proportions exactly: those of GPFL, except in some variants."""
    method = card.config.get("method", {})
    if not shares_embeddings(card) or {"cov", "pci"} & set(cast(list[str], method.get("without", ()))):
        return False
    is_open = method.get("valve_gradient", "both") == "both" and bool(method.get("share_valve", True))
    return is_open and method.get("alpha_levels", 0) != 1


def format_policy(rules: Mapping[str, object]) -> str:
    """Return the text of a policy file with a comment for every rule."""
    defaults = vars(Policy())
    lines = [
        "# What may leave this site. The site's worker enforces it, whatever the coordinator asks; see docs/deploy.md.",
        "",
    ]
    for key, rule in options_of(Policy).items():
        value = rules.get(key, defaults[key])
        lines += [f"# {rule.help}"]
        if key == "secure_sum" and value and "gpfl" in cast(list[str], rules.get("methods", [])):
            lines += [f"# {line}" for line in GPFL_UPLOADS.splitlines()]
        lines += [f"{key} = {toml.format_value(value)}", ""]
    return "\n".join(lines)


def _write_coordinator(folder: Path, card: DataCard, names: Sequence[str], port: int, settings: Mapping[str, object]) -> None:
    folder.mkdir()
    keys.make_ca(folder / "certs", card.run)
    keys.make_server_certificate(folder / "certs", names)
    keys.make_signing_key(folder)
    write_card(folder, card)
    content = {
        "names": list(names),
        "port": port,
        "min_clients": len(card.sites),
        "start_clients": len(card.sites),
        "deadline": 600.0,
        "connect": 60.0,
        **settings,
    }
    files.write_text(folder / DEPLOYMENT, toml.dump(content))
    write_app(folder / "app")
    link_port = settings.get("link_port", LINK_PORT)
    assert isinstance(link_port, int)
    files.write_text(folder / "nginx.conf", nginx_config(names, port, link_port))
    for name, unit in server_units().items():
        files.write_text(folder / "systemd" / name, unit)


def _write_site(folder: Path, coordinator: Path, card: DataCard, site: str, server: str, policy: Mapping[str, object]) -> None:
    if Path(site).name != site or site.startswith("."):
        raise GpflError(f"the site name '{site}' names a folder: use letters, digits and -")
    folder.mkdir(parents=True)
    folder.chmod(0o750)
    keys.make_node_key(folder)
    files.write_text(folder / SITE, toml.dump({"name": site, "server": server, "data": "data"}))
    for name in (CARD, CARD_SIGNATURE, SIGNING_KEY):
        shutil.copy(coordinator / name, folder / name)
    shutil.copy(coordinator / "certs" / "ca.crt", folder / "ca.crt")
    files.write_text(folder / POLICY, format_policy({**draft_policy(card), **policy}))
    files.write_text(folder / "README.md", site_page(site, card.run, server, versions()["torch"]))
    for name, unit in site_units().items():
        files.write_text(folder / "systemd" / name, unit)
    (coordinator / "sites").mkdir(exist_ok=True)
    shutil.copy(folder / "node.pub", coordinator / "sites" / f"{site}.pub")
