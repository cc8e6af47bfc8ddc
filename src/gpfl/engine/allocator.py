"""glibc's memory allocator: keep freed blocks for the next step instead of returning them to the system.

A step on a CPU allocates and frees tensors of many megabytes. By default glibc returns their pages at once, and the next step
waits while the kernel clears new ones.
"""

import ctypes
import os
import platform

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt
SETTINGS = {
    MMAP_MAX: 0,  # no mmap, however large the block
    TRIM_THRESHOLD: 2**31 - 1,
    TOP_PAD: 64 * 2**20,
}
USER_SETTINGS = ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")  # as MALLOC_MMAP_MAX_ or a tunable


def retain_freed_memory() -> bool:
    """Keep freed memory in this process, unless the C library is not glibc or the user configured it; return whether."""
    if platform.libc_ver()[0] != "glibc" or is_configured_by_user():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return {mallopt(parameter, value) for parameter, value in SETTINGS.items()} == {1}


def is_configured_by_user() -> bool:
    """Return whether the environment sets glibc's allocator or replaces it."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return (
        any(f"MALLOC_{name}_" in os.environ for name in USER_SETTINGS)
        or any(f"malloc.{name.lower()}" in tunables for name in USER_SETTINGS)
        or "malloc" in os.environ.get("LD_PRELOAD", "")
    )
