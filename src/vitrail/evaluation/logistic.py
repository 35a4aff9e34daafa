"""Logistic regression on frozen features.

The objective is scikit-learn's: half the squared norm of the weights plus C times the summed cross-entropy; biases are
not regularized. Two classes share one row of weights. Features are standardized first, so that the same range of C
suits every model.

    fit         scikit-learn's solver, or torch's L-BFGS on a GPU and for large data; both reach the same optimum
    search_c    selects C on held-out images as in CLIP: seven values from 1e-6 to 1e6, then finer around the best
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.evaluation.features import Features
from vitrail.evaluation.fewshot import check_classes
from vitrail.runtime import warn_once

# N images, D features, K classes; R rows of weights: K, or 1 for two classes

MAX_SKLEARN_VALUES = 20_000_000
"""N x D above which torch's solver, which is faster on several cores, is used on a CPU."""
LOG10_C_RANGE = (-6.0, 6.0)
MIN_LOG10_STEP = 1 / 8
"""Final distance between two values of log10 C."""
HELD_OUT_FRACTION = 0.2
MAX_ITERATIONS = 1000

Solver = Literal["auto", "scikit-learn", "torch"]


@dataclass(frozen=True)
class LogisticClassifier:
    """A linear classifier on standardized features."""

    weights: Tensor
    """R D."""
    bias: Tensor
    """R."""
    mean: Tensor
    std: Tensor
    classes: Tensor
    """K: indices of the classes it was fitted to."""
    c: float
    """Inverse regularization strength."""
    solver: str

    def predict(self, values: Tensor) -> Tensor:
        """Q D -> Q class indices."""
        x = standardize(values.to(self.mean), self.mean, self.std)
        return self.classes[logits(x, self.weights, self.bias).argmax(1)]


def standardize(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (values - mean) / std


def logits(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Q D -> Q K; with two classes, the only row belongs to the second."""
    outputs = F.linear(x, weights, bias)
    return torch.cat([torch.zeros_like(outputs), outputs], dim=1) if len(weights) == 1 else outputs


def objective(x: Tensor, targets: Tensor, weights: Tensor, bias: Tensor, c: float) -> Tensor:
    """The minimized objective divided by C N."""
    loss = F.cross_entropy(logits(x, weights, bias), targets)
    return loss + weights.square().sum() / (2 * c * len(x))


def fit(
    train: Features, c: float, *, solver: Solver = "auto", device: torch.device | str = "cpu"
) -> LogisticClassifier:
    """Fit a classifier with this C."""
    check_c(c)
    check_classes(train)
    device = torch.device(device)
    if solver == "auto":
        small = device.type == "cpu" and train.values.numel() <= MAX_SKLEARN_VALUES
        solver = "scikit-learn" if small else "torch"
    classes, targets = train.targets.unique(return_inverse=True)
    dtype = torch.float64 if device.type == "cpu" else torch.float32
    x = train.values.to(device, dtype)
    mean, std = x.mean(0), x.std(0, correction=0)
    std = torch.where(std > 1e-6 * mean.abs().clamp(min=1e-30), std, torch.ones_like(std))
    x = standardize(x, mean, std)
    solve = _fit_sklearn if solver == "scikit-learn" else _fit_torch
    weights, bias = solve(x, targets.to(device), len(classes), c)
    return LogisticClassifier(weights, bias, mean, std, classes.to(device), c, solver)


def check_c(c: float) -> None:
    if not 0 < c < math.inf:
        raise ConfigError(f"C={c:g}: expected a number above 0.")


def _fit_sklearn(x: Tensor, targets: Tensor, num_classes: int, c: float) -> tuple[Tensor, Tensor]:
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    model = LogisticRegression(C=c, max_iter=MAX_ITERATIONS, tol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # only with a huge C, where the result is close enough
        model.fit(x.numpy(), targets.numpy())
    return torch.from_numpy(model.coef_), torch.from_numpy(np.asarray(model.intercept_))


def _fit_torch(x: Tensor, targets: Tensor, num_classes: int, c: float) -> tuple[Tensor, Tensor]:
    """L-BFGS on the whole data with a strong Wolfe line search."""
    rows = 1 if num_classes == 2 else num_classes
    weights = torch.zeros(rows, x.shape[1], dtype=x.dtype, device=x.device, requires_grad=True)
    bias = torch.zeros(rows, dtype=x.dtype, device=x.device, requires_grad=True)
    tolerance = 1e-9 if x.dtype == torch.float64 else 1e-6
    optimizer = torch.optim.LBFGS(
        [weights, bias],
        max_iter=MAX_ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=tolerance * 1e-3,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective(x, targets, weights, bias, c)
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach(), bias.detach()


def held_out_mask(targets: Tensor, fraction: float = HELD_OUT_FRACTION, seed: int = 0) -> Tensor:
    """N: which images are held out to select C: a fraction of each class that leaves at least one for training."""
    mask = torch.zeros(len(targets), dtype=torch.bool)
    for label in targets.unique().tolist():
        members = (targets == label).nonzero()[:, 0]
        order = torch.from_numpy(np.random.default_rng([seed, label]).permutation(len(members)))
        mask[members[order[: min(max(round(fraction * len(members)), 1), len(members) - 1)]]] = True
    return mask


def search_c(
    train: Features,
    validation: Features | None = None,
    *,
    solver: Solver = "auto",
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] | None = None,
) -> float:
    """The C with the best accuracy on `validation`, or else on a fifth of the training images; ties go to the smallest.

    If every class has a single image, none can be held out, and C is 1.
    """
    if validation is None:
        held_out = held_out_mask(train.targets)
        if not held_out.any():
            warn_once(["each class has one image, so none can be held out to select C: C is 1"], about=train.name)
            if advance is not None:
                advance(SEARCH_FITS)
            return 1.0
        train, validation = train.subset(~held_out), train.subset(held_out)
    accuracies: dict[float, float] = {}

    def measure(power: float) -> None:
        if LOG10_C_RANGE[0] <= power <= LOG10_C_RANGE[1] and power not in accuracies:
            predicted = fit(train, 10.0**power, solver=solver, device=device).predict(validation.values)
            accuracies[power] = float((predicted.cpu() == validation.targets).double().mean())
        if advance is not None:
            advance(1)

    step = (LOG10_C_RANGE[1] - LOG10_C_RANGE[0]) / 6
    for i in range(7):
        measure(LOG10_C_RANGE[0] + i * step)
    while step > MIN_LOG10_STEP + 1e-9:
        step /= 2
        best = _best_power(accuracies)
        measure(best - step)
        measure(best + step)
    c = 10.0 ** _best_power(accuracies)
    if is_at_range_edge(c):
        low, high = (10.0**power for power in LOG10_C_RANGE)
        edge = f"the best C, {c:g}, is at the edge of the searched range, {low:g} to {high:g}"
        warn_once([f"{edge}: a value beyond it may be better"], about=train.name)
    return c


def is_at_range_edge(c: float) -> bool:
    """Whether C is the smallest or the largest value of the search, so that a better one may lie beyond."""
    return c in [10.0**power for power in LOG10_C_RANGE]


SEARCH_FITS = 7 + 2 * math.ceil(math.log2((LOG10_C_RANGE[1] - LOG10_C_RANGE[0]) / 6 / MIN_LOG10_STEP))
"""Number of classifiers that `search_c` fits."""


def _best_power(accuracies: dict[float, float]) -> float:
    return min(accuracies, key=lambda power: (-accuracies[power], power))
