"""A federation: a table and each client's rows of it; the partitions that make one; the manifest that saves it."""

from gpfl.federation.federation import MANIFEST, Federation, federate

__all__ = ["MANIFEST", "Federation", "federate"]
