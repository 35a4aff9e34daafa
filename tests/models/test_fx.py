"""torch.fx traces every kind of network into a graph with the same outputs, at any image size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from compare import randomized, relative
from models.test_compile import KINDS
from torch import fx

from vitrail.models import ViT, build

if TYPE_CHECKING:
    from torch import Tensor


@pytest.mark.parametrize("kind", KINDS)
def test_traced_graph_gives_the_networks_logits(kind: str) -> None:
    net = randomized(build(KINDS[kind]))
    attributes, graph = set(vars(net)), fx.symbolic_trace(net)
    sizes = [(32, 32)] if "relative" in kind else [(32, 32), (48, 64)]
    with torch.no_grad():
        for size in sizes:
            images = torch.randn(2, 3, *size)
            assert relative(graph(images), net(images)) <= 1e-5
    assert set(vars(net)) == attributes  # tracing leaves no constants on the network
    net(torch.randn(1, 3, 32, 32))  # and no state of the tracer


@pytest.mark.parametrize("kind", ["plain", "dropouts", "hybrid", "bit"])
def test_traced_graph_trains_with_the_networks_random_draws(kind: str) -> None:
    net = randomized(build(KINDS[kind])).train()
    graph, images = fx.symbolic_trace(net), torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    expected = net(images)
    torch.manual_seed(0)
    got = graph(images)
    assert relative(got, expected) <= 1e-5
    got.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_graph_traced_after_evaluation_follows_weight_changes() -> None:
    """Positions and standardized kernels cached in evaluation must not become constants of the graph."""
    for kind in ("plain", "rope, registers", "bit"):
        net, images = randomized(build(KINDS[kind])), torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            net(images)
            graph = fx.symbolic_trace(net)
            net.load_state_dict(randomized(build(KINDS[kind]), seed=1).state_dict())
            assert relative(graph(images), net(images)) <= 1e-5


def test_tracing_keeps_the_input_checks_of_the_network() -> None:
    net = randomized(build(KINDS["plain"]))
    fx.symbolic_trace(net)
    with pytest.raises(ValueError, match="expected images as B 3 H W"):
        net(torch.randn(2, 1, 32, 32))
    with pytest.raises(ValueError, match="uncovered"):
        net(torch.randn(2, 3, 33, 32))


def test_subclass_with_annotations_imported_for_type_checking_is_traced() -> None:
    class Doubled(ViT):
        def forward(self, images: Tensor, sample_seeds: Tensor | None = None) -> Tensor:
            return 2 * super().forward(images, sample_seeds)

    net, images = randomized(Doubled(KINDS["plain"])), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert relative(fx.symbolic_trace(net)(images), net(images)) <= 1e-5
