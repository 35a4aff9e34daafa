"""How well corrupted patches are guessed on images that are not learned from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail import rng
from vitrail.data.batch import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.errors import DataError
from vitrail.evaluate.accuracy import Collective
from vitrail.models.base import eval_mode
from vitrail.runtime import autocast


@dataclass(frozen=True, kw_only=True)
class MaskedPredictionScores:
    """What is measured where there are no classes."""

    loss: float
    """Mean over the images, as in training."""
    accuracy: float | None
    """Share of the colors guessed right; None where pixels are guessed."""
    count: int
    """Images measured."""

    def to_dict(self) -> dict[str, float]:
        """What is logged."""
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        return {"loss": self.loss, **accuracy, "count": self.count}


def measure_masked_prediction(
    learner: nn.Module,
    batches: Iterable[Batch],
    *,
    preprocess: Preprocess,
    seed: int,
    precision: str = "float32",
    reduce: Collective | None = None,
) -> MaskedPredictionScores:
    """Every image once, in evaluation mode; which of its patches are corrupted, its number alone decides.

    So one measurement can be held against the next. `reduce` sums a tensor over processes.
    """
    parts: list[Tensor] = []
    names: list[str] = []
    with eval_mode(learner), torch.no_grad():
        dtype = next(p.dtype for p in learner.parameters())
        for batch in batches:
            images = preprocess.normalize(batch.images).to(dtype)
            keys = rng.sample_seeds(seed, 0, batch.indices.clamp(min=0).numpy())
            with autocast(precision, images.device):
                found = learner(images, batch.targets, batch.weights, rng.seeds_to_tensor(keys, images.device))
            names = list(found)
            parts.append(torch.stack([batch.weights.sum().to(found["loss"]), *found.values()]))
    sums = torch.stack(parts).cpu().double().sum(0)  # only now, so that a GPU is never waited for
    count, *totals = (sums if reduce is None else reduce(sums)).tolist()
    if count == 0:
        raise DataError("there is no image to measure on that can be read.")
    means = {name: total / count for name, total in zip(names, totals, strict=True)}
    return MaskedPredictionScores(loss=means["loss"], accuracy=means.get("correct"), count=int(count))
