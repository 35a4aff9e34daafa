"""The public functions: `load`, `create`, `train`, `finetune`, `evaluate`, and the objects they give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrail.api.model import Model, Prediction, create, fresh, load

if TYPE_CHECKING:
    from vitrail.api.evaluation import evaluate
    from vitrail.api.training import Run, finetune, train
    from vitrail.evaluate.evaluation import Evaluation

__all__ = ["Evaluation", "Model", "Prediction", "Run", "create", "evaluate", "finetune", "fresh", "load", "train"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "finetune", "train"):  # with data and drawing libraries, which `load` does without
        from vitrail.api import training

        return getattr(training, name)
    if name in ("Evaluation", "evaluate"):
        from vitrail.api import evaluation

        return getattr(evaluation, name)
    raise AttributeError(f"module 'vitrail.api' has no attribute {name!r}")
