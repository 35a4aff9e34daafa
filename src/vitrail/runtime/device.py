"""Device, dtype, precision and determinism, by the names that settings use. Imports torch only when called."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from vitrail.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import torch


def pick_device(name: str | torch.device = "auto") -> torch.device:
    """The device of this name as torch writes it; `auto` is CUDA, else Apple's MPS, else the CPU."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"unknown device {str(name)!r}; try cpu, cuda, cuda:1, mps or auto.") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].split(". ")[0].rstrip(".")
        raise ConfigError(f"device {str(name)!r} cannot be used here ({reason}); try cpu or auto.") from None
    return device


def resolve_precision(name: str, device: torch.device) -> str:
    """Resolve `auto`: bfloat16 on an NVIDIA or AMD GPU that supports it, else float32. Other names are unchanged."""
    import torch

    if name != "auto":
        return name
    supported = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if supported else "float32"


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """`torch.autocast` to bfloat16 if `precision` is "bfloat16", else no change; weights keep their dtype."""
    import torch

    if precision != "bfloat16":
        return nullcontext()
    if device.type == "cpu":
        from vitrail.runtime.amx import check_bfloat16

        check_bfloat16()
    return torch.autocast(device.type, dtype=torch.bfloat16)


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Inside the block torch uses only deterministic GPU kernels; an operation without one raises an error."""
    import torch

    if not enabled:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when first used
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def parse_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The torch dtype of a name such as "bfloat16"; a dtype or None is returned as is."""
    import torch

    if not isinstance(name, str):
        return name
    known = ("float32", "float64", "float16", "bfloat16")
    if name.removeprefix("torch.") not in known:
        if name == "float8":
            raise ConfigError("float8 is chosen when a model is loaded: vitrail.load(..., dtype='float8').")
        raise ConfigError(f"unknown dtype {name!r}{did_you_mean(name, (*known, 'float8'))}")
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
