"""Predictions: the logits of a classifier as named classes with probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vitrail.errors import ConfigError, ModelError, did_you_mean
from vitrail.weights.model_info import ModelInfo


@dataclass(frozen=True)
class Prediction:
    """A class and its probability."""

    label: str
    score: float
    index: int


def top_predictions(logits: Tensor, info: ModelInfo, top: int = 5) -> list[list[Prediction]]:
    """B num_classes -> the best classes of each image; all scores sum to 1 unless the model is multi-label."""
    check_top(top)
    probabilities = class_probabilities(logits, info)
    top = min(top, probabilities.shape[-1])
    scores, indices = (x[:, :top].tolist() for x in probabilities.sort(descending=True, stable=True))
    return [
        [Prediction(class_label(info, i), s, i) for s, i in zip(row_scores, row, strict=True)]
        for row_scores, row in zip(scores, indices, strict=True)
    ]


def class_probabilities(logits: Tensor, info: ModelInfo) -> Tensor:
    """B num_classes logits -> probabilities, float64; a row sums to 1 unless the model is multi-label."""
    logits = logits.cpu().double()
    return logits.sigmoid() if info.multi_label else logits.softmax(-1)


def check_top(top: int) -> None:
    if top < 1:
        raise ConfigError(f"top={top}: expected at least 1.")


def class_label(info: ModelInfo, index: int) -> str:
    """The name of a class; `class {index}` if the names are unknown."""
    if not 0 <= index < info.config.num_classes:
        raise ModelError(f"there is no class {index}: this model has {info.config.num_classes} classes.")
    return info.labels[index] if info.labels is not None else f"class {index}"


def class_index(info: ModelInfo, target: str | int) -> int:
    """Index of a class given by index or name, ignoring case."""
    if isinstance(target, int) or target.isdecimal():
        class_label(info, int(target))  # raises if there is none
        return int(target)
    if info.labels is None:
        raise ModelError(
            f"the checkpoint has no class names, so {target!r} cannot be found: pass its index, or names with "
            "--labels FILE (labels=... in Python)."
        )
    names = [label.lower().replace("_", " ") for label in info.labels]
    name = target.lower().replace("_", " ")
    if name in names:
        return names.index(name)
    matches = [i for i, label in enumerate(names) if label.split(",")[0] == name]
    if len(matches) == 1:
        return matches[0]
    raise ModelError(f"unknown class {target!r}{did_you_mean(target, info.labels)}")
