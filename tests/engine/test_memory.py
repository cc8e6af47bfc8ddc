"""Memory that a process keeps: freed blocks are used again without new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from gpfl.engine.memory import keep_memory, user_sets

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told what to keep")

FAULTS = """
import resource, sys, torch
from gpfl.engine.memory import keep_memory
keep_memory()
torch.ones(20 * 2**20)  # 80 MiB
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    a, b = torch.ones(16 * 2**20), torch.ones(2 * 2**20)
    del a, b
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    told = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env={**told, **environment}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_kept_memory_is_used_again_without_new_pages() -> None:
    kept, plain = faults(), faults(MALLOC_TRIM_THRESHOLD_="1048576", MALLOC_MMAP_THRESHOLD_="1048576")
    assert plain > 10 * kept  # 20 passes of new pages, and at most one


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1048576"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so /usr/lib/libtcmalloc.so"),
    ],
)
def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for other in ("MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(other, raising=False)
    assert not user_sets()
    monkeypatch.setenv(name, value)
    assert user_sets()
    assert keep_memory() is False
