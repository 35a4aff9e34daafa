"""The public functions: `load`, `create`, `train`, `finetune`, and the objects they give."""

from vitrail.api.model import Model, Prediction, create, fresh, load
from vitrail.api.training import Run, finetune, train

__all__ = ["Model", "Prediction", "Run", "create", "finetune", "fresh", "load", "train"]
