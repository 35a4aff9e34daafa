"""A loss that is not finite stops the run and names its samples, or its step is skipped."""

from __future__ import annotations

import pytest
import torch

from vitrail.data.batch import Batch
from vitrail.errors import TrainError
from vitrail.training.nan_guard import NaNGuard

CPU = torch.device("cpu")
GOOD, BAD = torch.tensor(1.0), torch.tensor(float("nan"))


def batch(step: int, device: str = "cpu") -> Batch:
    images = torch.zeros(2, 1, 4, 4, device=device)
    return Batch(step, images, torch.zeros(2), torch.ones(2), torch.arange(2), torch.arange(2))


def describe(batch: Batch) -> str:
    return f"step {batch.step}"


@pytest.mark.parametrize(("loss", "norm"), [(BAD, GOOD), (GOOD, BAD), (torch.tensor(float("inf")), GOOD)])
def test_non_finite_loss_or_norm_stops_before_the_weights_change(loss: torch.Tensor, norm: torch.Tensor):
    nan_guard = NaNGuard(CPU, "stop", describe)
    assert nan_guard.check(GOOD, GOOD, batch(1))
    with pytest.raises(TrainError, match="step 2"):
        nan_guard.check(loss, norm, batch(2))


def test_skip_rejects_only_the_non_finite_step():
    nan_guard = NaNGuard(CPU, "skip", describe)
    assert not nan_guard.check(BAD, GOOD, batch(3))
    assert nan_guard.check(GOOD, GOOD, batch(4))


@pytest.mark.gpu
def test_gpu_finds_a_non_finite_loss_one_step_later():
    nan_guard = NaNGuard(torch.device("cuda"), "stop", describe)
    assert nan_guard.check(BAD.cuda(), GOOD.cuda(), batch(5, "cuda"))
    with pytest.raises(TrainError, match="step 5"):
        nan_guard.check(GOOD.cuda(), GOOD.cuda(), batch(6, "cuda"))


@pytest.mark.gpu
def test_gpu_finds_a_non_finite_loss_before_saving():
    nan_guard = NaNGuard(torch.device("cuda"), "stop", describe)
    assert nan_guard.check(BAD.cuda(), GOOD.cuda(), batch(5, "cuda"))
    with pytest.raises(TrainError, match="step 5"):
        nan_guard.check_pending()
