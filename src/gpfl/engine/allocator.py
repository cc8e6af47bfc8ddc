"""Memory of a process: freed blocks are kept for the next step rather than handed back to the system.

A step on a CPU makes and frees tensors of many megabytes. glibc, as it comes, gives their pages back at once, and the next step
waits while the system clears new ones.
"""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # names of glibc's mallopt
KEPT = {
    MMAP_MAX: 0,  # no block has pages of its own, however large
    TRIM_THRESHOLD: 2**31 - 1,
    TOP_PAD: 64 * 2**20,
}

NAMES = ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")
"""What glibc's users set, as MALLOC_MMAP_MAX_ or among its tunables, to say what it keeps."""


def retain_freed_memory() -> bool:
    """Lets this process keep what it frees, where its C library is glibc and the user has set nothing else; says whether."""
    if platform.libc_ver()[0] != "glibc" or user_sets():
        return False
    settle = ctypes.CDLL(None).mallopt
    return {settle(name, value) for name, value in KEPT.items()} == {1}


def user_sets() -> bool:
    """Says whether the environment tells glibc what to keep, or puts another allocator in its place."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return (
        any(f"MALLOC_{name}_" in os.environ for name in NAMES)
        or any(f"malloc.{name.lower()}" in tunables for name in NAMES)
        or "malloc" in os.environ.get("LD_PRELOAD", "")
    )
