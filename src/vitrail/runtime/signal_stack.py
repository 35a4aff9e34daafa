"""The alternate stack on which the main thread runs signal handlers."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _StackT(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = (("ss_sp", ctypes.c_void_p), ("ss_flags", ctypes.c_int), ("ss_size", ctypes.c_size_t))


@contextmanager
def preserve_signal_stack() -> Iterator[None]:
    """Restore this thread's alternate signal stack at the end of the block.

    OpenVINO's CPU plugin installs a stack of its own and, when it is destroyed, the stack it found. If plugins are not
    destroyed in reverse order, that is a stack which has been freed, and the next signal ends the process with a
    segmentation fault. With the original stack restored at once, every plugin finds and restores the original.
    """
    if sys.platform != "linux":
        yield
        return
    libc, before = ctypes.CDLL(None), _StackT()
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(before), None)
