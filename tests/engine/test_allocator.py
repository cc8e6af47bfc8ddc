"""Memory that a process keeps: freed blocks are used again without new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from conftest import Command

from gpfl.engine import allocator
from gpfl.engine.allocator import retain_freed_memory, user_sets

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")

FAULTS = """
import resource, sys, torch
from gpfl.engine.allocator import retain_freed_memory
retain_freed_memory()
torch.ones(20 * 2**20)  # 80 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    a, b = torch.ones(16 * 2**20), torch.ones(2 * 2**20)
    del a, b
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    told = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**told, **environment}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_kept_memory_is_used_again_without_new_pages() -> None:
    kept, plain = faults(), faults(MALLOC_TRIM_THRESHOLD_="1048576", MALLOC_MMAP_THRESHOLD_="1048576")
    assert plain > 10 * kept  # 20 passes of new pages, and at most one


def test_command_keeps_memory(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for other in [name for name in os.environ if name.startswith("MALLOC_")] + ["GLIBC_TUNABLES", "LD_PRELOAD"]:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # says nothing of what is kept
    assert not user_sets()
    monkeypatch.setenv(name, value)
    assert user_sets()
    assert retain_freed_memory() is False
