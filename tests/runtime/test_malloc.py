"""tune_malloc: freed memory is reused without page faults; trim_malloc returns it to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitrail.runtime import malloc

COUNT = """
import resource, torch
from vitrail.runtime.malloc import tune_malloc
assert tune_malloc()
torch.set_num_threads(1)
x = torch.zeros(1 << 22)
def step():
    a = x + 1
    b = a + 1
    return float((a + b)[0])
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    assert step() == 3.0
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(malloc.platform.libc_ver()[0] != "glibc", reason="only glibc supports it")
def test_freed_pages_are_reused_without_page_faults() -> None:
    output = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, check=True).stdout
    pages = 3 * (1 << 24) // 4096  # used by one step
    assert int(output) < pages, (
        "ten steps reuse the memory of one; by default there are three to ten times as many page faults"
    )


def test_another_libc_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(malloc.ctypes, "CDLL", lambda _: pytest.fail("called"))
    assert not malloc.tune_malloc()
    assert not malloc.trim_malloc()


TRIM = """
from pathlib import Path
from vitrail.runtime.malloc import tune_malloc, trim_malloc
resident_pages = lambda: int(Path("/proc/self/statm").read_text().split()[1])
assert tune_malloc()
before = resident_pages()
blocks = [bytearray(b"x" * 1_000_000) for _ in range(100)]
last = bytearray(b"x" * 1_000_000)
del blocks
freed = resident_pages()
trim_malloc()
print(freed - before, resident_pages() - before)
"""


@pytest.mark.skipif(malloc.platform.libc_ver()[0] != "glibc", reason="only glibc supports it")
def test_trimming_returns_freed_memory_to_the_system() -> None:
    output = subprocess.run([sys.executable, "-c", TRIM], capture_output=True, check=True).stdout
    before_trim, after_trim = (pages * 4096 for pages in map(int, output.split()))
    assert before_trim > 80_000_000
    assert after_trim < 20_000_000
