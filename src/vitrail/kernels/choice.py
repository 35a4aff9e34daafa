"""Which kernel computes an operation on a GPU: the plain one, unless a faster one was measured on that type of GPU.

`kernels=auto` takes the fastest of the recorded measurements (`python benchmarks/fast_path.py`); on a GPU without one,
and with `kernels=plain`, everything runs as plain PyTorch. VITRAIL_KERNELS=plain in the environment does the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch

from vitrail.errors import ConfigError
from vitrail.runtime import private_torch

Operation = Literal["mlp", "mlp training", "residual", "attention"]
Backend = Literal["plain", "triton", "quack"]
Policy = Literal["auto", "plain"]

OPERATIONS: tuple[Operation, ...] = ("mlp", "mlp training", "residual", "attention")
"""mlp: both linear layers with GELU between them; residual: a linear layer plus the residual; for inference unless
named otherwise."""
BACKENDS: tuple[Backend, ...] = ("plain", "triton", "quack")
MEASURED: Mapping[str, Mapping[Operation, tuple[Backend, ...]]] = {}
"""Name of a GPU as torch gives it -> the kernels of an operation that were faster than the plain one, fastest first."""
PACKAGES = {"triton": "triton", "quack": "quack"}

_policy: Policy = "auto"
_forced: dict[Operation, Backend] = {}


def set_kernels(policy: Policy) -> None:
    """Choose for this process: auto or plain."""
    global _policy
    if policy not in ("auto", "plain"):
        raise ConfigError(f"kernels={policy!r}: expected auto or plain.")
    _policy = policy


@contextmanager
def force(backends: Mapping[Operation, Backend]) -> Iterator[None]:
    """Use these kernels inside the block, measured or not: for measurements and tests."""
    before = dict(_forced)
    _forced.update(backends)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(before)


def backend_for(operation: Operation, device: torch.device) -> Backend:
    """The kernel of an operation for tensors on this device."""
    return _resolve(operation, device.type, device.index)


@private_torch.constant_when_compiled
def _resolve(operation: Operation, device_type: str, index: int | None) -> Backend:
    if operation in _forced:
        return _forced[operation]
    if device_type != "cuda" or _policy == "plain" or os.environ.get("VITRAIL_KERNELS") == "plain":
        return "plain"
    candidates = MEASURED.get(torch.cuda.get_device_name(index), {}).get(operation, ())
    return next((name for name in candidates if find_spec(PACKAGES[name]) is not None), "plain")
