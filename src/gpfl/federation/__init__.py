"""Federations: a table and the samples of each client; partitions that make them; manifests that save them."""

from gpfl.federation.build import federate as federate
from gpfl.federation.build import partition_table as partition_table
from gpfl.federation.federation import Federation as Federation
from gpfl.federation.federation import Shard as Shard
from gpfl.federation.federation import share_table as share_table
from gpfl.federation.manifest import MANIFEST as MANIFEST
from gpfl.federation.partition import PARTITIONS as PARTITIONS
from gpfl.federation.partition import Partition as Partition
