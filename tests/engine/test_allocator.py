"""Freed memory is used again without new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from conftest import Command

from gpfl.engine import allocator
from gpfl.engine.allocator import is_configured_by_user, retain_freed_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is configured")

FAULTS = """
import resource, sys, torch
from gpfl.engine.allocator import retain_freed_memory
retain_freed_memory()
for k in range(25):
    if k == 5:  # the heap has grown
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    a, b = torch.ones(16 * 2**20), torch.ones(2 * 2**20)
    del a, b
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(**environment: str) -> int:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_retained_memory_is_used_again_without_new_pages() -> None:
    retained = min(page_faults() for _ in range(3))  # a busy system reclaims pages in between
    default = page_faults(MALLOC_TRIM_THRESHOLD_="1048576", MALLOC_MMAP_THRESHOLD_="1048576")
    assert default > 10 * retained  # new pages in all 20 passes, and in one at most


def test_command_retains_memory(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(allocator, "retain_freed_memory", lambda: called.append(True))
    assert command("list").code == 0
    assert called == [True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1048576"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1048576"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so /usr/lib/libtcmalloc.so"),
    ],
)
def test_users_own_settings_are_kept(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for variable in [name for name in os.environ if name.startswith("MALLOC_")] + ["GLIBC_TUNABLES", "LD_PRELOAD"]:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # does not affect freed memory
    assert not is_configured_by_user()
    monkeypatch.setenv(name, value)
    assert is_configured_by_user()
    assert retain_freed_memory() is False
