"""glibc's malloc, set to keep freed memory: a training step on a CPU reuses the memory of the step before.

By default glibc returns large blocks to the system and requests them again; the kernel then clears each page, with a
page fault for each. A training step of a small ViT (28 px, width 64, batch 256) takes 6,000 to 10,000 page faults,
18 of its 215 ms on one core; with this setting, none (`python benchmarks/small.py`). A batch of 128 images of 224 px
in float32 is 19,000 pages.
"""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD = 1 << 30


def tune_malloc() -> bool:
    """Keep freed blocks of up to 1 GiB in this process from now on. Returns False if libc does not support it.

    The process then holds its peak memory, which in training every step needs anyway.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def trim_malloc() -> bool:
    """Return freed memory to the system now. Returns False if libc does not support it."""
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).malloc_trim(0))
