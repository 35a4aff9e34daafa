"""Vision Transformers in PyTorch: create, load, train, evaluate, explain, export and serve them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.bulk.embedder import Embedder
    from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, SwinConfig, TrainConfig, ViTConfig
    from vitrail.errors import VitrailError
    from vitrail.evaluation.evaluate import evaluate
    from vitrail.evaluation.summary import Evaluation
    from vitrail.exporting.export_model import export
    from vitrail.model import Model
    from vitrail.models import BiT, Output, Swin, ViT
    from vitrail.open_model import create, create_model, load
    from vitrail.predictions import Prediction
    from vitrail.reproduction.reproduce import Reproduction, reproduce
    from vitrail.retrieval.feature_index import FeatureIndex, Match
    from vitrail.retrieval.search import search
    from vitrail.training.runs import Run, finetune, train

    __version__: str

# Public names -> their modules, which are imported on first use, so that `import vitrail` does not import torch.
_MODULE_OF = {
    "BiT": "vitrail.models",
    "BiTConfig": "vitrail.config",
    "Embedder": "vitrail.bulk.embedder",
    "Evaluation": "vitrail.evaluation.summary",
    "FeatureIndex": "vitrail.retrieval.feature_index",
    "Match": "vitrail.retrieval.feature_index",
    "Model": "vitrail.model",
    "Output": "vitrail.models",
    "Prediction": "vitrail.predictions",
    "PreprocessConfig": "vitrail.config",
    "Reproduction": "vitrail.reproduction.reproduce",
    "Run": "vitrail.training.runs",
    "StemConfig": "vitrail.config",
    "Swin": "vitrail.models",
    "SwinConfig": "vitrail.config",
    "TrainConfig": "vitrail.config",
    "ViT": "vitrail.models",
    "ViTConfig": "vitrail.config",
    "VitrailError": "vitrail.errors",
    "create": "vitrail.open_model",
    "create_model": "vitrail.open_model",
    "evaluate": "vitrail.evaluation.evaluate",
    "export": "vitrail.exporting.export_model",
    "finetune": "vitrail.training.runs",
    "load": "vitrail.open_model",
    "reproduce": "vitrail.reproduction.reproduce",
    "search": "vitrail.retrieval.search",
    "train": "vitrail.training.runs",
}

__all__ = [
    "BiT",
    "BiTConfig",
    "Embedder",
    "Evaluation",
    "FeatureIndex",
    "Match",
    "Model",
    "Output",
    "Prediction",
    "PreprocessConfig",
    "Reproduction",
    "Run",
    "StemConfig",
    "Swin",
    "SwinConfig",
    "TrainConfig",
    "ViT",
    "ViTConfig",
    "VitrailError",
    "__version__",
    "create",
    "create_model",
    "evaluate",
    "export",
    "finetune",
    "load",
    "reproduce",
    "search",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # would slow down `vitrail --help`

    try:
        return version("vitrail")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__
