"""bfloat16 on a CPU that only says it can multiply tiles of it.

Some virtual machines announce Intel's AMX and do not have it: the first product in bfloat16 then ends
the process, without a word, by an illegal instruction. oneDNN, which makes these products for torch,
can be told to leave AMX alone, if it is told before its first one.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Literal

from vitrail.errors import ConfigError
from vitrail.runtime import say

SETTING, WITHOUT_TILES = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
PATIENCE = 20
"""Seconds in which a small product must be done."""


@lru_cache(maxsize=1)
def check_bfloat16() -> None:
    """Before this process computes in bfloat16 on its CPU: make sure that it survives that, or say why it cannot."""
    if leave_tiles():
        say([f"this CPU announces AMX and has none: bfloat16 goes without ({SETTING}={WITHOUT_TILES})"])


def leave_tiles() -> bool:
    """Whether tiles are announced that are not there; from now on they are left alone."""
    found = _found()
    if found == "too late":
        raise ConfigError(
            "products in bfloat16 end with an illegal instruction on this CPU, which announces AMX and has none; "
            f"set {SETTING}={WITHOUT_TILES} before Python starts, or compute in float32."
        )
    return found == "without"


@lru_cache(maxsize=1)
def _found() -> Literal["fine", "without", "too late"]:
    """Asked once: what is set later changes nothing about a library that has begun."""
    if SETTING in os.environ or not _announced() or _survives():
        return "fine"
    os.environ[SETTING] = WITHOUT_TILES
    if _survives():
        return "without"
    del os.environ[SETTING]
    return "too late"


def _announced() -> bool:
    try:
        return sys.platform == "linux" and "amx_bf16" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False


def _survives() -> bool:
    """Whether a copy of this process lives through a product."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where threads run: the copy uses none
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.alarm(PATIENCE)
        os.closerange(0, 3)  # it has nothing to say, and nothing of ours to flush
        try:
            _product()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _product() -> None:
    import torch

    torch.set_num_threads(1)
    ones = torch.ones(256, 256, dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones, ones[0])
