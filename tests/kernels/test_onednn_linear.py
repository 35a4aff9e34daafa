"""Linear layers by oneDNN: agreement with the plain PyTorch version, forward and backward, and when they are used."""

from __future__ import annotations

import pytest
import torch
from compare import relative
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import vitrail
from vitrail.kernels import onednn_linear as kernel
from vitrail.kernels.onednn_linear import apply_linear, can_use_onednn, linear_reference, onednn_linear
from vitrail.runtime import private_torch

pytestmark = pytest.mark.skipif(private_torch.linear() is None, reason="this PyTorch has no oneDNN")


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which oneDNN is faster."""
    monkeypatch.setattr(kernel, "onednn_is_faster", lambda training: True)


sizes = st.integers(1, 30)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), sizes, sizes, st.booleans())
def test_outputs_and_gradients_agree_with_the_reference(batch: list[int], inputs: int, outputs: int, with_bias: bool):
    x, weight = torch.randn(*batch, inputs, requires_grad=True), torch.randn(outputs, inputs, requires_grad=True)
    bias = torch.randn(outputs, requires_grad=True) if with_bias else None
    got, expected = onednn_linear(x, weight, bias), linear_reference(x, weight, bias)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    given, grad = [t for t in (x, weight, bias) if t is not None], torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(got, given, grad), torch.autograd.grad(expected, given, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_second_derivatives_agree():
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((3, 5, 16), (24, 16), (24,)))
    found = []
    for linear in (onednn_linear, linear_reference):
        (slope,) = torch.autograd.grad(linear(x, weight, bias).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), (x, weight, bias)))
    assert all(relative(ours, theirs) <= 1e-5 for ours, theirs in zip(*found, strict=True))


def test_strided_tensors_agree():
    x, weight = (
        torch.randn(7, 3, 32).transpose(0, 1)[..., ::2].requires_grad_(),
        torch.randn(16, 24).t().requires_grad_(),
    )
    grad = torch.randn(24, 7, 3).permute(2, 1, 0)
    got, expected = onednn_linear(x, weight, None), linear_reference(x, weight, None)
    assert relative(got, expected) <= 1e-6
    for ours, theirs in zip(*(torch.autograd.grad(y, (x, weight), grad) for y in (got, expected)), strict=True):
        assert relative(ours, theirs) <= 1e-6


@pytest.mark.usefixtures("faster")
def test_it_is_used_for_plain_float32_tensors_only():
    x, weight = torch.randn(4, 16), torch.randn(24, 16)
    assert can_use_onednn(x, weight, None)
    assert can_use_onednn(x, nn.Parameter(weight), None)
    assert not can_use_onednn(x.double(), weight.double(), None)
    assert not can_use_onednn(x[0], weight, None)
    assert not can_use_onednn(x.to("meta"), weight.to("meta"), None)
    assert not torch.vmap(lambda row: torch.tensor(can_use_onednn(row[None], weight, None)))(x).any()
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_use_onednn(x, weight, None)
    with FlopCounterMode(display=False):
        assert not can_use_onednn(x, weight, None)


@pytest.mark.usefixtures("faster")
def test_hooks_run_and_layers_that_replace_a_linear_one_are_called():
    called: list[str] = []
    layer, x = nn.Linear(16, 24), torch.randn(4, 16, requires_grad=True)
    layer.register_forward_hook(lambda *_: called.append("forward"))
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    apply_linear(layer, x).sum().backward()
    assert called == ["forward", "backward"]
    assert torch.equal(apply_linear(nn.Identity(), x), x)


def test_networks_agree_in_outputs_and_gradients(monkeypatch: pytest.MonkeyPatch):
    net = vitrail.create("ViT-Ti/16", image_size=64, num_classes=10)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.02)
    images, found = torch.randn(2, 3, 64, 64), []
    for faster in (True, False):
        monkeypatch.setattr(kernel, "onednn_is_faster", lambda training, faster=faster: faster)
        logits = net(images)
        found.append([logits, *torch.autograd.grad(logits.square().sum(), list(net.parameters()))])
    assert all(relative(ours, theirs) <= 1e-4 for ours, theirs in zip(*found, strict=True))
    assert relative(found[0][0], found[1][0]) <= 1e-5


def test_it_is_chosen_by_the_cpu(monkeypatch: pytest.MonkeyPatch):
    def chosen(name: str, *instructions: str) -> tuple[bool, bool]:
        cpu = kernel.detect_cpu().__class__(name, "x86_64", (), instructions)
        monkeypatch.setattr(kernel, "detect_cpu", lambda: cpu)
        kernel.onednn_is_faster.cache_clear()
        return kernel.onednn_is_faster(training=False), kernel.onednn_is_faster(training=True)

    assert chosen("AMD EPYC 9654", "AVX2", "AVX-512") == (True, True)
    assert chosen("AMD EPYC 7763", "AVX2") == (True, False)
    assert chosen("Intel(R) Xeon(R) Platinum 8488C", "AVX2", "AVX-512", "AMX BF16") == (False, False)
    kernel.onednn_is_faster.cache_clear()
