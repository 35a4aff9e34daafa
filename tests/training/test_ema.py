"""The exponential moving average of the weights: arithmetic, swapping and checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training.small_objective import SmallObjective, random_images

from vitrail.errors import TrainError
from vitrail.training.ema import EMA
from vitrail.training.optimizer import freeze


def perturb(objective: nn.Module, step: int) -> None:
    g = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g, dtype=torch.float64).to(parameter.dtype))


def weights(objective: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in objective.named_parameters()}


@pytest.mark.parametrize("warmup", [True, False])
def test_ema_matches_its_definition(warmup: bool) -> None:
    objective = SmallObjective().double()
    ema, expected = EMA(objective, 0.6, warmup=warmup), {n: p.numpy().copy() for n, p in weights(objective).items()}
    for step in range(8):
        perturb(objective, step)
        ema.update(step)
        decay = min(0.6, (1 + step) / (10 + step)) if warmup else 0.6
        for name, weight in weights(objective).items():
            expected[name] = decay * expected[name] + (1 - decay) * weight.numpy()
    for name, average in ema.state_tensors().items():
        np.testing.assert_allclose(average.numpy(), expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_decay_warms_up_to_the_configured_value() -> None:
    ema = EMA(SmallObjective(), 0.999)
    assert ema.decay_at(0) == 0.1
    assert ema.decay_at(8_000) < 0.999 == ema.decay_at(10_000)


def test_swap_uses_the_average_and_restores_the_weights_afterwards() -> None:
    objective, images = SmallObjective(), random_images(0)[0].float()
    ema = EMA(objective, 0.5)
    perturb(objective, 0)
    ema.update(100)
    original, average = weights(objective), {n: t.clone() for n, t in ema.state_tensors().items()}
    addresses = [p.data_ptr() for p in objective.parameters()]
    with torch.no_grad():
        objective.eval()
        before = objective.net(images)
        with ema.swap():
            swapped = objective.net(images)
            assert all(torch.equal(p, average[n]) for n, p in objective.named_parameters())
        after = objective.net(images)
    averaged_objective = SmallObjective()
    averaged_objective.load_state_dict(average)
    with torch.no_grad():
        assert torch.equal(swapped, averaged_objective.eval().net(images)), (
            "no tensor cached for the other weights is used"
        )
    assert torch.equal(before, after)
    assert not torch.allclose(before, swapped)
    assert all(torch.equal(p, original[n]) for n, p in objective.named_parameters())
    assert all(torch.equal(t, average[n]) for n, t in ema.state_tensors().items())
    assert addresses == [p.data_ptr() for p in objective.parameters()], (
        "CUDA graphs and DDP buckets refer to weights by address"
    )


def test_error_during_swap_restores_the_weights() -> None:
    objective = SmallObjective()
    ema = EMA(objective, 0.5)
    perturb(objective, 0)
    original = weights(objective)
    with pytest.raises(ZeroDivisionError), ema.swap():
        _ = 1 / 0
    assert all(torch.equal(p, original[n]) for n, p in objective.named_parameters())


def test_nested_swap_is_refused() -> None:
    ema = EMA(SmallObjective(), 0.5)
    with ema.swap(), pytest.raises(TrainError, match="already in use"):
        ema.swap().__enter__()


def test_resumed_average_continues_bit_for_bit() -> None:
    objective = SmallObjective()
    ema = EMA(objective, 0.9)
    for step in range(3):
        perturb(objective, step)
        ema.update(step)
    second, state = SmallObjective(), {n: t.clone() for n, t in ema.state_tensors().items()}
    second.load_state_dict(objective.state_dict())
    resumed = EMA(second, 0.9)
    resumed.load_state_tensors(state)
    for step in range(3, 6):
        for module, average in ((objective, ema), (second, resumed)):
            perturb(module, step)
            average.update(step)
    for name, tensor in ema.state_tensors().items():
        assert torch.equal(resumed.state_tensors()[name], tensor)


def test_frozen_parameters_are_not_averaged() -> None:
    objective = SmallObjective()
    freeze(objective, "head")
    assert set(EMA(objective, 0.9).state_tensors()) == {"net.head.weight", "net.head.bias", "scale"}


def test_mismatched_tensors_are_refused_by_name() -> None:
    ema = EMA(SmallObjective(), 0.9)
    state = ema.state_tensors()
    with pytest.raises(TrainError, match=r"the averaged weights in the checkpoint lack 'net\.head\.bias'"):
        ema.load_state_tensors({n: t for n, t in state.items() if n != "net.head.bias"})
    with pytest.raises(TrainError, match="include 'more', which this run does not train"):
        ema.load_state_tensors(state | {"more": torch.zeros(1)})
    with pytest.raises(TrainError, match=r"have 'scale' as torch.float32 \(2,\), expected torch.float32 \(1,\)"):
        ema.load_state_tensors(state | {"scale": torch.zeros(2)})
    with pytest.raises(TrainError, match=r"as torch.float64 \(1,\), expected torch.float32"):
        ema.load_state_tensors(state | {"scale": torch.zeros(1, dtype=torch.float64)})
