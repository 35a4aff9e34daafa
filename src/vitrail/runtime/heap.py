"""Memory that stays: what one step of training on a CPU frees, the next one takes again.

glibc gives large blocks back to the system and is given them again, page by page, each of which
the kernel clears and the processor faults on. A step of the lecture's small ViT (28 px, width 64,
batch 256) takes 6,000 to 10,000 such faults, 18 of its 215 ms on one core; with the heap kept,
none (`python benchmarks/small.py`). A batch of 128 images of 224 px as float32 is 19,000 pages.
"""

from __future__ import annotations

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 1 << 30


def keep_heap() -> bool:
    """From now on freed memory stays with this process, for blocks up to 1 GiB; False where that cannot be told.

    The process then holds the most it ever needed, which in training is what every step needs.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def trim_heap() -> bool:
    """Give freed memory back to the system now; False where that cannot be told."""
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).malloc_trim(0))
