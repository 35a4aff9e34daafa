"""Triton's kernels compile for a Hopper GPU, without one: they fit into its shared memory and keep to its registers."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the kernels are interpreted", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402

from vitrail.kernels import triton_attention, triton_products, window_attention  # noqa: E402
from vitrail.kernels.triton_products import CONFIGS, TileConfig  # noqa: E402

SHARED_MEMORY, RESERVED = 228 * 1024, 1024
"""Bytes of a multiprocessor, and of each program for the system."""


class Hopper:
    """The part of a driver that compilation needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.binary = kernel, None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.binary = self.kernel.warmup(*args, grid=(1,), **options)

        return launch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], Compiled]:
    """Replaces a module's kernel by one that is compiled and not launched."""
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())

    def replace(module: Any, name: str) -> Compiled:
        kernel = Compiled(getattr(module, name))
        monkeypatch.setattr(module, name, kernel)
        return kernel

    return replace


def spilled_bytes(binary: Any) -> int:
    """Local memory of a thread, into which registers are spilled."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(usage.partition("STACK:")[2].split()[0])


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype)


def launch(epilogue: str, config: TileConfig, tanh: bool = False) -> None:
    """One of the products of a ViT-B/16."""
    rows, width, hidden = 1024, 768, 3072
    if epilogue == "residual":
        residual, out = empty(rows, width), empty(rows, width)
        args = empty(rows, hidden), empty(width, hidden), out
        triton_products.launch("linear", *args, bias=empty(width), residual=residual, config=config)
    elif epilogue == "gelu":
        args = empty(rows, width), empty(hidden, width), empty(rows, hidden)
        triton_products.launch(
            "gelu", *args, bias=empty(hidden), argument=empty(rows, hidden), tanh=tanh, config=config
        )
    else:
        triton_products.dgelu(empty(rows, width), empty(width, hidden), empty(rows, hidden), tanh, config)


def check(kernel: Compiled, per_sm: int, max_spilled: int = 0) -> None:
    binary = kernel.binary
    assert binary is not None
    assert (binary.metadata.shared + RESERVED) * per_sm <= SHARED_MEMORY
    assert "wgmma" in binary.asm["ptx"], "the products do not use the matrix units of this GPU"
    assert spilled_bytes(binary) <= max_spilled


CHOSEN = {"gelu": triton_products.GELU, "dgelu": triton_products.DGELU, "residual": triton_products.RESIDUAL}


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("epilogue", CHOSEN)
def test_products_fit_into_a_multiprocessor(
    epilogue: str, tanh: bool, compiled: Callable[[Any, str], Compiled]
) -> None:
    kernel = compiled(triton_products, "_product")
    launch(epilogue, CHOSEN[epilogue], tanh)
    check(kernel, CHOSEN[epilogue].per_sm)


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", CHOSEN)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tiling_fits_with_every_epilogue(
    name: str, epilogue: str, compiled: Callable[[Any, str], Compiled]
) -> None:
    kernel = compiled(triton_products, "_product")
    launch(epilogue, CONFIGS[name])
    check(kernel, CONFIGS[name].per_sm)


@pytest.mark.parametrize(("tokens", "channels"), [(197, 64), (256, 64), (50, 32), (145, 128)])
def test_attention_keeps_its_scores_in_registers(
    tokens: int, channels: int, compiled: Callable[[Any, str], Compiled]
) -> None:
    kernel = compiled(triton_attention, "_attention")
    triton_attention.packed_attention(empty(2, tokens, 3 * 4 * channels), 4)
    check(kernel, 2 if channels <= 64 else 1)


@pytest.mark.parametrize(("tokens", "cosine"), [(49, False), (64, True)])
def test_window_attention_compiles_forward_and_backward(
    tokens: int, cosine: bool, compiled: Callable[[Any, str], Compiled]
) -> None:
    forward, backward = (compiled(window_attention, f"_{name}_kernel") for name in ("forward", "backward"))
    qkv, bias, scale = empty(2, 4, tokens, 3, 3, 32), empty(1, 3, tokens, tokens), empty(3, dtype=torch.float32)
    torch.ops.vitrail.window_attention(qkv, bias, scale, cosine, 16)
    check(forward, 2)
    grad = empty(2, 4, tokens, 3, 32)
    torch.ops.vitrail.window_attention_backward(qkv, bias, scale, grad, cosine, 16)
    check(backward, 2, max_spilled=64)
