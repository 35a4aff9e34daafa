"""Triton's kernel for attention inside windows, run by Triton's interpreter on a CPU: agreement with plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compare import relative

pytest.importorskip("triton")

CASES = (
    # images, windows, groups, tokens, heads, channels, cosine
    (2, 4, 1, 49, 2, 32, False),  # Swin, windows of 7 x 7
    (2, 4, 4, 49, 2, 32, False),  # shifted: a bias for each window
    (3, 2, 2, 64, 1, 32, True),  # Swin V2, windows of 8 x 8
    (1, 3, 1, 16, 3, 8, True),  # channels that fill half of a tile
    (5, 1, 1, 9, 1, 16, False),  # programs with different numbers of windows
)


def interpreted() -> None:
    """Compare all cases. Triton reads TRITON_INTERPRET when it is imported, hence a process of its own."""
    from vitrail.kernels.window_attention import window_attention, window_attention_reference

    for images, windows, groups, tokens, heads, channels, cosine in CASES:
        torch.manual_seed(0)
        qkv = torch.randn(images, windows, tokens, 3, heads, channels, requires_grad=True)
        bias = torch.randn(groups, heads, tokens, tokens)
        bias[..., 0] -= 100 * (torch.rand(groups, heads, tokens) < 0.5)  # a mask
        bias.requires_grad_()
        scale = torch.rand(heads).add(1).requires_grad_()
        inputs = (qkv, bias, scale) if cosine else (qkv, bias)
        out = window_attention(qkv, bias, scale, cosine, windows_per_program=2)
        exact = [x.detach().double().requires_grad_() for x in (qkv, bias, scale)]
        expected = window_attention_reference(*exact, cosine)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, inputs, grad)
        gradients = torch.autograd.grad(expected, exact[: len(inputs)], grad.double())
        errors = [relative(a, b) for a, b in zip((out, *found), (expected, *gradients), strict=True)]
        assert max(errors) <= 2e-6, (tokens, cosine, errors)
        torch.library.opcheck(
            torch.ops.vitrail.window_attention.default,
            (qkv, bias, scale.detach(), cosine, 2),
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_kernel_and_plain_version_agree_forward_and_backward() -> None:
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-c", "from test_window_attention import interpreted; interpreted()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_agrees_on_a_gpu(dtype: torch.dtype) -> None:
    from vitrail.kernels.window_attention import window_attention, window_attention_reference

    for images, windows, groups, tokens, heads, channels, cosine in CASES:
        qkv = torch.randn(images, windows, tokens, 3, heads, channels, device="cuda", dtype=dtype, requires_grad=True)
        bias = torch.randn(groups, heads, tokens, tokens, device="cuda", requires_grad=True)
        scale = torch.rand(heads, device="cuda") + 1
        out = window_attention(qkv, bias, scale, cosine)
        exact = [x.detach().double().requires_grad_() for x in (qkv, bias)]
        expected = window_attention_reference(*exact, scale.double(), cosine)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (qkv, bias), grad)
        gradients = torch.autograd.grad(expected, exact, grad.double())
        limit = 1e-5 if dtype is torch.float32 else 2e-2
        for a, b in zip((out, *found), (expected, *gradients), strict=True):
            assert relative(a, b) <= limit
