"""A heap that is kept: the same memory again, without a fault for each page."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vitrail.runtime import heap

COUNT = """
import resource, torch
from vitrail.runtime.heap import keep_heap
assert keep_heap()
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


@pytest.mark.skipif(heap.platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_pages_are_faulted_in_once() -> None:
    said = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, check=True).stdout
    pages = 3 * (1 << 24) // 4096  # what a step takes
    assert int(said) < pages, "ten steps in the memory of one; without it, three to ten times as many"


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: pytest.fail("asked"))
    assert not heap.keep_heap()
    assert not heap.trim_heap()


TRIM = """
from pathlib import Path
from vitrail.runtime.heap import keep_heap, trim_heap
held = lambda: int(Path("/proc/self/statm").read_text().split()[1])
assert keep_heap()
before = held()
blocks = [bytearray(b"x" * 1_000_000) for _ in range(100)]
last = bytearray(b"x" * 1_000_000)
del blocks
kept = held()
trim_heap()
print(kept - before, held() - before)
"""


@pytest.mark.skipif(heap.platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_freed_memory_goes_back_when_told() -> None:
    said = subprocess.run([sys.executable, "-c", TRIM], capture_output=True, check=True).stdout
    kept, left = (pages * 4096 for pages in map(int, said.split()))
    assert kept > 80_000_000
    assert left < 20_000_000
