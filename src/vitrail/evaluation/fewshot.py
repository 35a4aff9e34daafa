"""The paper's few-shot measure: closed-form ridge regression from frozen features to the classes.

As in big_vision: features are standardized with the mean and standard deviation of the shots, a constant feature of 100
is the bias, the targets are +1 for the correct class and -1 for the others, and the ridge is 2**10. The smaller of the
two Gram matrices is decomposed once; each ridge then costs one matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features import Features

# N shots, D features, M = D + 1 with the bias, K classes, E eigenvalues, Q test images

SHOTS = (1, 5, 10, 25)
BIAS_FEATURE = 100.0
RIDGE = 2.0**10
MIN_STD = 1e-5
"""Added to each standard deviation, so that constant features do not cause a division by zero."""


@dataclass(frozen=True)
class RidgeClassifier:
    """A linear classifier on standardized features."""

    weights: Tensor
    """M K."""
    mean: Tensor
    std: Tensor

    def scores(self, values: Tensor) -> Tensor:
        """Q D -> Q K."""
        return _standardize(values.to(self.weights), self.mean, self.std) @ self.weights


@dataclass(frozen=True)
class RidgeSolver:
    """Eigendecomposition of the shots' Gram matrix; solves for any ridge."""

    eigenvalues: Tensor
    left: Tensor
    """M E."""
    right: Tensor
    """E K."""
    mean: Tensor
    std: Tensor

    def solve(self, ridge: float = RIDGE) -> RidgeClassifier:
        scaled = self.right / (self.eigenvalues + ridge)[:, None]
        return RidgeClassifier(self.left @ scaled, self.mean, self.std)


def decompose(values: Tensor, targets: Tensor, num_classes: int) -> RidgeSolver:
    """N D features and N class indices, computed in float64 (float32 on MPS, which has no float64)."""
    x = values.to(torch.float32 if values.device.type == "mps" else torch.float64)
    mean, std = x.mean(0), x.std(0, correction=0) + MIN_STD
    x = _standardize(x, mean, std)  # N M
    y = torch.full((len(x), num_classes), -1.0, dtype=x.dtype, device=x.device)
    y[torch.arange(len(x), device=x.device), targets.to(x.device)] = 1.0
    if len(x) <= x.shape[1]:
        eigenvalues, q = torch.linalg.eigh(x @ x.T)
        return RidgeSolver(eigenvalues, x.T @ q, q.T @ y, mean, std)
    eigenvalues, q = torch.linalg.eigh(x.T @ x)
    return RidgeSolver(eigenvalues, q, q.T @ (x.T @ y), mean, std)


def _standardize(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return torch.cat([(x - mean) / std, x.new_full((len(x), 1), BIAS_FEATURE)], dim=1)


def pick_shots(targets: Tensor, shots: int, num_classes: int, seed: int) -> Tensor:
    """Indices of `shots` images of each class, which depend only on the seed, the class and its images.

    A smaller number of shots gives a subset of a larger one.
    """
    picked = []
    for label in range(num_classes):
        members = (targets == label).nonzero()[:, 0]
        order = np.random.default_rng([seed, label]).permutation(len(members))
        picked.append(members[torch.from_numpy(order[:shots])])
    return torch.cat(picked)


def check_shots(train: Features, shots: int) -> None:
    """Raise an error unless every class has enough images and there are at least two classes."""
    if shots < 1:
        raise ConfigError(f"shots={shots}: expected at least 1 image per class.")
    counts = torch.bincount(train.targets, minlength=len(train.labels))
    check_classes(train)
    if (fewest := int(counts.min())) < shots:
        label = train.labels[int(counts.argmin())]
        images = "image" if fewest == 1 else "images"
        raise DataError(
            f"{shots} shots need {shots} images of each class, and {label!r} has {fewest or 'no'} {images} "
            f"({train.name}); try --shots {fewest or 1}{'' if fewest else ' and remove the class'}, or add images."
        )


def check_classes(train: Features) -> None:
    """Raise an error unless there are at least two classes."""
    present = train.targets.unique()
    if len(present) < 2:
        label = train.labels[int(present[0])] if len(present) else "no class"
        raise DataError(f"all {len(train):,} images are {label!r} ({train.name}); expected at least two classes.")


def predict_few_shot(train: Features, test: Features, shots: int, seed: int, *, device: torch.device) -> Tensor:
    """Q: the predicted class of each test image, by a classifier fitted to `shots` images per class."""
    check_shots(train, shots)
    chosen = train.subset(pick_shots(train.targets, shots, len(train.labels), seed))
    fit = decompose(chosen.values.to(device), chosen.targets, len(train.labels)).solve()
    return fit.scores(test.values.to(device)).argmax(1).cpu()
