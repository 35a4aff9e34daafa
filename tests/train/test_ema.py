"""The average of the weights: its arithmetic, its use and its way through a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from train.small_learner import Learner, random_images

from vitrail.errors import TrainError
from vitrail.train.ema import EMA
from vitrail.train.optimizer import freeze


def move(learner: nn.Module, step: int) -> None:
    g = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g, dtype=torch.float64).to(parameter.dtype))


def weights(learner: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.named_parameters()}


@pytest.mark.parametrize("warmup", [True, False])
def test_it_is_the_average_by_its_definition(warmup: bool) -> None:
    learner = Learner().double()
    ema, expected = EMA(learner, 0.6, warmup=warmup), {n: p.numpy().copy() for n, p in weights(learner).items()}
    for step in range(8):
        move(learner, step)
        ema.update(step)
        decay = min(0.6, (1 + step) / (10 + step)) if warmup else 0.6
        for name, weight in weights(learner).items():
            expected[name] = decay * expected[name] + (1 - decay) * weight.numpy()
    for name, average in ema.state_tensors().items():
        np.testing.assert_allclose(average.numpy(), expected[name], rtol=1e-12, atol=1e-12, err_msg=name)


def test_the_first_values_are_soon_forgotten_and_the_decay_is_then_as_asked() -> None:
    ema = EMA(Learner(), 0.999)
    assert ema.decay_at(0) == 0.1
    assert ema.decay_at(8_000) < 0.999 == ema.decay_at(10_000)


def test_the_learner_has_the_average_inside_and_its_own_weights_afterwards() -> None:
    learner, images = Learner(), random_images(0)[0].float()
    ema = EMA(learner, 0.5)
    move(learner, 0)
    ema.update(100)
    own, average = weights(learner), {n: t.clone() for n, t in ema.state_tensors().items()}
    addresses = [p.data_ptr() for p in learner.parameters()]
    with torch.no_grad():
        learner.eval()
        before = learner.net(images)
        with ema.swap():
            inside = learner.net(images)
            assert all(torch.equal(p, average[n]) for n, p in learner.named_parameters())
        after = learner.net(images)
    other = Learner()
    other.load_state_dict(average)
    with torch.no_grad():
        assert torch.equal(inside, other.eval().net(images)), "nothing remembered from the other weights is used"
    assert torch.equal(before, after)
    assert not torch.allclose(before, inside)
    assert all(torch.equal(p, own[n]) for n, p in learner.named_parameters())
    assert all(torch.equal(t, average[n]) for n, t in ema.state_tensors().items())
    assert addresses == [p.data_ptr() for p in learner.parameters()], "graphs and buckets know them by address"


def test_an_error_inside_gives_the_weights_back() -> None:
    learner = Learner()
    ema = EMA(learner, 0.5)
    move(learner, 0)
    own = weights(learner)
    with pytest.raises(ZeroDivisionError), ema.swap():
        _ = 1 / 0
    assert all(torch.equal(p, own[n]) for n, p in learner.named_parameters())


def test_it_cannot_be_swapped_in_twice() -> None:
    ema = EMA(Learner(), 0.5)
    with ema.swap(), pytest.raises(TrainError, match="already in use"):
        ema.swap().__enter__()


def test_a_resumed_average_goes_on_to_the_bit() -> None:
    learner = Learner()
    ema = EMA(learner, 0.9)
    for step in range(3):
        move(learner, step)
        ema.update(step)
    second, again = Learner(), {n: t.clone() for n, t in ema.state_tensors().items()}
    second.load_state_dict(learner.state_dict())
    resumed = EMA(second, 0.9)
    resumed.load_state_tensors(again)
    for step in range(3, 6):
        for one, average in ((learner, ema), (second, resumed)):
            move(one, step)
            average.update(step)
    for name, tensor in ema.state_tensors().items():
        assert torch.equal(resumed.state_tensors()[name], tensor)


def test_what_does_not_learn_is_not_averaged() -> None:
    learner = Learner()
    freeze(learner, "head")
    assert set(EMA(learner, 0.9).state_tensors()) == {"net.head.weight", "net.head.bias", "scale"}


def test_other_tensors_are_refused_by_name() -> None:
    ema = EMA(Learner(), 0.9)
    state = ema.state_tensors()
    with pytest.raises(TrainError, match=r"the averaged weights in the checkpoint lack 'net\.head\.bias'"):
        ema.load_state_tensors({n: t for n, t in state.items() if n != "net.head.bias"})
    with pytest.raises(TrainError, match="include 'more', which this run does not train"):
        ema.load_state_tensors(state | {"more": torch.zeros(1)})
    with pytest.raises(TrainError, match=r"have 'scale' as torch.float32 \(2,\), expected torch.float32 \(1,\)"):
        ema.load_state_tensors(state | {"scale": torch.zeros(2)})
    with pytest.raises(TrainError, match=r"as torch.float64 \(1,\), expected torch.float32"):
        ema.load_state_tensors(state | {"scale": torch.zeros(1, dtype=torch.float64)})
