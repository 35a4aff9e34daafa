"""The public functions `load`, `create`, `train`, `finetune`, `evaluate`, `export`, and the types they return."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitrail.api.model import Model, Prediction, create, create_model, load

if TYPE_CHECKING:
    from vitrail.api.evaluation import evaluate
    from vitrail.api.exporting import export
    from vitrail.api.training import Run, finetune, train
    from vitrail.evaluate.summary import Evaluation

# Imported on first use: they need data, plotting and other libraries that `load` does not.
_LAZY = {
    "Evaluation": "evaluation",
    "Run": "training",
    "evaluate": "evaluation",
    "export": "exporting",
    "finetune": "training",
    "train": "training",
}

__all__ = [
    "Evaluation",
    "Model",
    "Prediction",
    "Run",
    "create",
    "create_model",
    "evaluate",
    "export",
    "finetune",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"vitrail.api.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'vitrail.api' has no attribute {name!r}")
