"""Accuracy of each head of a distilled model, and its predictions, for the agreement of models."""

from __future__ import annotations

from vitrail.reproduction.measures.predicted_classes import accuracy, predict_test_images
from vitrail.reproduction.measures.saved_arrays import save_arrays
from vitrail.training.runs import Run


def heads(run: Run) -> dict[str, float]:
    """`class head` and `distillation head`: test accuracy of each head alone; nothing for a model with one head.

    Arrays: `predicted`, the predicted class of each test image, and with two heads `predicted_class` and
    `predicted_distill`.
    """
    predicted, targets = predict_test_images(run, run.path / "model", heads=True)
    save_arrays(run, **{_array_name(name): classes for name, classes in predicted.items()})
    names = {"class": "class head", "distill": "distillation head"}
    return {names[name]: accuracy(classes, targets) for name, classes in predicted.items() if name in names}


def _array_name(head: str) -> str:
    return "predicted" if head == "model" else f"predicted_{head}"
