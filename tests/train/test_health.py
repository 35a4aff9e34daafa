"""A loss that is not finite stops the run with its samples named, or is left out."""

from __future__ import annotations

import pytest
import torch

from vitrail.data.batch import Batch
from vitrail.errors import TrainError
from vitrail.train.health import Health

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(1.0), torch.tensor(float("nan"))


def batch(step: int, device: str = "cpu") -> Batch:
    images = torch.zeros(2, 1, 4, 4, device=device)
    return Batch(step, images, torch.zeros(2), torch.ones(2), torch.arange(2), torch.arange(2))


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
