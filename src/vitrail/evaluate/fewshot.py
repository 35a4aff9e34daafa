"""The paper's few-shot measure: a regularized least-squares fit from frozen features to the classes, in closed form.

As big_vision has it: each feature is shifted and scaled to mean 0 and std 1 over the shots, a
constant feature of 100 stands for the bias, a class is +1 where it is right and -1 elsewhere, and
the ridge is 2**10. The symmetric matrix of the smaller side is decomposed once; any ridge is then a
product away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evaluate.features import Features

# N shots of D features, M = D and the bias, K classes

SHOTS = (1, 5, 10, 25)
BIAS_FEATURE = 100.0
RIDGE = 2.0**10
MIN_STD = 1e-5
"""Added to each std, so that a feature which is always the same does no harm."""


@dataclass(frozen=True)
class RidgeClassifier:
    """A linear classifier, with the scaling its features need."""

    weights: Tensor
    """M K."""
    mean: Tensor
    std: Tensor

    def scores(self, values: Tensor) -> Tensor:
        """Q D -> Q K."""
        return _standardize(values.to(self.weights), self.mean, self.std) @ self.weights


@dataclass(frozen=True)
class RidgeSolver:
    """Shots whose matrix has been decomposed."""

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
    """N D features and their classes, in float64 (float32 on Apple's GPUs, which have no other)."""
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
    """So many images of each class; which, its members, the seed and the class alone decide.

    The shots of a smaller number are among those of a larger one.
    """
    picked = []
    for label in range(num_classes):
        members = (targets == label).nonzero()[:, 0]
        order = np.random.default_rng([seed, label]).permutation(len(members))
        picked.append(members[torch.from_numpy(order[:shots])])
    return torch.cat(picked)


def check_shots(train: Features, shots: int) -> None:
    """Enough of every class, and two of them at least."""
    if shots < 1:
        raise ConfigError(f"shots={shots}: wanted 1 image of each class or more.")
    counts = torch.bincount(train.targets, minlength=len(train.labels))
    check_classes(train)
    if (least := int(counts.min())) < shots:
        label = train.labels[int(counts.argmin())]
        many = "image" if least == 1 else "images"
        raise DataError(
            f"{shots} shots want {shots} of each class, and {label!r} has {least or 'no'} {many} ({train.name}); "
            f"try --shots {least or 1}{'' if least else ' and remove the class'}, or add images."
        )


def check_classes(train: Features) -> None:
    """A measure of classes needs two."""
    there = train.targets.unique()
    if len(there) < 2:
        which = train.labels[int(there[0])] if len(there) else "no class"
        raise DataError(f"all {len(train):,} images are {which!r} ({train.name}); wanted two classes or more.")


def predict_few_shot(train: Features, test: Features, shots: int, seed: int, *, device: torch.device) -> Tensor:
    """Q: the class said of each test image, learned from so many images of each class."""
    check_shots(train, shots)
    chosen = train.subset(pick_shots(train.targets, shots, len(train.labels), seed))
    fit = decompose(chosen.values.to(device), chosen.targets, len(train.labels)).solve()
    return fit.scores(test.values.to(device)).argmax(1).cpu()
