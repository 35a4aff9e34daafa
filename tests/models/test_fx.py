"""torch.fx traces every kind of network into a graph that computes the same, for images of any size."""

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
def test_a_traced_graph_computes_what_the_network_does(kind: str) -> None:
    net = randomized(build(KINDS[kind]))
    attributes, graph = set(vars(net)), fx.symbolic_trace(net)
    sizes = [(32, 32)] if "relative" in kind else [(32, 32), (48, 64)]
    with torch.no_grad():
        for size in sizes:
            images = torch.randn(2, 3, *size)
            assert relative(graph(images), net(images)) <= 1e-5
    assert set(vars(net)) == attributes  # no constant was kept on the network
    net(torch.randn(1, 3, 32, 32))  # nor anything of the tracer's


@pytest.mark.parametrize("kind", ["plain", "dropouts", "hybrid", "bit"])
def test_a_traced_graph_trains_and_draws_like_the_network(kind: str) -> None:
    net = randomized(build(KINDS[kind])).train()
    graph, images = fx.symbolic_trace(net), torch.randn(2, 3, 32, 32)
    torch.manual_seed(0)
    expected = net(images)
    torch.manual_seed(0)
    got = graph(images)
    assert relative(got, expected) <= 1e-5
    got.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_graph_traced_after_evaluation_follows_its_weights() -> None:
    """What evaluation has cached, positions or a standardized kernel, must not become a constant of the graph."""
    for kind in ("plain", "rope, registers", "bit"):
        net, images = randomized(build(KINDS[kind])), torch.randn(2, 3, 32, 32)
        with torch.no_grad():
            net(images)
            graph = fx.symbolic_trace(net)
            net.load_state_dict(randomized(build(KINDS[kind]), seed=1).state_dict())
            assert relative(graph(images), net(images)) <= 1e-5


def test_checks_stay_for_images() -> None:
    net = randomized(build(KINDS["plain"]))
    fx.symbolic_trace(net)
    with pytest.raises(ValueError, match="expected images as B 3 H W"):
        net(torch.randn(2, 1, 32, 32))
    with pytest.raises(ValueError, match="uncovered"):
        net(torch.randn(2, 3, 33, 32))


def test_a_subclass_may_use_types_that_are_imported_for_the_type_checker_alone() -> None:
    class Doubled(ViT):
        def forward(self, images: Tensor, keys: Tensor | None = None) -> Tensor:
            return 2 * super().forward(images, keys)

    net, images = randomized(Doubled(KINDS["plain"])), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert relative(fx.symbolic_trace(net)(images), net(images)) <= 1e-5
