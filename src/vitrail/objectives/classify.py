"""Classification with single- or multi-label targets: class indices, smoothed or mixed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.config.train import ClassifyConfig
from vitrail.errors import ConfigError, DataError, ModelError
from vitrail.models import Net
from vitrail.objectives.base import Objective, Sums, at_least_float32, weighted_sums

# b images, K classes


class LabelLoss(nn.Module):
    """Classification loss, one value per image: b K logits, targets -> b.

    softmax: cross-entropy. sigmoid: binary cross-entropy for each class, summed over the classes, as in
    big_vision (timm and PyTorch take the mean by default). Multi-label targets always use sigmoid. Label
    smoothing s replaces targets t by (1 - s) t + s * mean(t), in both losses; for one label these are the
    usual 1 - s and s / K.

    Balanced class weights are w_k = N / (classes present * images of class k); their mean over the data is 1.
    They multiply each class's term of a target t. softmax: sum_k w_k t_k * -log p_k, as in
    `F.cross_entropy(weight=)`. sigmoid: sum_k w_k t_k * loss(target k only); weights on whole columns, as in
    BCE's `weight=`, would not move the optimum. Targets are weighted before they are smoothed, so that the
    weighted class prior is uniform for any smoothing. `F.cross_entropy(weight=, label_smoothing=)` weights the
    smoothed part too: with classes of 100 and 5 images and smoothing 0.1, the optimal probability of the first
    class for an image that certainly belongs to it would be 0.49.
    """

    class_weights: Tensor | None

    def __init__(
        self,
        config: ClassifyConfig,
        num_classes: int,
        *,
        multi_label: bool = False,
        class_counts: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__()
        if not num_classes:
            raise ModelError("a model without a head cannot be trained on labels; set num_classes.")
        self.config, self.classes, self.multi_label = config, num_classes, multi_label
        weights = (
            balanced_weights(class_counts, num_classes, multi_label) if config.class_weights == "balanced" else None
        )
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """b K; b int64 or b K -> b."""
        self._check(logits, targets)
        logits = at_least_float32(logits)
        sigmoid, weights = self.multi_label or self.config.loss == "sigmoid", self.class_weights
        if weights is not None and (sigmoid or targets.ndim > 1):
            return self._weighted(logits, targets, weights.to(logits.dtype), sigmoid)
        if sigmoid:
            expected = self.smoothed(targets).to(logits.dtype)
            return F.binary_cross_entropy_with_logits(logits, expected, reduction="none").sum(-1)
        if targets.ndim > 1:
            targets = targets.to(logits.dtype)
        loss = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.config.label_smoothing)
        return loss if weights is None else loss * weights.to(logits.dtype)[targets]

    def _weighted(self, logits: Tensor, targets: Tensor, weights: Tensor, sigmoid: bool) -> Tensor:
        soft = targets if targets.ndim > 1 else F.one_hot(targets, self.classes)
        expected = self.smoothed(soft * weights).to(logits.dtype)  # b K; a row sums to the image's weight
        if not sigmoid:
            return -(expected * logits.log_softmax(-1)).sum(-1)
        others = expected.sum(-1, keepdim=True) - expected
        return -(expected * F.logsigmoid(logits) + others * F.logsigmoid(-logits)).sum(-1)

    def smoothed(self, targets: Tensor) -> Tensor:
        """Label smoothing: b int64 or b K -> b K."""
        soft = targets if targets.ndim > 1 else F.one_hot(targets, self.classes)
        soft, share = at_least_float32(soft), self.config.label_smoothing
        return soft * (1 - share) + share * soft.mean(-1, keepdim=True) if share else soft

    def correct(self, logits: Tensor, targets: Tensor) -> Tensor:
        """b: 1 where the top-1 prediction is the label (for mixed images, the label with the larger weight), else 0.

        Multi-label: 1 where the predictions of all classes are correct.
        """
        if self.multi_label:
            return ((logits > 0) == (targets > 0.5)).all(-1).to(torch.float32)
        best = targets if targets.ndim == 1 else targets.argmax(-1)
        return (logits.argmax(-1) == best).to(torch.float32)

    def _check(self, logits: Tensor, targets: Tensor) -> None:
        hard = targets.ndim == 1 and targets.dtype == torch.int64 and not self.multi_label
        if targets.shape[:1] != logits.shape[:1] or not (hard or targets.shape == logits.shape):
            expected = (
                f"{tuple(logits.shape)} labels" if self.multi_label else f"{len(logits)} class indices or soft labels"
            )
            raise ModelError(
                f"expected {expected} for logits of shape {tuple(logits.shape)}, got {tuple(targets.shape)}."
            )


class ClassifyObjective(Objective):
    """Supervised classification.

    A distilled model has two heads; as in timm, the mean of their logits is trained.
    """

    def __init__(self, net: Net, labels: LabelLoss) -> None:
        super().__init__(net)
        self.labels = labels

    def forward(self, images: Tensor, targets: Tensor, weights: Tensor, sample_seeds: Tensor | None = None) -> Sums:
        logits = self.net(images, sample_seeds)
        return weighted_sums(
            {"loss": self.labels(logits, targets), "correct": self.labels.correct(logits, targets)}, weights
        )


def balanced_weights(class_counts: npt.ArrayLike | None, num_classes: int, multi_label: bool = False) -> Tensor:
    """K: the weight of an image of each class; 0 for classes without images."""
    if multi_label:
        raise ConfigError(
            "classify.class_weights=balanced needs one label per image, got multi-label targets; try none."
        )
    if class_counts is None:
        raise DataError("classify.class_weights=balanced needs the number of images of each class; try none.")
    counts = np.asarray(class_counts, np.float64)
    if counts.shape != (num_classes,) or not counts.sum():
        raise DataError(f"expected image counts for each of {num_classes} classes, got counts of shape {counts.shape}.")
    weights = np.divide(counts.sum(), counts * (counts > 0).sum(), out=np.zeros_like(counts), where=counts > 0)
    return torch.from_numpy(weights).to(torch.float32)
