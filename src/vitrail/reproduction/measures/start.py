"""Accuracy of a pretrained model before it is fine-tuned."""

from __future__ import annotations

from pathlib import Path

from vitrail.reproduction.measures.predicted_classes import accuracy, predict_test_images
from vitrail.training.runs import Run


def start_accuracy(run: Run) -> dict[str, float]:
    """`start`: test accuracy of the model that the run starts from, at the run's image size."""
    assert run.config.init_from is not None
    predicted, targets = predict_test_images(run, Path(run.config.init_from))
    return {"start": accuracy(predicted["model"], targets)}
