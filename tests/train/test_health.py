"""A loss that is not finite stops the run with its samples named, or is left out; signals are wishes."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from vitrail.data.batch import Batch
from vitrail.errors import TrainError
from vitrail.train.health import Health
from vitrail.train.interrupt import Interrupt

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(1.0), torch.tensor(float("nan"))


def batch(step: int, device: str = "cpu") -> Batch:
    pictures = torch.zeros(2, 1, 4, 4, device=device)
    return Batch(step, pictures, torch.zeros(2), torch.ones(2), torch.arange(2), torch.arange(2))


def describe(batch: Batch) -> str:
    return f"step {batch.step}"


@pytest.mark.parametrize(("loss", "norm"), [(BAD, GOOD), (GOOD, BAD), (torch.tensor(float("inf")), GOOD)])
def test_it_stops_before_the_weights_move(loss: torch.Tensor, norm: torch.Tensor):
    health = Health(CPU, "stop", describe)
    assert health.ok(GOOD, GOOD, batch(1))
    with pytest.raises(TrainError, match="step 2"):
        health.ok(loss, norm, batch(2))


def test_skipping_leaves_the_step_out():
    health = Health(CPU, "skip", describe)
    assert not health.ok(BAD, GOOD, batch(3))
    assert health.ok(GOOD, GOOD, batch(4))


@pytest.mark.gpu
def test_on_a_gpu_it_is_found_one_step_later():
    health = Health(torch.device("cuda"), "stop", describe)
    assert health.ok(BAD.cuda(), GOOD.cuda(), batch(5, "cuda"))
    with pytest.raises(TrainError, match="step 5"):
        health.ok(GOOD.cuda(), GOOD.cuda(), batch(6, "cuda"))


@pytest.mark.gpu
def test_on_a_gpu_it_is_found_before_anything_is_saved():
    health = Health(torch.device("cuda"), "stop", describe)
    assert health.ok(BAD.cuda(), GOOD.cuda(), batch(5, "cuda"))
    with pytest.raises(TrainError, match="step 5"):
        health.settle()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_wish(number: signal.Signals):
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert interrupt.asked is None
        os.kill(os.getpid(), number)
        assert interrupt.asked == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_ends_at_once():
    with Interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
