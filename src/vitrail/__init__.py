"""Vision Transformers in PyTorch: create, load, train, evaluate, explain, export and serve them."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.api import (
        Evaluation,
        Model,
        Prediction,
        Run,
        create,
        create_model,
        evaluate,
        export,
        finetune,
        load,
        train,
    )
    from vitrail.config import BiTConfig, PreprocessConfig, StemConfig, TrainConfig, ViTConfig
    from vitrail.errors import VitrailError
    from vitrail.models import BiT, Output, ViT

    __version__: str

# The module of each public name. They are imported on first use, so that `import vitrail` does not import torch.
_MODULE_OF = {
    "Evaluation": "vitrail.api",
    "Model": "vitrail.api",
    "Prediction": "vitrail.api",
    "Run": "vitrail.api",
    "create": "vitrail.api",
    "evaluate": "vitrail.api",
    "export": "vitrail.api",
    "finetune": "vitrail.api",
    "create_model": "vitrail.api",
    "load": "vitrail.api",
    "train": "vitrail.api",
    "BiTConfig": "vitrail.config",
    "PreprocessConfig": "vitrail.config",
    "StemConfig": "vitrail.config",
    "TrainConfig": "vitrail.config",
    "ViTConfig": "vitrail.config",
    "VitrailError": "vitrail.errors",
    "BiT": "vitrail.models",
    "Output": "vitrail.models",
    "ViT": "vitrail.models",
}

__all__ = [
    "BiT",
    "BiTConfig",
    "Evaluation",
    "Model",
    "Output",
    "Prediction",
    "PreprocessConfig",
    "Run",
    "StemConfig",
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
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        package = sys.modules.get(f"vitrail.{name}")
        # `vitrail.train` is both a function and a package: its modules stay accessible as vitrail.train.loop.
        if package is not None:
            value.__dict__.update({key: member for key, member in vars(package).items() if not key.startswith("_")})
        return value
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # would slow down `vitrail --help`

    try:
        return version("vitrail")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """The type of this package: keeps `vitrail.train`, `evaluate` and `export` bound to the functions."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _MODULE_OF or not isinstance(value, ModuleType):  # as on import of vitrail/train
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
