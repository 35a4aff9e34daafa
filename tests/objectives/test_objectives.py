"""What all objectives promise: sums that add up, images that do not meet, one graph, a clean state."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.learners import LEARNERS, batch

from vitrail.objectives import Objective


def made(kind: str) -> Objective:
    return LEARNERS[kind]().double().train()


@pytest.mark.parametrize("kind", LEARNERS)
def test_micro_batches_add_up_to_the_batch(kind: str) -> None:
    learner, given = made(kind), batch(6)
    whole = learner(*given)
    whole["loss"].backward()
    gradients = [p.grad.clone() for p in learner.parameters()]
    learner.zero_grad()
    sums: dict[str, float] = dict.fromkeys(whole, 0.0)
    for part in zip(*(t.split(2) for t in given), strict=True):
        found = learner(*part)
        found["loss"].backward()
        sums = {name: sums[name] + float(found[name].detach()) for name in sums}
    for name, value in whole.items():
        assert value.ndim == 0
        assert sums[name] == pytest.approx(float(value.detach()), rel=1e-12, abs=1e-12)
    for parameter, expected in zip(learner.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", LEARNERS)
@settings(max_examples=4)
@given(order=st.permutations(range(6)))
def test_the_order_of_a_batch_changes_nothing(kind: str, order: list[int]) -> None:
    learner, given = made(kind), batch(6)
    one, two = learner(*given), learner(*(t[order] for t in given))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", LEARNERS)
def test_an_image_of_weight_zero_adds_nothing(kind: str) -> None:
    learner, (images, targets, weights, sample_seeds) = made(kind), batch(6)
    kept = weights > 0
    without = learner(images[kept], targets[kept], weights[kept], sample_seeds[kept])
    without["loss"].backward()
    expected = [p.grad.clone() for p in learner.parameters()]
    learner.zero_grad()
    images[~kept] = 1e6 * torch.randn_like(images[~kept])
    targets[~kept] = 0
    found = learner(images, targets, weights, sample_seeds)
    found["loss"].backward()
    for name, value in without.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(learner.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", LEARNERS)
def test_weights_count_images(kind: str) -> None:
    learner, (images, targets, _, sample_seeds) = made(kind), batch(4)
    weights = torch.tensor([2.0, 1.0, 1.0, 0.0])
    picked = torch.tensor([0, 0, 1, 2])
    found, expected = (
        learner(images, targets, weights, sample_seeds),
        learner(images[picked], targets[picked], torch.ones(4), sample_seeds[picked]),
    )
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


QUICK = ("softmax", "mean color", "soft")
ALL = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in LEARNERS]


@pytest.mark.parametrize("kind", ALL)
def test_it_is_one_graph_that_serves_every_step(kind: str) -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    learner = made(kind)
    compiled = torch.compile(learner, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        given = batch(4)
        found, expected = compiled(*given), learner(*given)
        assert set(found) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
        found["loss"].backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["softmax", "downsized", "soft"])
def test_inductor_agrees(kind: str) -> None:
    torch.compiler.reset()
    learner, given = made(kind), batch(4)
    compiled = torch.compile(learner, fullgraph=True)
    for _ in range(5):
        found, expected = compiled(*given), learner(*given)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
        found["loss"].backward()


@pytest.mark.parametrize("kind", LEARNERS)
def test_every_parameter_learns_and_is_saved_and_has_its_place(kind: str) -> None:
    learner = made(kind)
    learner(*batch(6))["loss"].backward()
    parameters = dict(learner.named_parameters())
    assert all(p.grad is not None for p in parameters.values()), "what DistributedDataParallel waits for"
    assert set(learner.state_dict()) == set(parameters)
    assert {f"net.{name}" for name in learner.net.state_dict()} <= set(parameters)
    assert (
        {f"net.{name}" for name in learner.net.decayed_parameters()} <= learner.decayed_parameters() <= set(parameters)
    )
    for name in parameters:
        assert 0 <= learner.layer_id(name) <= learner.net.config.depth + 1
        if name.startswith("net."):
            assert learner.layer_id(name) == learner.net.layer_id(name[4:])


@pytest.mark.parametrize("kind", LEARNERS)
def test_half_precision_gives_losses_in_single(kind: str) -> None:
    learner, given = LEARNERS[kind](), batch(4, torch.float32)
    if hasattr(learner, "teacher"):
        learner.teacher.net.float()
        learner.teacher.scale, learner.teacher.shift = learner.teacher.scale.float(), learner.teacher.shift.float()
    expected = learner(*given)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        found = learner(*given)["loss"]
    assert found.dtype == torch.float32
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=0.05)


@pytest.mark.parametrize("kind", LEARNERS)
def test_recomputing_blocks_changes_nothing(kind: str) -> None:
    learner, given = made(kind), batch(4)
    twin = copy.deepcopy(learner)
    twin.net.gradient_checkpointing = True
    for one in (learner, twin):
        one(*given)["loss"].backward()
    for a, b in zip(learner.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", LEARNERS)
def test_without_keys_it_draws_its_own(kind: str) -> None:
    learner, (images, targets, weights, _) = made(kind), batch(4)
    torch.manual_seed(0)
    one, two = learner(images, targets, weights)["loss"], learner(images, targets, weights)["loss"]
    assert one != two
    torch.manual_seed(0)
    assert learner(images, targets, weights)["loss"] == one
