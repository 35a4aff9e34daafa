"""Properties of all objectives: additive losses, independent images, one compiled graph, complete state."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.small_objectives import OBJECTIVES, make_batch

from vitrail.objectives import Objective


def build_objective(kind: str) -> Objective:
    return OBJECTIVES[kind]().double().train()


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_micro_batches_add_up_to_the_batch(kind: str) -> None:
    objective, inputs = build_objective(kind), make_batch(6)
    full = objective(*inputs)
    full["loss"].backward()
    gradients = [p.grad.clone() for p in objective.parameters()]
    objective.zero_grad()
    sums: dict[str, float] = dict.fromkeys(full, 0.0)
    for part in zip(*(t.split(2) for t in inputs), strict=True):
        output = objective(*part)
        output["loss"].backward()
        sums = {name: sums[name] + float(output[name].detach()) for name in sums}
    for name, value in full.items():
        assert value.ndim == 0
        assert sums[name] == pytest.approx(float(value.detach()), rel=1e-12, abs=1e-12)
    for parameter, expected in zip(objective.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", OBJECTIVES)
@settings(max_examples=4)
@given(order=st.permutations(range(6)))
def test_batch_order_does_not_matter(kind: str, order: list[int]) -> None:
    objective, inputs = build_objective(kind), make_batch(6)
    output, permuted = objective(*inputs), objective(*(t[order] for t in inputs))
    for name, value in output.items():
        torch.testing.assert_close(permuted[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_image_of_weight_zero_contributes_nothing(kind: str) -> None:
    objective, (images, targets, weights, sample_seeds) = build_objective(kind), make_batch(6)
    weighted = weights > 0
    without = objective(images[weighted], targets[weighted], weights[weighted], sample_seeds[weighted])
    without["loss"].backward()
    expected = [p.grad.clone() for p in objective.parameters()]
    objective.zero_grad()
    images[~weighted] = 1e6 * torch.randn_like(images[~weighted])
    targets[~weighted] = 0
    output = objective(images, targets, weights, sample_seeds)
    output["loss"].backward()
    for name, value in without.items():
        torch.testing.assert_close(output[name], value, rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(objective.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_image_of_weight_two_counts_twice(kind: str) -> None:
    objective, (images, targets, _, sample_seeds) = build_objective(kind), make_batch(4)
    weights = torch.tensor([2.0, 1.0, 1.0, 0.0])
    repeated = torch.tensor([0, 0, 1, 2])
    output, expected = (
        objective(images, targets, weights, sample_seeds),
        objective(images[repeated], targets[repeated], torch.ones(4), sample_seeds[repeated]),
    )
    for name, value in output.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


QUICK = ("softmax", "mean color", "soft")
ALL = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in OBJECTIVES]


@pytest.mark.parametrize("kind", ALL)
def test_objective_compiles_to_one_graph(kind: str) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    objective = build_objective(kind)
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        inputs = make_batch(4)
        output, expected = compiled(*inputs), objective(*inputs)
        assert set(output) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(output[name], value, rtol=1e-10, atol=1e-10)
        output["loss"].backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "downsized", "soft"])
def test_inductor_matches_eager(kind: str) -> None:
    torch.compiler.reset()
    objective, inputs = build_objective(kind), make_batch(4)
    compiled = torch.compile(objective, fullgraph=True)
    for _ in range(5):
        output, expected = compiled(*inputs), objective(*inputs)
        for name, value in expected.items():
            torch.testing.assert_close(output[name], value, rtol=1e-6, atol=1e-6)
        output["loss"].backward()


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_parameter_has_a_gradient_a_state_entry_and_a_layer(kind: str) -> None:
    objective = build_objective(kind)
    objective(*make_batch(6))["loss"].backward()
    parameters = dict(objective.named_parameters())
    assert all(p.grad is not None for p in parameters.values()), "DistributedDataParallel needs every gradient"
    assert set(objective.state_dict()) == set(parameters)
    assert {f"net.{name}" for name in objective.net.state_dict()} <= set(parameters)
    decayed = objective.decayed_parameters()
    assert {f"net.{name}" for name in objective.net.decayed_parameters()} <= decayed <= set(parameters)
    for name in parameters:
        assert 0 <= objective.layer_id(name) <= objective.net.config.depth + 1
        if name.startswith("net."):
            assert objective.layer_id(name) == objective.net.layer_id(name[4:])


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_autocast_losses_are_float32(kind: str) -> None:
    objective, inputs = OBJECTIVES[kind](), make_batch(4, torch.float32)
    if hasattr(objective, "teacher"):
        teacher = objective.teacher
        teacher.net.float()
        teacher.scale, teacher.shift = teacher.scale.float(), teacher.shift.float()
    expected = objective(*inputs)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective(*inputs)["loss"]
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=0.05)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_gradient_checkpointing_does_not_change_gradients(kind: str) -> None:
    objective, inputs = build_objective(kind), make_batch(4)
    twin = copy.deepcopy(objective)
    twin.net.gradient_checkpointing = True
    for module in (objective, twin):
        module(*inputs)["loss"].backward()
    for a, b in zip(objective.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_randomness_comes_from_torch_without_sample_seeds(kind: str) -> None:
    objective, (images, targets, weights, _) = build_objective(kind), make_batch(4)
    torch.manual_seed(0)
    first, second = objective(images, targets, weights)["loss"], objective(images, targets, weights)["loss"]
    assert first != second
    torch.manual_seed(0)
    assert objective(images, targets, weights)["loss"] == first
