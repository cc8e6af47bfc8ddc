"""Files for administrators: the page of a site, systemd units, and the configuration of the proxy."""

from collections.abc import Sequence

import gpfl

NGINX = """# A site reaches Flower's fleet API and nothing else. The control API of the SuperLink has no login: whoever reaches
# it can submit runs and register nodes. It stays on this machine.
# Put this file into /etc/nginx/conf.d and change CERTS to the folder coordinator/certs.
server {{
    listen {port} ssl;
    server_name {names};
    ssl_certificate     CERTS/server.crt;
    ssl_certificate_key CERTS/server.key;
    ssl_protocols       TLSv1.2 TLSv1.3;
    client_max_body_size 1g;
    proxy_read_timeout   1h;
    # allow 192.0.2.0/24; deny all;   # the addresses of the sites, if they are fixed

    location /v1/fleet/ {{
        proxy_pass https://127.0.0.1:{link_port};
        proxy_ssl_trusted_certificate CERTS/ca.crt;
        proxy_ssl_verify on;
        proxy_ssl_name {name};
        proxy_set_header Host $host;
    }}
    location / {{ return 404; }}
}}
"""

UNIT = """[Unit]
Description={description}
After=network-online.target{after}
Wants=network-online.target

[Service]
User={user}
{group}ExecStart={command}
Restart={restart}
RestartSec={delay}
SuccessExitStatus=143
KillMode=control-group
UMask=0077
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ReadWritePaths={folder}

[Install]
WantedBy=multi-user.target
"""

SITE_PAGE = """# Site {site} of run {run}

This folder belongs to {site}. `node.key` is the site's identity: it stays in this folder, and nobody else gets a copy. Delete
the folder at the coordinator once you have it.

1. Install the same versions as the coordinator, gpfl {version} with its extra `flower`, and torch {torch}.
2. Put your file or folder of files at `data`, or change `data` in `site.toml`.
3. Check them against the data card, read `card.toml`, and accept it if you agree: `gpfl deploy site check . --accept`
4. Read `outbound.toml`, which says what may leave, and change it as you see fit. What would leave: `gpfl deploy site dry-run .`
5. Start: `gpfl deploy site start .`

For a service, as root and in this folder, which both users must be able to reach, as gpfl itself. The worker, which reads the
data, runs as `gpfl-data`; the SuperNode, which talks to {server}, runs as `gpfl-net` and reads neither data nor state:

```
groupadd gpfl-site
useradd --system --groups gpfl-site gpfl-data
useradd --system --groups gpfl-site gpfl-net
mkdir flwr
chown -R gpfl-data:gpfl-site .
chown gpfl-net node.key flwr
chmod 2750 .
chmod 640 site.toml ca.crt
chmod 700 flwr
chmod -R go= data
sed -i "s|FOLDER|$PWD|; s|GPFL|$(command -v gpfl)|" systemd/*.service
cp systemd/*.service /etc/systemd/system/
systemctl daemon-reload
systemctl enable --now gpfl-worker gpfl-node
```

Your model after the run: `gpfl deploy model . -o model.safetensors`, then `gpfl predict model.safetensors new.csv`.
A new node key: `gpfl deploy site new-key .`, then send `node.pub` to the coordinator, who runs `gpfl deploy register`.
"""


def nginx_config(names: Sequence[str], port: int, link_port: int) -> str:
    """Return the configuration of a proxy that exposes the fleet API alone."""
    # nginx compares the certificate of the SuperLink with names, not with addresses.
    name = next((each for each in names if not each.replace(".", "").isdecimal() and ":" not in each), names[0])
    return NGINX.format(names=" ".join(names), name=name, port=port, link_port=link_port)


def server_units() -> dict[str, str]:
    """Return the systemd units of the coordinator by file name. FOLDER stands for its folder, GPFL for the program."""
    common = {"user": "gpfl", "group": "", "folder": "FOLDER"}
    return {
        "gpfl-server.service": UNIT.format(
            description="gpfl: SuperLink of the deployment",
            after="",
            command="GPFL deploy server FOLDER",
            restart="always",
            delay=5,
            **common,
        ),
        "gpfl-run.service": UNIT.format(  # after the machine died as well; a finished run ends at once
            description="gpfl: run of the deployment, to its end",
            after=" gpfl-server.service",
            command="GPFL deploy run FOLDER",
            restart="on-failure",
            delay=60,
            **common,
        ),
    }


def site_units() -> dict[str, str]:
    """Return the systemd units of a site by file name. FOLDER stands for its folder, GPFL for the program."""
    group = "Group=gpfl-site\n"
    return {
        "gpfl-worker.service": UNIT.format(
            description="gpfl: worker of the site, which reads its data",
            after="",
            user="gpfl-data",
            group=group,
            command="GPFL deploy site worker FOLDER",
            restart="always",
            delay=5,
            folder="FOLDER",
        ),
        "gpfl-node.service": UNIT.format(
            description="gpfl: SuperNode of the site, which talks to the coordinator",
            after=" gpfl-worker.service",
            user="gpfl-net",
            group=group,
            command="GPFL deploy site node FOLDER",
            restart="always",
            delay=10,
            folder="FOLDER",
        ),
    }


def site_page(site: str, run: str, server: str, torch: str) -> str:
    """Return the page for a site's administrator."""
    return SITE_PAGE.format(site=site, run=run, server=server, version=gpfl.__version__, torch=torch)
