"""Loss and accuracy of masked patch prediction and SimMIM on held-out images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitrail import rng
from vitrail.data.batch import Batch
from vitrail.data.preprocess import Preprocess
from vitrail.errors import DataError
from vitrail.evaluation.accuracy import Collective
from vitrail.models.base import eval_mode
from vitrail.runtime import autocast


@dataclass(frozen=True, kw_only=True)
class MaskedPredictionScores:
    """Scores of masked patch prediction."""

    loss: float
    """Mean over images, as in training."""
    accuracy: float | None
    """Fraction of patches whose mean color is predicted correctly; None where pixels are predicted."""
    count: int
    """Number of images."""

    def to_dict(self) -> dict[str, float]:
        """The values that are logged."""
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        return {"loss": self.loss, **accuracy, "count": self.count}


def measure_masked_prediction(
    objective: nn.Module,
    batches: Iterable[Batch],
    *,
    preprocess: Preprocess,
    seed: int,
    precision: str = "float32",
    reduce: Collective | None = None,
) -> MaskedPredictionScores:
    """Evaluate a self-supervised objective on every image once.

    The corrupted patches depend only on the image's index, so measurements are comparable. `reduce` sums a tensor over
    processes.
    """
    parts: list[Tensor] = []
    names: list[str] = []
    with eval_mode(objective), torch.no_grad():
        dtype = next(p.dtype for p in objective.parameters())
        for batch in batches:
            images = preprocess.normalize(batch.images).to(dtype)
            keys = rng.sample_seeds(seed, 0, batch.indices.clamp(min=0).numpy())
            with autocast(precision, images.device):
                found = objective(images, batch.targets, batch.weights, rng.seeds_to_tensor(keys, images.device))
            names = list(found)
            parts.append(torch.stack([batch.weights.sum().to(found["loss"]), *found.values()]))
    sums = torch.stack(parts).cpu().double().sum(0)  # the only synchronization with a GPU
    count, *totals = (sums if reduce is None else reduce(sums)).tolist()
    if count == 0:
        raise DataError("there are no readable images to evaluate.")
    means = {name: total / count for name, total in zip(names, totals, strict=True)}
    return MaskedPredictionScores(loss=means["loss"], accuracy=means.get("correct"), count=int(count))
