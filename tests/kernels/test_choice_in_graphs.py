"""A compiled network's graph has the kernels that were chosen, and an exported one has none of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitrail.config import ViTConfig
from vitrail.kernels import choice
from vitrail.models.eight_bit_net import to_eight_bit
from vitrail.models.layers import Block

CONFIG = ViTConfig(width=64, num_heads=2, mlp_dim=128, activation="gelu")
MLP: dict[choice.Operation, choice.Backend] = {"mlp": "triton", "mlp training": "triton", "8-bit mlp": "triton"}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing asks where the kernels are for, and runs none."""
    monkeypatch.setattr(choice, "DEVICE_TYPE", "cpu")
    torch._dynamo.reset()


def operators(net: nn.Module, x: Tensor) -> list[str]:
    """Names of this package's operators in the compiled graph, forward."""
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        nodes = [node for module in graph.modules() for node in getattr(getattr(module, "graph", None), "nodes", ())]
        found.extend(str(node.target) for node in nodes if "vitrail" in str(node.target))
        return lambda *args: [torch.zeros(0)] * len(next(n for n in graph.graph.nodes if n.op == "output").args[0])

    torch.compile(net, backend=backend, fullgraph=True)(x)
    return [name.removeprefix("vitrail.").removesuffix(".default") for name in found]


def block() -> Block:
    return Block(CONFIG).bfloat16().eval()


def rows() -> Tensor:
    return torch.randn(8, 197, 64).bfloat16()


def test_inference_has_the_kernels() -> None:
    with torch.no_grad(), choice.force(MLP):
        assert operators(block(), rows()) == ["linear_gelu"]
        assert operators(to_eight_bit(nn.ModuleDict({"blocks": block()}))["blocks"], rows()) == ["eight_bit_gelu"]


def test_residuals_and_attention_have_kernels() -> None:
    with torch.no_grad(), choice.force({**MLP, "residual": "triton", "attention": "triton"}):
        assert operators(block(), rows()) == ["short_attention", "linear_gelu", "linear_residual"]
        with choice.force({"mlp": "plain", "attention residual": "triton"}):
            assert operators(block(), rows()) == ["short_attention", "linear_residual"]
    with torch.no_grad(), choice.force({**MLP, "8-bit residual": "triton"}):
        small = to_eight_bit(nn.ModuleDict({"blocks": block()}))["blocks"]
        assert operators(small, rows()) == ["eight_bit_gelu", "eight_bit_residual"]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_training_has_the_kernel() -> None:
    with choice.force(MLP):
        found = operators(Block(CONFIG).bfloat16(), rows())
    assert "linear_gelu_keep" in found


def test_plain_kernels_leave_no_operators() -> None:
    with torch.no_grad():
        assert operators(block(), rows()) == []


def test_an_exported_graph_has_no_operators_of_this_package() -> None:
    with torch.no_grad(), choice.force(MLP):
        exported = torch.export.export(block(), (rows(),))
    assert not [node for node in exported.graph.nodes if "vitrail" in str(node.target)]
