"""Federations: a table and the samples of each client; partitions that make them; manifests that save them."""

from typing import TYPE_CHECKING

from gpfl.core.registry import Registry, lazy_attributes

if TYPE_CHECKING:
    from gpfl.federation.build import federate as federate
    from gpfl.federation.build import partition_table as partition_table
    from gpfl.federation.federation import MANIFEST as MANIFEST
    from gpfl.federation.federation import Federation as Federation
    from gpfl.federation.federation import Shard as Shard
    from gpfl.federation.federation import share_table as share_table
    from gpfl.federation.partition import Partition as Partition

PARTITIONS: Registry[type["Partition"]] = Registry(
    "gpfl.federation",
    {"pathological": "partition:Pathological", "dirichlet": "partition:Dirichlet", "natural": "partition:Natural"},
)

if not TYPE_CHECKING:
    __getattr__ = lazy_attributes(
        "gpfl.federation",
        {
            **dict.fromkeys(("federate", "partition_table"), "gpfl.federation.build"),
            **dict.fromkeys(("MANIFEST", "Federation", "Shard", "share_table"), "gpfl.federation.federation"),
            "Partition": "gpfl.federation.partition",
        },
    )
