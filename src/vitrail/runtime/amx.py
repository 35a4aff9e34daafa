"""Works around CPUs that report Intel's AMX without having it.

Some virtual machines report AMX and do not support it: the first matrix product in bfloat16 then ends the process
with an illegal instruction. oneDNN, which computes these products for torch, can be configured not to use AMX, if
that happens before its first product.
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
from vitrail.runtime.notes import warn_once

ISA_VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
"""The environment variable that limits oneDNN's instruction sets, and its highest value without AMX."""
PROBE_TIMEOUT_S = 20


@lru_cache(maxsize=1)
def check_bfloat16() -> None:
    """Call before computing in bfloat16 on the CPU: turns AMX off where it is broken, or raises ConfigError."""
    if disable_broken_amx():
        warn_once(
            [f"this CPU reports AMX but does not support it; bfloat16 runs without AMX ({ISA_VARIABLE}={WITHOUT_AMX})"]
        )


def disable_broken_amx() -> bool:
    """Turn AMX off if the CPU reports it but does not support it; whether that was so."""
    state = _amx_state()
    if state == "too late":
        raise ConfigError(
            "products in bfloat16 fail with an illegal instruction: this CPU reports AMX but does not support it; "
            f"set {ISA_VARIABLE}={WITHOUT_AMX} before Python starts, or compute in float32."
        )
    return state == "disabled"


@lru_cache(maxsize=1)
def _amx_state() -> Literal["usable", "disabled", "too late"]:
    """Probe once: oneDNN reads the variable only before its first product."""
    if ISA_VARIABLE in os.environ or not _reports_amx() or _bfloat16_product_succeeds():
        return "usable"
    os.environ[ISA_VARIABLE] = WITHOUT_AMX
    if _bfloat16_product_succeeds():
        return "disabled"
    del os.environ[ISA_VARIABLE]
    return "too late"


def _reports_amx() -> bool:
    try:
        return sys.platform == "linux" and "amx_bf16" in Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return False


def _bfloat16_product_succeeds() -> bool:
    """Whether a forked copy of this process survives a product in bfloat16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about fork with threads: the child uses none
        child = os.fork()
    if child == 0:
        import resource  # Unix only, as fork is

        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its death is expected: no core file in the user's folder
        signal.alarm(PROBE_TIMEOUT_S)
        os.closerange(0, 3)  # the child prints nothing and must not flush the parent's output
        try:
            _compute_bfloat16_product()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _compute_bfloat16_product() -> None:
    import torch

    torch.set_num_threads(1)
    ones = torch.ones(256, 256, dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones, ones[0])
