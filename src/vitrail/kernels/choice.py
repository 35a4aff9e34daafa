"""Which kernel computes an operation on a GPU: the plain one, unless a faster one was measured on that type of GPU.

`kernels=auto` takes the fastest of the recorded measurements (`python benchmarks/fast_path.py`); on a GPU without one,
and with `kernels=plain`, everything runs as plain PyTorch. The environment variable VITRAIL_KERNELS does the same, also
for inference: auto, plain, or kernels by operation, such as mlp=triton,gelu=polynomial, in place of the measured ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

from vitrail.errors import ConfigError, did_you_mean
from vitrail.runtime import private_torch

Operation = Literal[
    "mlp", "mlp training", "8-bit mlp", "gelu", "residual", "attention residual", "8-bit residual", "attention"
]
Backend = Literal["plain", "polynomial", "triton", "quack"]
Policy = Literal["auto", "plain"]

OPERATIONS: dict[Operation, tuple[Backend, ...]] = {
    "mlp": ("plain", "triton", "quack"),
    "mlp training": ("plain", "triton", "quack"),
    "8-bit mlp": ("plain", "triton"),
    "gelu": ("plain", "polynomial"),
    "residual": ("plain", "triton", "quack"),
    "attention residual": ("plain", "triton", "quack"),
    "8-bit residual": ("plain", "triton"),
    "attention": ("plain", "triton"),
}
"""mlp: both linear layers with GELU between them; 8-bit mlp: the same in e4m3 (`eight_bit_net`); gelu: GELU alone,
in a compiled graph where `mlp` is plain; residual: the MLP's second layer plus the residual, where `mlp` is not plain;
attention residual: the output layer of attention plus the residual; 8-bit residual: the MLP's second layer in e4m3 plus
the residual. All but `mlp training` and `gelu` are for inference only."""
MEASURED: Mapping[str, Mapping[Operation, tuple[Backend, ...]]] = {
    "NVIDIA H200": {
        "mlp": ("quack", "triton"),
        "mlp training": ("quack", "triton"),
        "8-bit mlp": ("triton",),
        "residual": ("triton",),
    }
}
"""Name of a GPU as torch gives it -> the kernels of an operation that were faster than the plain one, fastest first."""
PACKAGES = {"triton": "triton", "quack": "quack"}
"""Those that a backend needs, besides torch."""
VARIABLE = "VITRAIL_KERNELS"
DEVICE_TYPE = "cuda"
"""The devices that the kernels are for."""

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


def describe(device: torch.device) -> str:
    """The kernels that are not plain, such as "mlp=triton"; empty if all are."""
    chosen = {operation: backend_for(operation, device) for operation in OPERATIONS}
    return ",".join(f"{operation}={backend}" for operation, backend in chosen.items() if backend != "plain")


@private_torch.constant_when_compiled
def _resolve(operation: Operation, device_type: str, index: int | None) -> Backend:
    if operation in _forced:
        return _forced[operation]
    wanted = os.environ.get(VARIABLE, "auto")
    if device_type != DEVICE_TYPE or _policy == "plain" or wanted == "plain":
        return "plain"
    replaced = parse(wanted)
    if operation in replaced:
        return replaced[operation]
    candidates = MEASURED.get(gpu_name(index), {}).get(operation, ())
    return next((name for name in candidates if is_installed(name)), "plain")


@cache
def gpu_name(index: int | None) -> str:
    """Name of a GPU; empty for that of fake tensors on a machine without one."""
    return torch.cuda.get_device_name(index) if torch.cuda.is_available() else ""


@cache
def parse(text: str) -> Mapping[Operation, Backend]:
    """The operations that VITRAIL_KERNELS names, with their backends: "mlp=triton" -> {"mlp": "triton"}."""
    replaced: dict[Operation, Backend] = {}
    for item in () if text in ("", "auto") else text.split(","):
        operation, _, backend = (part.strip() for part in item.partition("="))
        if operation not in OPERATIONS:
            raise ConfigError(f"{VARIABLE}: unknown operation {operation!r}{did_you_mean(operation, OPERATIONS)}")
        if backend not in OPERATIONS[operation]:
            expected = ", ".join(OPERATIONS[operation])
            raise ConfigError(f"{VARIABLE}: got {item.strip()}, expected one of {expected} for {operation}.")
        replaced[operation] = backend
    return replaced


@cache
def is_installed(backend: Backend) -> bool:
    """Whether the package that a backend needs is there."""
    return backend not in PACKAGES or find_spec(PACKAGES[backend]) is not None
