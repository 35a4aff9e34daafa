"""The public functions: `load`, `create`, `train`, `finetune`, and the objects they give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitrail.api.model import Model, Prediction, create, fresh, load

if TYPE_CHECKING:
    from vitrail.api.training import Run, finetune, train

__all__ = ["Model", "Prediction", "Run", "create", "finetune", "fresh", "load", "train"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "finetune", "train"):  # with data and drawing libraries, which `load` does without
        from vitrail.api import training

        return getattr(training, name)
    raise AttributeError(f"module 'vitrail.api' has no attribute {name!r}")
